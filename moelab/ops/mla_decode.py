"""MLA decode over the paged latent cache: plan once per step, run once per layer.

Every sequence has q_len new tokens, 1 to 4 of them with speculation, whose rows are the last of its kv_len cached rows.
With W_UK moved to the query's side (`moelab.model.mla`) all heads attend to the same rows of 576 values, whose first
512 are also the values:

    out = softmax(scale · q · Kᵀ) · K[:, :512],    lse = ln Σ exp(scale · q · Kᵀ)

New token i of a sequence sees rows 0 … kv_len − q_len + i. `scale` is that of the heads before absorption, YaRN's m²
included: `moelab.ops.rope.softmax_scale`. FLOP: 2·(576 + 512) per query, visible key and head; bytes: the cached rows
once.

    decode = TritonDecode(num_heads, scale, max_batch, max_kv_len, max_q_len=2, device="cuda")
    decode.plan(page_table, kv_lens, q_lens)                # once a step, on the host
    out = decode.run(q_latent, q_pe, cache_of_layer)        # every layer

Backends: `ReferenceDecode` here (plain torch, any device), `TritonDecode` (our kernels), `FlashInferDecode`. They give
the same results but for rounding. Appending to the cache is an op of its own.

CUDA graphs: capture `run` after a `plan`, then for each step plan anew and replay. Buffers and grid belong to the
object, so batch and q_len must be those of the capture; a sequence that is not there has kv_len 0, which gives zeros
and lse −inf. One stream uses an object: `plan` waits until the copy of the plan before has left the host, not more.

Objects of a deployment, one for each batch size say, can share scratch memory, which is megabytes each: `share` another
object of the same heads, max_q_len and device, on the same stream and not smaller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from moelab.ops.attention import attend
from moelab.ops.checks import check_tensor, require
from moelab.ops.mla_cache import LATENT_DIM, PAGE_SIZE, ROPE_DIM, Fp8Cache, LatentCache, check_cache, read_rows

MAX_Q_LEN = 4


def num_pages(kv_len: int) -> int:
    return -(-kv_len // PAGE_SIZE)


class MlaDecode(ABC):
    """What all backends check and keep. Subclasses fill in `_planned` and `_run`."""

    def __init__(
        self,
        num_heads: int,
        scale: float,
        max_batch: int,
        max_kv_len: int,
        max_q_len: int = 1,
        device: torch.device | str = "cpu",
        share: MlaDecode | None = None,
    ):
        require(num_heads >= 1, "num_heads", num_heads, "at least 1")
        require(1 <= max_q_len <= MAX_Q_LEN, "max_q_len", max_q_len, f"1 … {MAX_Q_LEN}")
        require(max_batch >= 1, "max_batch", max_batch, "at least 1")
        require(max_kv_len >= 1, "max_kv_len", max_kv_len, "at least 1")
        self.num_heads, self.scale, self.max_batch = num_heads, scale, max_batch
        self.max_q_len, self.max_pages, self.device = max_q_len, num_pages(max_kv_len), torch.device(device)
        if share is not None:
            alike = type(share) is type(self) and (share.num_heads, share.max_q_len) == (num_heads, max_q_len)
            require(alike and share.device == self.device, "share", share, "of the same kind, heads, q_len and device")
            require(share.max_batch >= max_batch, "share's max_batch", share.max_batch, f"at least {max_batch}")
        self.kv_lens: list[int] | None = None
        self.q_lens: list[int] = []

    @property
    def num_tokens(self) -> int:
        """T of the plan."""
        return sum(self.q_lens)

    def plan(
        self,
        page_table: Tensor,
        kv_lens: Sequence[int] | Tensor,
        q_lens: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Lay out a step. On the host; nothing waits for the GPU but for the copy of the plan before.

        page_table int32 or int64 [B, P] on the CPU: the pages of each sequence in order, of which the first ⌈kv_len/64⌉
        count and the others may hold anything. kv_lens: cached rows of each, the new ones included, so 0 or at least
        q_len. q_lens: new tokens of each, 1 … max_q_len; all max_q_len if left out. Raises OpError otherwise.
        """
        kv_lens = kv_lens.tolist() if isinstance(kv_lens, Tensor) else list(kv_lens)
        q_lens = q_lens.tolist() if isinstance(q_lens, Tensor) else list(q_lens or [self.max_q_len] * len(kv_lens))
        batch = len(kv_lens)
        require(1 <= batch <= self.max_batch, "kv_lens's length", batch, f"1 … max_batch = {self.max_batch}")
        require(len(q_lens) == batch, "q_lens's length", len(q_lens), f"{batch}, as of kv_lens")
        check_tensor("page_table", page_table, (batch, "P"), (torch.int32, torch.int64))
        require(page_table.device.type == "cpu", "page_table's device", page_table.device, "cpu; plans are made there")
        columns = min(page_table.shape[1], self.max_pages)
        for kv_len, q_len in zip(kv_lens, q_lens, strict=True):
            if not (1 <= q_len <= self.max_q_len and (kv_len == 0 or q_len <= kv_len <= columns * PAGE_SIZE)):
                require(1 <= q_len <= self.max_q_len, "q_lens", q_len, f"1 … max_q_len = {self.max_q_len}")
                require(kv_len == 0 or kv_len >= q_len, "kv_lens", kv_len, f"0 or at least q_len = {q_len}")
                require(False, "kv_lens", kv_len, f"at most {columns} pages of {PAGE_SIZE}")
        self.kv_lens, self.q_lens = kv_lens, q_lens
        self._planned(page_table)

    def run(
        self, q_latent: Tensor, q_pe: Tensor, cache: LatentCache, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """Attend; returns out [T, heads, 512], tokens of sequence after sequence as planned.

        q_latent bfloat16 [T, heads, 512] and q_pe bfloat16 [T, heads, 64], each with heads and tokens at one stride (a
        slice of a contiguous [T, heads, n] has that); cache: a form of `moelab.ops.mla_cache`; out bfloat16 like
        q_latent; lse float32 [T, heads], contiguous: filled with the natural logarithms if it is given. Raises OpError
        for what is not accepted, or without a plan.
        """
        require(self.kv_lens is not None, "plan", "missing", "a call of plan() before run()")
        self._check(q_latent, q_pe, cache)
        if out is None:
            out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        check_tensor("out", out, tuple(q_latent.shape), (q_latent.dtype,), q_latent)
        if lse is not None:
            check_tensor("lse", lse, tuple(q_latent.shape[:2]), (torch.float32,), q_latent)
            require(lse.is_contiguous(), "lse's strides", lse.stride(), "contiguous")
        self._run(q_latent, q_pe, cache, out, lse)
        return out

    def _check(self, q_latent: Tensor, q_pe: Tensor, cache: LatentCache) -> None:
        """What the kernels take; the reference takes more."""
        shape = (self.num_tokens, self.num_heads)
        for name, q, width in (("q_latent", q_latent, LATENT_DIM), ("q_pe", q_pe, ROPE_DIM)):
            check_tensor(name, q, (*shape, width), (torch.bfloat16,))
            require(q.device.type == self.device.type, f"{name}'s device", q.device, str(self.device))
            regular = q.stride(0) == self.num_heads * q.stride(1) and q.stride(1) % 8 == 0 and q.data_ptr() % 16 == 0
            require(regular, f"{name}'s strides", q.stride(), "one stride through heads and tokens, of 16-byte steps")
        check_cache(cache, q_latent)

    @abstractmethod
    def _planned(self, page_table: Tensor) -> None: ...

    @abstractmethod
    def _run(self, q_latent: Tensor, q_pe: Tensor, cache: LatentCache, out: Tensor, lse: Tensor | None) -> None: ...


class ReferenceDecode(MlaDecode):
    """Plain torch, sequence by sequence in float32. Any float dtype and any widths: q_latent [T, heads, L], q_pe
    [T, heads, R], cache [pages, 64, L + R] or the FP8 form. Not for graphs: it reads the plan on the host."""

    def _planned(self, page_table: Tensor) -> None:
        self._pages = [table[: num_pages(n)].long() for table, n in zip(page_table, self.kv_lens, strict=True)]

    def _check(self, q_latent: Tensor, q_pe: Tensor, cache: LatentCache) -> None:
        shape = (self.num_tokens, self.num_heads)
        check_tensor("q_latent", q_latent, (*shape, "L"), (torch.bfloat16, torch.float32, torch.float64))
        check_tensor("q_pe", q_pe, (*shape, "R"), (q_latent.dtype,), q_latent)
        if isinstance(cache, Fp8Cache):
            check_cache(cache, q_latent)
        else:
            width = q_latent.shape[-1] + q_pe.shape[-1]
            check_tensor("cache", cache, ("pages", PAGE_SIZE, width), (torch.bfloat16, torch.float32), q_latent)

    def _run(self, q_latent: Tensor, q_pe: Tensor, cache: LatentCache, out: Tensor, lse: Tensor | None) -> None:
        start = 0
        for pages, kv_len, q_len in zip(self._pages, self.kv_lens, self.q_lens, strict=True):
            here = slice(start, start + q_len)
            slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[:kv_len].to(q_latent.device)
            rows = read_rows(cache, slots)[:, None]
            query = torch.cat((q_latent[here], q_pe[here]), dim=-1)
            out[here], logs = attend(query, rows, rows[..., : q_latent.shape[-1]], self.scale, causal=True)
            if lse is not None:
                lse[here] = logs
            start = here.stop
