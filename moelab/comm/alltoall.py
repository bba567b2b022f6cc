"""`AllToAll`: tokens to the ranks of their experts and back, in four halves.

After routing, every rank has a different number of tokens for every other. A dense all-to-all pads all pairs to the
worst case, or first exchanges the sizes and waits for them on the host. Here, following "Efficient and portable
mixture-of-experts communication" (2025-04-02), dispatch and combine are each split into a send that returns at once
and a receive that waits, so that the caller computes in between:

    dispatch_send ─ shared expert ─ dispatch_recv ─ experts ─ combine_send ─ other micro-batch ─ combine_recv

**What makes it right without agreement.** Ranks agree once, at construction, on M = `max_tokens`, the most tokens a
DP group may send. From then on nothing is negotiated:

- *Private regions.* Whatever a rank sends for an exchange lands where nobody else writes: a message of its own per
  (sender, receiver, exchange) here, a region per (sender, local expert) in peer memory for kernels. M bounds it, so
  the sender computes the address alone and never asks.
- *Counts first.* Every rank tells every other, in every exchange, how many rows it sends for each local expert. The
  message itself is the signal: zero rows is a message that says zero, which differs from nothing sent yet. (A flag in
  memory has no such arrival, which is why kernels write count + 1.) A receive returns when all counts are there and
  all rows that they announce; it therefore really waits, for exactly what it needs.
- *One barrier, where it is oldest.* Kernels that write into a fixed region must not begin the next exchange of a slot
  while a slow rank still reads this one; the original has its one barrier in combine-receive. Here a rank says
  `entered` when it begins combine_send, having read all that was dispatched to it, and the others look for that at the
  start of the slot's next dispatch_send: a whole exchange later, so that nobody waits for it in a steady run. Every
  other region is guarded by data that is waited for anyway (kernels/rank.cuh). Backends that pass messages need none:
  each carries its exchange's number and waits until the receiver asks for it. What bounds memory is that combine_recv
  waits until our own sends have left.
- *Idle groups.* A DP group without requests makes the same calls with no tokens. The bit `has_work` beside the counts
  tells all ranks at once, in the exchange that they make anyway, whether anybody had work.

**Divided sending.** All TP ranks of a DP group hold the same tokens: TP rank i sends tokens i, i + tp, …; the outputs
go to every one of them, so each ends with the whole result.

**One order.** Rows of an expert stand by DP group, then token, and the sum over k runs in order of k in float32, each
product rounded before it is added, with one rounding at the end: the same input gives the same bits, whatever the
number of ranks and whichever backend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.comm.backend import Backend, available, open_backend
from moelab.comm.checks import check_dispatch, check_out, check_y
from moelab.comm.dense import Dense
from moelab.comm.errors import CommError, ExchangeTimeout, WireError
from moelab.comm.handle import HALVES, Handle
from moelab.comm.nvshmem import Nvshmem
from moelab.comm.spec import ExchangeSpec
from moelab.comm.stand_in import StandIn
from moelab.comm.virtual import VirtualRank
from moelab.config import ConfigError, ParallelConfig


class AllToAll:
    """Dispatch and combine over `parallel.ep` ranks. Construction and `close` are collective, the halves are too.

    Symbols: T tokens of this rank's DP group in this exchange, M `max_tokens`, H hidden, E `num_experts`, K `top_k`,
    L = E/ep, S = ceil(H/128).

    - `payload`: dtype of the dispatched values: "bf16", "fp8" (e4m3, with float32 scales, one for 128 values) or
      "f32" (outputs then float32 as well; for the reference engine).
    - `slots`: how many exchanges may be in flight at once.
    - `layout`: "expert_padded", rows [L, dp·M, H]; or "contiguous_128", rows [capacity, H] in which each expert
      starts at a multiple of 128 (`handle.starts`, `layout.grouped_layout(counts, capacity)`).
    - `scales`: format of the received scales, see `layout`: "row", "column_tma", "ue8m0".
    - `group`: a torch.distributed process group (NCCL on GPUs, else gloo; gloo with `device="cuda"` is staged through
      the host), None for the world, `Nvshmem(group)` for our kernels (nvshmem.py, with the choices they have),
      `VirtualRanks(ep).rank(i)`, or a `StandIn` for all other ranks (stand_in.py). The caller's group itself is never
      used to send, except by `Dense` (dense.py), the all_to_all_single to compare with.
    - `device`: where all tensors live; by default the current GPU with NCCL and kernels, else the CPU.
    - `timeout_s`: limit of each half's waits, of the construction and of `close`.

    Over nvshmem a half is one launch on the current stream: it returns at once, may be captured in a CUDA graph, and
    what goes wrong on the device is raised by a later call (`check`).

    Raises `ConfigError` for arguments that no backend serves or that differ between ranks.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        payload: str = "bf16",
        slots: int = 2,
        layout: str = "expert_padded",
        scales: str = "row",
        group: dist.ProcessGroup | Dense | Nvshmem | VirtualRank | StandIn | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.spec = ExchangeSpec(parallel, num_experts, top_k, hidden, max_tokens, payload, slots, layout, scales)
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ConfigError(f"timeout_s is {timeout_s!r}: give a positive number of seconds; every wait must end")
        device = None if device is None else torch.empty(0, device=device).device  # "cuda" -> the current GPU
        self._free = list(range(slots))
        self._in_flight: list[Handle] = []
        self._started = 0
        self.group = group  # as it was given
        self._dead: str | None = None  # why nothing but close() is allowed
        self._closed = False
        try:
            self._backend: Backend = open_backend(group, self.spec, device, timeout_s)
        except WireError as error:
            expected = "the same construction on every rank"
            raise ExchangeTimeout(_rank(group), error.peer, "construction", expected, error.seen) from error

    @staticmethod
    def available() -> dict[str, str]:
        """{backend: "ok", or why it cannot run and what to do}."""
        return available()

    @property
    def rank(self) -> int:
        return self._backend.rank

    @property
    def device(self) -> torch.device:
        return self._backend.device

    @property
    def backend(self) -> str:
        """Which backend moves the data, a key of `available()`."""
        return self._backend.name

    @property
    def on_device(self) -> bool:
        """Whether the halves wait on the device alone, so that they can be captured in a CUDA graph."""
        return not self._backend.reads_values and self.device.type == "cuda"

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent to other ranks since construction: counts, rows and outputs."""
        return self._backend.sent_bytes

    def agree(self, **settings: object) -> None:
        """Raise `ConfigError` on every rank unless all give the same settings, which JSON can write: what else their
        steps depend on. Collective; as often on every rank. Virtual ranks do not wait for one another here: those that
        came first may learn of a difference only in a half that waits. Raises `ExchangeTimeout`.
        """
        self._alive("agree")
        try:
            self._guard(self._backend.agree, json.dumps(settings, sort_keys=True))
        except WireError as error:
            raise ExchangeTimeout(self.rank, error.peer, "agree", "its settings", error.seen) from error

    def dispatch_send(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        scales: Tensor | None = None,
        num_tokens: Tensor | None = None,
        has_work: bool = True,
    ) -> Handle:
        """Send each token to the ranks of its experts; returns at once. All arguments may be overwritten afterwards.

        x [T, H] of the payload's dtype; topk_ids [T, K] int32 or int64, any strides, -1 for nowhere; topk_weights [T,
        K] float32, with every routing factor in them; scales [T, S] float32 for fp8, else None. For fp8 without
        scales, x may be bfloat16: it is quantised as it is sent, 1 × 128 as `moelab.ops.quantize` does, by powers of
        two where `scales` of the exchange is "ue8m0". T may differ between DP groups and be 0; the TP ranks of a group
        pass the same tokens. An expert named twice by a token computes it once and counts with both weights.
        `num_tokens`, int32 with one element on the device, says how many of the T rows count. `has_work`: whether this
        DP group has requests.

        Raises `InputError` (nothing was sent), `CommError` when all slots are taken. Where the host does not read
        values (nvshmem), ids out of range go nowhere and a num_tokens beyond T counts as T; the next call says so.
        """
        arguments = x, topk_ids, topk_weights, scales, num_tokens
        number, slot = self._begin("dispatch_send", arguments)
        exchange = self._guard(self._backend.dispatch_send, number, slot, *arguments, has_work)
        return self._begun(Handle(self, number, slot, exchange, x.shape, "dispatch_recv"))

    def dispatch_recv(self, handle: Handle) -> tuple[Tensor, Tensor | None, Tensor]:
        """Wait for the tokens of this rank's experts: (rows, row_scales, counts).

        rows [L, dp·M, H] or [capacity, H] of the payload's dtype; row_scales in the format of `scales`, or None;
        counts [L] int32 on the device. Expert e's rows are its first counts[e] (from handle.starts[e] on when
        contiguous), by DP group, then token. What lies beyond was never written. All of it belongs to the handle's
        slot: it is valid until its combine_recv. Raises `ExchangeTimeout`.
        """
        self._take(handle, "dispatch_recv")
        return self._guard(self._backend.dispatch_recv, handle._exchange)

    def dispatch(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        scales: Tensor | None = None,
        num_tokens: Tensor | None = None,
        has_work: bool = True,
    ) -> tuple[Handle, Tensor, Tensor | None, Tensor]:
        """dispatch_send and dispatch_recv in one, for when nothing runs between: (handle, rows, row_scales, counts).

        The same results; over nvshmem one launch instead of two. All ranks fuse an exchange, or none does.
        """
        arguments = x, topk_ids, topk_weights, scales, num_tokens
        number, slot = self._begin("dispatch", arguments)
        exchange, received = self._guard(self._backend.dispatch, number, slot, *arguments, has_work)
        return self._begun(Handle(self, number, slot, exchange, x.shape, "combine_send")), *received

    def combine_send(self, handle: Handle, y: Tensor) -> None:
        """Send the experts' outputs home; returns at once.

        y like rows, bfloat16 (float32 with payload "f32"), not yet weighted; rows beyond the counts are never read. y
        may be overwritten afterwards. Raises `InputError` (nothing was sent).
        """
        self._take(handle, "combine_send", lambda: check_y(self.spec, self._backend, y))
        self._guard(self._backend.combine_send, handle._exchange, y)

    def combine_recv(self, handle: Handle, out: Tensor) -> Tensor:
        """Wait for the outputs of this DP group's tokens and write out[t] = Σ_k w_k·y_k; returns out. Frees the slot.

        out [T, H] float32, bfloat16 or float16, the T of dispatch_send; rows beyond num_tokens are left alone. A
        token without experts gets exact zeros. Raises `InputError` (the call may be repeated), `ExchangeTimeout`.
        """
        self._take(handle, "combine_recv", lambda: check_out(self._backend, handle._x_shape, out))
        self._guard(self._backend.combine_recv, handle._exchange, out)
        return self._finished(handle, out)

    def combine(self, handle: Handle, y: Tensor, out: Tensor) -> Tensor:
        """combine_send and combine_recv in one, for when nothing runs between; returns out. Frees the slot.

        The same results; over nvshmem one launch instead of two. All ranks fuse an exchange, or none does.
        """

        def check() -> None:
            check_y(self.spec, self._backend, y)
            check_out(self._backend, handle._x_shape, out)

        self._take(handle, "combine_send", check, "combine")
        self._guard(self._backend.combine, handle._exchange, y, out)
        return self._finished(handle, out)

    def check(self) -> None:
        """Wait until everything launched so far has run and raise what the device has reported.

        A half over nvshmem is only launched, so what goes wrong on the device is raised by whichever call of this
        AllToAll comes next: `InputError` once, for ids or token counts out of range (they were masked), or
        `ExchangeTimeout`. Other backends raise at once, and this does nothing. Not for use while a graph is captured.
        """
        self._alive("check")
        self._report(wait=True)

    def close(self) -> None:
        """Free the transport and the buffers; handles in flight are abandoned. Collective; twice is once."""
        if not self._closed:
            self._closed = True
            failed = self._dead is not None or bool(self._in_flight)
            self._dead = self._dead or "it is closed"
            self._in_flight.clear()
            self._backend.close(failed)

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()

    def _alive(self, call: str) -> None:
        if self._dead is not None:
            raise CommError(f"{call} on an AllToAll that can no longer be used: {self._dead}; construct a new one")
        self._report(wait=False)

    def _report(self, wait: bool) -> None:
        try:
            self._backend.check(wait)
        except ExchangeTimeout as error:
            self._fail(error)
            raise

    def _begin(self, call: str, arguments: tuple) -> tuple[int, int]:
        """Check that an exchange may begin, and its arguments: its number and slot."""
        self._alive(call)
        if not self._free:
            raise CommError(
                f"{len(self._in_flight)} exchanges are in flight and slots is {self.spec.slots}: finish one "
                "with combine_recv first, or construct with more slots"
            )
        check_dispatch(self.spec, self._backend, *arguments)
        return self._started, self._free[0]

    def _begun(self, handle: Handle) -> Handle:
        self._started += 1
        self._free.pop(0)
        self._in_flight.append(handle)
        return handle

    def _take(self, handle: Handle, half: str, check: Callable[[], None] = lambda: None, call: str = "") -> None:
        """Check that `half` is the handle's next one and its arguments are right; then move the handle on."""
        call = call or half
        self._alive(call)
        if handle._owner is not self:
            raise CommError(f"{call}: exchange {handle.number} was started by another AllToAll: pass it to that one")
        if handle._next != half:
            raise CommError(
                f"{call} of exchange {handle.number} out of order: its next half is "
                f"{handle._next or 'none, it is finished'}; the order is {', '.join(HALVES)}"
            )
        check()
        at = HALVES.index(half) + 1
        handle._next = HALVES[at] if at < len(HALVES) else None

    def _finished(self, handle: Handle, out: Tensor) -> Tensor:
        handle._next = None
        self._in_flight.remove(handle)
        self._free = sorted([*self._free, handle.slot])
        return out

    def _guard(self, half: Callable, *args):
        """Run a backend's half; if it fails, leave at once, so that the peers need not wait for their own limit."""
        try:
            return half(*args)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._dead = f"it failed earlier ({error or type(error).__name__})"
        self._backend.abandon()


def _rank(group: dist.ProcessGroup | Dense | Nvshmem | VirtualRank | None) -> int:
    ranks = group.group if isinstance(group, Dense | Nvshmem) else group
    return ranks.index if isinstance(ranks, VirtualRank) else dist.get_rank(ranks)
