"""Many ranks in one process: a mailbox in place of a network, for notebooks and tests.

    world = VirtualRanks(4)
    exchanges = [AllToAll(ParallelConfig(dp=4), 16, 2, 64, 8, group=world.rank(i)) for i in range(4)]

A send puts the message in the mailbox and returns, so one thread may play all ranks in turn (each half on every rank,
then the next half), or each rank may have a thread: a receive waits until its messages are there.

Given a library of kernels, `VirtualRanks(4, library)`, they move the data instead; see virtual_kernels.py.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from moelab.comm.errors import WireError
from moelab.comm.spec import ExchangeSpec, check_same
from moelab.comm.wire import Tag
from moelab.config import ConfigError

if TYPE_CHECKING:
    from moelab.comm.library import Library


@dataclass
class Channel:
    """What the ranks of one exchange share: the mailbox, or the memory of kernels; what they agreed on; who has left.
    Guarded by `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    mail: dict[tuple[int, int, Tag], Tensor] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)  # rank -> how
    shared: object = None  # of virtual_kernels.py
    agreed: dict[int, list[str]] = field(default_factory=dict)  # rank -> its settings, each time
    difference: str | None = None  # between two of them

    def agree(self, rank: int, settings: str) -> None:
        """Compare with what others gave before. Nobody waits, as one thread may play all ranks: those who agreed
        earlier learn of a difference from `check`."""
        with self.changed:
            ours = self.agreed.setdefault(rank, [])
            ours.append(settings)
            for peer, theirs in self.agreed.items():
                if len(theirs) >= len(ours) and self.difference is None:
                    try:
                        check_same(rank, settings, peer, theirs[len(ours) - 1])
                    except ConfigError as error:
                        self.difference = str(error)
                        self.changed.notify_all()
            self.check()

    def check(self) -> None:
        """Raise `ConfigError` where two ranks have not agreed."""
        if self.difference is not None:
            raise ConfigError(self.difference)

    def leave(self, rank: int, how: str) -> None:
        with self.changed:
            self.left[rank] = how
            self.changed.notify_all()


class VirtualRanks:
    """`size` ranks in this process. The i-th exchange that each rank constructs is the same exchange.

    `library`: kernels that move the data; each rank then needs a thread, unless `one_launch` is False (the emulation).
    """

    def __init__(self, size: int, library: Library | None = None, one_launch: bool = True) -> None:
        if size < 1:
            raise ConfigError(f"size is {size}: give a positive number of ranks")
        self.size, self.library, self.one_launch = size, library, one_launch
        self._lock = threading.Lock()
        self._opened = [0] * size
        self._channels: dict[int, Channel] = {}

    def rank(self, index: int) -> VirtualRank:
        """The handle to pass as `group`."""
        if not 0 <= index < self.size:
            raise ConfigError(f"rank is {index}: legal are 0…{self.size - 1}")
        return VirtualRank(self, index)

    def join(self, rank: int, spec: ExchangeSpec) -> Channel:
        with self._lock:
            number = self._opened[rank]
            channel = self._channels.setdefault(number, Channel())
            self._opened[rank] += 1
            if min(self._opened) > number:
                del self._channels[number]  # all have it: the exchanges alone keep it alive
        channel.agree(rank, spec.to_json())
        return channel


@dataclass(frozen=True)
class VirtualRank:
    """One rank of `VirtualRanks`."""

    world: VirtualRanks
    index: int


class VirtualWire:
    """A `Wire` through shared memory."""

    name = "virtual"

    def __init__(self, group: VirtualRank, spec: ExchangeSpec) -> None:
        self.rank, self.size = group.index, group.world.size
        self.sent_bytes = 0
        self._channel = group.world.join(self.rank, spec)
        self._sizes: dict[Tag, dict[int, int]] = {}

    def agree(self, settings: str, deadline: float) -> None:
        self._channel.agree(self.rank, settings)

    def send(self, tag: Tag, messages: dict[int, Tensor]) -> None:
        with self._channel.changed:
            self._channel.check()
            for peer, message in messages.items():
                if peer in self._channel.left:
                    raise WireError(peer, self._channel.left[peer])
                self._channel.mail[self.rank, peer, tag] = message
                self.sent_bytes += message.numel()
            self._channel.changed.notify_all()

    def post(self, tag: Tag, sizes: dict[int, int]) -> None:
        self._sizes[tag] = sizes

    def wait(self, tag: Tag, deadline: float) -> dict[int, Tensor]:
        channel, arrived = self._channel, {}
        with channel.changed:
            start = time.monotonic()
            for peer, size in self._sizes.pop(tag).items():
                key = peer, self.rank, tag
                # Called here at once, and by wait_for only before the next turn of the loop.
                channel.changed.wait_for(
                    lambda peer=peer, key=key: key in channel.mail or peer in channel.left or channel.difference,
                    max(0.0, deadline - time.monotonic()),
                )
                channel.check()
                if key not in channel.mail:
                    waited = f"nothing within {time.monotonic() - start:.1f} s"
                    raise WireError(peer, channel.left.get(peer, waited))
                message = channel.mail.pop(key)
                if message.numel() != size:
                    raise WireError(peer, f"{message.numel()} bytes instead of {size}")
                arrived[peer] = message
        return arrived

    def drain(self, tag: Tag, deadline: float) -> None:
        """Nothing to do: a message is the peer's as soon as it is sent."""

    def close(self, failed: bool) -> None:
        how = "the peer failed and left" if failed else "the peer closed its exchange"
        self._channel.leave(self.rank, how)
