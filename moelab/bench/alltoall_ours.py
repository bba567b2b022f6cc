"""`AllToAll` over our kernels, as `moelab bench alltoall` drives it: fused launches, and the four halves.

nvshmem         as it chooses for itself: packets for few tokens, flags for many
nvshmem-flags   flags always
nvshmem-puts    NVSHMEM's puts and signals to all other ranks, the path between nodes, here over NVLink
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.bench.alltoall_case import ROUNDED_TWICE, Case, rounded_once
from moelab.bench.alltoall_setting import Copies
from moelab.comm import AllToAll, Nvshmem

WAIT_S = 20.0  # a bench would rather fail soon


class Ours:
    """One configuration: `name` of those above, `returns` and `blocks` (0: the library chooses) as in `Nvshmem`.

    `depth` slots, so that so many dispatches can be in flight; inputs and outputs are the same in all of them."""

    def __init__(self, name: str, case: Case, returns: str, blocks: int, depth: int) -> None:
        setting = case.setting
        self.case, self.returns, self.depth = case, returns, depth
        others = tuple(rank for rank in range(setting.ep) if rank != case.rank)
        options = Nvshmem(
            returns=returns, num_blocks=blocks, packets=name == "nvshmem",
            puts_to=others if name == "nvshmem-puts" else (),
        )  # fmt: skip
        self.exchange = AllToAll(
            setting.parallel(), setting.experts, setting.top_k, setting.hidden, setting.tokens, setting.payload,
            slots=depth, scales="column_tma" if setting.payload == "fp8" else "row",
            group=options, device=case.device, timeout_s=WAIT_S,
        )  # fmt: skip
        self.params = {"returns": returns, "blocks": blocks}
        self.y = case.padded_outputs()
        self.out = torch.full((setting.tokens, setting.hidden), torch.nan, dtype=torch.bfloat16, device=case.device)
        self._inputs = case.x, case.ids, case.weights, case.scales
        self._handles: dict[int, object] = {}
        self._received: dict[int, tuple[Tensor, Tensor | None, Tensor]] = {}  # by slot, since `poison`

    def dispatch(self, slot: int = 0) -> None:
        self._handles[slot], *received = self.exchange.dispatch(*self._inputs)
        self._received[slot] = tuple(received)

    def combine(self, slot: int = 0) -> None:
        self.exchange.combine(self._handles.pop(slot), self.y, self.out)

    def pair(self) -> None:
        self.dispatch()
        self.combine()

    def pair_split(self) -> None:
        exchange = self.exchange
        handle = exchange.dispatch_send(*self._inputs)
        self._received[0] = exchange.dispatch_recv(handle)
        exchange.combine_send(handle, self.y)
        exchange.combine_recv(handle, self.out)

    def check(self) -> None:
        """What came and what was summed since `poison`. Raises WrongResult, or what the exchange itself reports."""
        self.exchange.check()
        for received in self._received.values():
            self.case.check_rows(*received)
        self.case.check_out(self.out, self.bound)

    @property
    def bound(self) -> float:
        return ROUNDED_TWICE if self.returns == "bf16" else rounded_once(self.case.setting.top_k)

    def poison(self) -> None:
        """So that only what comes from now on can pass `check`."""
        self.out.fill_(torch.nan)
        for rows, _, counts in self._received.values():
            rows.view(torch.uint8).fill_(0xFF)
            counts.fill_(-1)
        self._received.clear()  # capturing or calling fills it anew

    def sent_bytes(self, copies: Copies) -> tuple[int, int]:
        """Payload alone: packets put a number beside every 12 bytes, flags one beside every token."""
        if self.returns == "rows":
            return copies.sent_bytes("rank", "rows")
        return copies.sent_bytes("rank", "sum", 4 if self.returns == "f32" else 2)

    def close(self) -> None:
        self.exchange.close()
