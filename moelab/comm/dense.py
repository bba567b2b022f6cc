"""The exchange as torch users make it, with `all_to_all_single`: what `AllToAll` is compared with.

- *padded*: every pair of ranks exchanges a block of the worst case, so that nothing needs to know the routing. A rank
  may send ceil(M/tp) tokens to min(K, L) experts of another, and get M·min(K, L) outputs back.
- *split*: exact sizes. They must be known on the host before the call: a first all-to-all exchanges the counts and
  the host waits for it.

Both are a `Wire` under the same packing, so `AllToAll(…, group=Dense(padded=True))` has the same results, bit for
bit, and only the movement differs. Unlike the others it uses the caller's group itself, and its collectives involve
every rank at every step, so a rank without tokens still takes part in each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.comm.errors import WireError
from moelab.comm.roll_call import meet, reason_of, seconds_until
from moelab.comm.spec import ExchangeSpec
from moelab.comm.wire import Tag


@dataclass(frozen=True)
class Dense:
    """Ask `AllToAll` for dense collectives over `group` (None: the world)."""

    padded: bool = True
    group: dist.ProcessGroup | None = None


def padded_bytes(spec: ExchangeSpec, part: str) -> int:
    """Bytes of one pair's block of a part in the padded exchange."""
    tokens, experts = spec.max_tokens, min(spec.top_k, spec.local_experts)
    if part == "counts":
        return spec.header_bytes
    if part == "rows":
        return -(-tokens // spec.parallel.tp) * experts * spec.wire_row_bytes
    return tokens * experts * spec.output_row_bytes


class DenseWire:
    """A `Wire` of one `all_to_all_single` for each tag."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        padded: bool,
        spec: ExchangeSpec,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.name = "dense-padded" if padded else "dense-split"
        self.rank, self.size = group.rank(), group.size()
        self.sent_bytes = 0
        self._group, self._padded, self._spec, self._device = group, padded, spec, device
        self._staged = torch.device("cpu") if "nccl" not in str(dist.get_backend_config(group)) else device
        self._roll = meet(group, spec, timeout_s)
        self._sending: dict[Tag, dict[int, Tensor]] = {}
        self._coming: dict[Tag, tuple[dist.Work, Tensor, Tensor, list[int], dict[int, int]]] = {}

    def agree(self, settings: str, deadline: float) -> None:
        self._roll.agree(settings, deadline)

    def send(self, tag: Tag, messages: dict[int, Tensor]) -> None:
        self._sending[tag] = messages

    def post(self, tag: Tag, sizes: dict[int, int]) -> None:
        messages = self._sending.pop(tag)
        if self._padded:
            ours = theirs = [padded_bytes(self._spec, tag.part)] * self.size
        else:
            ours = [len(messages.get(peer, ())) for peer in range(self.size)]
            theirs = [sizes.get(peer, 0) for peer in range(self.size)]
        # The padding is never read; torch users send whatever is there, so do we.
        block = torch.empty(sum(ours), dtype=torch.uint8, device=self._staged)
        for peer, part in enumerate(block.split(ours)):
            if peer in messages:
                part[: len(messages[peer])] = messages[peer]
        arriving = torch.empty(sum(theirs), dtype=torch.uint8, device=self._staged)
        work = dist.all_to_all_single(arriving, block, theirs, ours, group=self._group, async_op=True)
        self._coming[tag] = work, block, arriving, theirs, sizes
        self.sent_bytes += sum(ours) - ours[self.rank]

    def wait(self, tag: Tag, deadline: float) -> dict[int, Tensor]:
        work, _, arriving, theirs, sizes = self._coming.pop(tag)
        start = time.monotonic()
        try:
            work.wait(seconds_until(deadline))
        except RuntimeError as error:
            others = tuple(peer for peer in range(self.size) if peer != self.rank)
            seen = f"an unfinished collective after {time.monotonic() - start:.1f} s ({reason_of(error)})"
            raise WireError(others, seen) from error
        blocks = arriving.to(self._device).split(theirs)
        return {peer: blocks[peer][:size] for peer, size in sizes.items()}

    def drain(self, tag: Tag, deadline: float) -> None:
        """Nothing to do: a collective that has finished has sent."""

    def close(self, failed: bool) -> None:
        self._sending.clear()
        self._coming.clear()
