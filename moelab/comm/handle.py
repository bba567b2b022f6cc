"""`Handle`: one exchange in flight, as the caller holds it from `dispatch_send` to `combine_recv`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moelab.comm.backend import Exchange
from moelab.comm.errors import CommError

if TYPE_CHECKING:
    from moelab.comm.alltoall import AllToAll

HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


class Handle:
    """One exchange in flight, from dispatch_send to combine_recv."""

    def __init__(
        self, owner: AllToAll, number: int, slot: int, exchange: Exchange, x_shape: torch.Size, next_half: str
    ) -> None:
        self.number, self.slot = number, slot
        self._owner, self._exchange, self._x_shape = owner, exchange, x_shape
        self._next: str | None = next_half  # None once combine_recv is through

    @property
    def all_idle(self) -> bool:
        """Whether no rank had work when it sent; the same on every rank. Known from dispatch_recv on; over nvshmem,
        reading it waits for the device, and another exchange in the slot takes its place."""
        self._need_counts("all_idle")
        return self._exchange.all_idle

    @property
    def idle(self) -> Tensor | bool:
        """`all_idle`, and nothing waits: over nvshmem the int32 [1] on the device that holds it, from dispatch_recv on
        until another exchange in the slot; also for a captured exchange, which every replay repeats."""
        self._need_counts("idle")
        return self._exchange.idle

    @property
    def starts(self) -> Tensor | None:
        """[L] int32, first row of each local expert (contiguous_128; None when padded). Known from dispatch_recv on."""
        self._need_counts("starts")
        return self._exchange.starts

    def _need_counts(self, what: str) -> None:
        if self._next == "dispatch_recv":
            raise CommError(f"{what} of exchange {self.number} is not known yet: call dispatch_recv first")

    def __repr__(self) -> str:
        return f"<Handle of exchange {self.number}, slot {self.slot}, next: {self._next or 'done'}>"
