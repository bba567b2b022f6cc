"""Wires over torch.distributed: gloo point-to-point with tags, and NCCL, which has none.

Each exchange has a process group of its own, so that its messages can meet no other's and a timeout, on which gloo
closes every connection of the group, leaves the caller's group as it was.

*gloo.* The group is built straight on the caller's store instead of with `dist.new_group`, which is collective over
the whole world and numbers groups in a registry that sub-groups can make differ between ranks. Counts and outputs
have sizes known beforehand: their receives are posted as early as their sends, so the transport moves them while the
caller computes. With tensors on a GPU the messages are staged through host memory; several ranks may then share one
GPU.

*NCCL.* Messages of a pair match by order alone. A rank's order of `post` calls is its order of calls of the exchange,
the same on every rank, but the size of rows is known to the receiver only once it has the counts: so `send` merely
keeps the messages, and `post` issues sends and receives of a tag as one group.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.comm.errors import CommError, WireError
from moelab.comm.roll_call import meet, reason_of, seconds_until
from moelab.comm.spec import ExchangeSpec
from moelab.comm.wire import Tag

# For the group's own limit, which must never strike before ours does: torch then tears the process down.
_NEVER = timedelta(days=7)


class GlooWire:
    """A `Wire` over gloo. Constructing it is collective over `group`; closing it is local."""

    name = "torch-gloo"

    def __init__(self, group: dist.ProcessGroup, spec: ExchangeSpec, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.sent_bytes = 0
        self._device = device
        self._roll = meet(group, spec, timeout_s)
        try:
            self._group = dist.ProcessGroupGloo(self._roll.store, self.rank, self.size, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise WireError(tuple(p for p in range(self.size) if p != self.rank), reason_of(error)) from error
        self._sending: dict[Tag, list[tuple[int, dist.Work, Tensor]]] = {}
        self._coming: dict[Tag, list[tuple[int, dist.Work, Tensor]]] = {}

    def agree(self, settings: str, deadline: float) -> None:
        self._roll.agree(settings, deadline)

    def send(self, tag: Tag, messages: dict[int, Tensor]) -> None:
        # A work that is dropped before it is done takes its message with it: keep both.
        works = self._sending.setdefault(tag, [])
        for peer, message in messages.items():
            message = message.cpu()
            try:
                works.append((peer, self._group.send([message], peer, tag.number), message))
            except RuntimeError as error:
                raise WireError(peer, reason_of(error)) from error
            self.sent_bytes += message.numel()

    def post(self, tag: Tag, sizes: dict[int, int]) -> None:
        works = self._coming.setdefault(tag, [])
        for peer, size in sizes.items():
            message = torch.empty(size, dtype=torch.uint8)
            try:
                works.append((peer, self._group.recv([message], peer, tag.number), message))
            except RuntimeError as error:
                raise WireError(peer, reason_of(error)) from error

    def wait(self, tag: Tag, deadline: float) -> dict[int, Tensor]:
        self._finish(self._coming[tag], deadline)
        return {peer: message.to(self._device) for peer, _, message in self._coming.pop(tag)}

    def drain(self, tag: Tag, deadline: float) -> None:
        self._finish(self._sending.get(tag, []), deadline)
        self._sending.pop(tag, None)

    @staticmethod
    def _finish(works: list[tuple[int, dist.Work, Tensor]], deadline: float) -> None:
        for peer, work, _ in works:
            try:
                work.wait(seconds_until(deadline))
            except RuntimeError as error:
                raise WireError(peer, reason_of(error)) from error

    def close(self, failed: bool) -> None:
        # Dropping the group closes its connections, which is what tells the peers after a failure.
        self._sending.clear()
        self._coming.clear()
        self._group = None


class NcclWire:
    """A `Wire` over NCCL. Constructing and closing it are collective over the world."""

    name = "torch-nccl"

    def __init__(self, group: dist.ProcessGroup, spec: ExchangeSpec, device: torch.device, timeout_s: float) -> None:
        if group.size() != dist.get_world_size():
            raise CommError(
                f"group has {group.size()} of {dist.get_world_size()} ranks: over NCCL all are "
                "needed; leave group=None, or start as many ranks as the exchange has"
            )
        self.rank, self.size = group.rank(), group.size()
        self.sent_bytes = 0
        self._device, self._ranks = device, dist.get_process_group_ranks(group)
        self._roll = meet(group, spec, timeout_s)
        self._group = dist.new_group(self._ranks, backend="nccl", timeout=_NEVER)
        self._sending: dict[Tag, dict[int, Tensor]] = {}
        self._coming: dict[Tag, tuple[list[dist.Work], dict[int, Tensor], tuple[int, ...]]] = {}
        self._connect(time.monotonic() + timeout_s)

    def _connect(self, deadline: float) -> None:
        """One byte to and from everybody: NCCL opens its connections at first use, which may block."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        hello = Tag(0, "counts")
        self.send(hello, {peer: torch.zeros(1, dtype=torch.uint8, device=self._device) for peer in peers})
        self.post(hello, dict.fromkeys(peers, 1))
        self.wait(hello, deadline)
        self.sent_bytes = 0

    def agree(self, settings: str, deadline: float) -> None:
        self._roll.agree(settings, deadline)

    def send(self, tag: Tag, messages: dict[int, Tensor]) -> None:
        self._sending[tag] = messages

    def post(self, tag: Tag, sizes: dict[int, int]) -> None:
        messages = self._sending[tag]
        arriving = {peer: torch.empty(size, dtype=torch.uint8, device=self._device) for peer, size in sizes.items()}
        ops = [dist.P2POp(dist.isend, m, self._ranks[peer], self._group) for peer, m in messages.items()]
        ops += [dist.P2POp(dist.irecv, m, self._ranks[peer], self._group) for peer, m in arriving.items()]
        works = dist.batch_isend_irecv(ops) if ops else []
        self._coming[tag] = works, arriving, tuple(sorted(messages.keys() | arriving.keys()))
        self.sent_bytes += sum(message.numel() for message in messages.values())

    def wait(self, tag: Tag, deadline: float) -> dict[int, Tensor]:
        works, arriving, peers = self._coming.pop(tag)
        start = time.monotonic()
        for work in works:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    peer = peers[0] if len(peers) == 1 else peers
                    raise WireError(peer, f"an unfinished NCCL group after {time.monotonic() - start:.1f} s")
                time.sleep(20e-6)
            work.wait()  # done: only makes the current stream depend on it
        self._sending.pop(tag)
        return arriving

    def drain(self, tag: Tag, deadline: float) -> None:
        """Nothing to do: the sends of a tag were in the group that `wait` saw finished."""

    def close(self, failed: bool) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        if failed:
            # Kernels of the unfinished group spin on the device; abort makes them leave. Destroying would wait for
            # them.
            dist.distributed_c10d._abort_process_group(group)
        else:
            dist.destroy_process_group(group)


def unavailable_gloo() -> str | None:
    """Why gloo cannot be used, or None."""
    if not dist.is_available():
        return "this torch was built without torch.distributed: install the official wheel"
    return None if dist.is_gloo_available() else "this torch was built without gloo: install the official wheel"


def unavailable_nccl() -> str | None:
    """Why NCCL cannot be used, or None."""
    if not dist.is_available() or not dist.is_nccl_available():
        return "this torch was built without NCCL: install a CUDA wheel of torch"
    return None if torch.cuda.is_available() else "no CUDA GPU is visible to torch"
