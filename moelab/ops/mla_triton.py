"""MLA decode by our own kernels: paged, split over the cache, merged in a fixed order.

Flash decoding (arXiv 2205.14135; the split over keys is that of pytorch.org/blog/flash-decoding): a program walks the
tiles of 64 rows that the plan (`moelab.ops.mla_plan`) gives it, with the running maximum m, sum and weighted sum of
each of its queries, the exponentials in base 2 with the scale folded in:

    m' = max(m, max s),  p = 2^(c·(s − m')),  sum' = sum · 2^(c·(m − m')) + Σ p,  c = scale · log₂ e

A query row that has seen no key has m = −inf, sum 0, output 0. Rows of the cache that no token has may hold NaN: their
scores are replaced, and their values too, since 0 · NaN is NaN.

Two kernels do that: on Hopper `moelab.ops.mla_hopper`, elsewhere the one here, which runs on any GPU that Triton has
and is interpreted on the CPU. Here a program takes at most 32 query rows: Triton gives each warp whole rows of a
chained product, and 64 rows of 512 columns would fill the registers of four warps.

An FP8 row is turned into bfloat16, value · scale, before it is multiplied.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moelab.ops import mla_hopper
from moelab.ops.early_launch import launches_early
from moelab.ops.jit import jit, runs_on, tl
from moelab.ops.mla_cache import LATENT_DIM, PAGE_SIZE, Fp8Cache, LatentCache
from moelab.ops.mla_decode import MlaDecode, ReferenceDecode
from moelab.ops.mla_plan import PlanBuffer
from moelab.ops.multiprocessors import num_programs

# Of the merge: rows and parts a program takes at a time, programs a multiprocessor. It is bound by latency: hence few
# rows (so many programs) and many parts at once.
MERGE_ROWS, MERGE_PARTS, MERGE_PROGRAMS = 2, 8, 4


class TritonDecode(MlaDecode):
    """`MlaDecode` on a GPU. CPU tensors take the reference, or under Triton's interpreter the kernel here."""

    def __init__(
        self,
        num_heads: int,
        scale: float,
        max_batch: int,
        max_kv_len: int,
        max_q_len: int = 1,
        device: torch.device | str = "cuda",
        share: TritonDecode | None = None,
    ):
        super().__init__(num_heads, scale, max_batch, max_kv_len, max_q_len, device, share)
        rows = num_heads * max_q_len
        self.hopper = mla_hopper.runs_on(self.device)
        self.row_block = mla_hopper.ROWS if self.hopper else 16 if rows <= 16 else 32
        self.row_tiles = -(-rows // self.row_block)
        # A program's tiles fill the shared memory of a multiprocessor. Whoever shares buffers has them in one size.
        programs = num_programs(self.device, 1, interpreted=6)
        self.groups = share.groups if share else max(1, programs // self.row_tiles)
        self._merge_programs = MERGE_PROGRAMS * programs
        self.buffer = PlanBuffer(self.groups, max_batch, self.max_pages, self.device)
        if share:
            self.partial, self.partial_lse, self._unasked_lse = share.partial, share.partial_lse, share._unasked_lse
        else:
            slot_rows, floats = self.row_tiles * self.row_block, dict(dtype=torch.float32, device=self.device)
            self.partial = torch.empty(2 * self.groups, slot_rows, LATENT_DIM, **floats)
            self.partial_lse = torch.empty(2 * self.groups, slot_rows, **floats)
            self._unasked_lse = torch.empty(max_batch * max_q_len * num_heads, **floats)
        self._reference = ReferenceDecode(num_heads, scale, max_batch, max_kv_len, max_q_len, device)

    def _planned(self, page_table: Tensor) -> None:
        self.buffer.write(page_table, self.kv_lens, self.q_lens, PAGE_SIZE)
        if not runs_on(_decode_kernel, self.buffer.device):
            self._reference.plan(page_table, self.kv_lens, self.q_lens)

    def _run(self, q_latent: Tensor, q_pe: Tensor, cache: LatentCache, out: Tensor, lse: Tensor | None) -> None:
        if not runs_on(_decode_kernel, q_latent):
            self._reference.run(q_latent, q_pe, cache, out, lse)
            return
        if lse is None:
            lse = self._unasked_lse
        factor, slot_rows = self.scale * math.log2(math.e), self.row_tiles * self.row_block
        views, early = self.buffer.views, launches_early(out)
        outputs = (out, lse, self.partial, self.partial_lse)
        steps = tuple(views[name] for name in ("group_start", "items", "page_table"))
        shape = (self.num_heads, self.row_tiles, self.groups * self.row_tiles)
        if self.hopper:
            mla_hopper.launch(q_latent, q_pe, cache, outputs, steps, self.max_pages, factor, *shape)
        else:
            fp8 = isinstance(cache, Fp8Cache)
            parts = (cache.values, cache.scales, cache.rope) if fp8 else (cache, cache, cache[..., LATENT_DIM:])
            _decode_kernel[(shape[2],)](
                q_latent, q_pe, *parts, *outputs, *steps, self.max_pages, q_latent.stride(1), q_pe.stride(1),
                parts[0].stride(1), parts[2].stride(1), out.stride(0), out.stride(1), factor,
                FP8=fp8, HEADS=self.num_heads, ROW_TILES=self.row_tiles, ROWS=self.row_block,
                INTERPRETED=not out.is_cuda, num_warps=8, num_stages=2,
            )  # fmt: skip
        _merge_kernel[(self._merge_programs,)](
            *outputs, views["num_merges"], views["merges"], out.stride(0), out.stride(1), HEADS=self.num_heads,
            SLOT_ROWS=slot_rows, ROWS=MERGE_ROWS, PARTS=MERGE_PARTS, EARLY=early, launch_pdl=early, num_warps=4,
        )  # fmt: skip


@jit
def _walk(
    q, qp, m, total, acc, tile, limit, kv_len, factor, pages, latent, scales, rope, latent_stride, rope_stride,
    FP8: tl.constexpr,
):  # fmt: skip
    """One tile into m, total and acc."""
    column = tl.arange(0, 512)
    page = tl.load(pages + tile)
    position = tile * 64 + tl.arange(0, 64)
    valid = (position < kv_len)[:, None]
    slots = (page.to(tl.int64) * 64 + tl.arange(0, 64))[:, None]
    k = tl.load(latent + slots * latent_stride + column[None, :], mask=valid, other=0.0)
    kp = tl.load(rope + slots * rope_stride + tl.arange(0, 64)[None, :], mask=valid, other=0.0).to(q.dtype)
    if FP8:
        scale = tl.load(scales + slots * 4 + tl.arange(0, 4)[None, :], mask=valid, other=0.0)
        k = tl.reshape(tl.reshape(k, (64, 4, 128)).to(tl.float32) * scale[:, :, None], (64, 512))
    k = k.to(q.dtype)
    s = tl.dot(q, tl.trans(k)) + tl.dot(qp, tl.trans(kp))
    s = tl.where(position[None, :] < limit[:, None], s, float("-inf"))
    new = tl.maximum(m, tl.max(s, axis=1))
    shift = tl.where(new == float("-inf"), 0.0, new * factor)
    shrink = tl.exp2(m * factor - shift)
    p = tl.exp2(s * factor - shift[:, None])
    return new, total * shrink + tl.sum(p, axis=1), acc * shrink[:, None] + tl.dot(p.to(q.dtype), k)


@jit
def _decode_kernel(
    q_latent, q_pe, latent, scales, rope, out, lse, partial, partial_lse,
    group_start, items, page_table, max_pages, q_latent_stride, q_pe_stride,
    latent_stride, rope_stride, out_token_stride, out_head_stride, factor,
    FP8: tl.constexpr, HEADS: tl.constexpr, ROW_TILES: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Strides of q_latent and q_pe are of rows, token · heads + head; those of latent and rope of cached rows."""
    row_tile = tl.program_id(0) % ROW_TILES
    group = tl.program_id(0) // ROW_TILES
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 512)
    # bfloat16 is not to be reckoned with in the interpreter.
    dot_type: tl.constexpr = tl.float32 if INTERPRETED else tl.bfloat16
    item, last = tl.load(group_start + group), tl.load(group_start + group + 1)
    while item < last:  # `for` over device values fails in the interpreter of Triton 3.6 with NumPy 2.4
        tile = tl.load(items + item * 8)
        end = tl.load(items + item * 8 + 1)
        slot = tl.load(items + item * 8 + 2)
        token = tl.load(items + item * 8 + 3)
        rows = tl.load(items + item * 8 + 4) * HEADS
        kv_len = tl.load(items + item * 8 + 5)
        pages = page_table + tl.load(items + item * 8 + 6) * max_pages
        there = row < rows
        where = (token * HEADS + row).to(tl.int64)[:, None]
        q = tl.load(q_latent + where * q_latent_stride + column[None, :], mask=there[:, None], other=0.0).to(dot_type)
        qp_at = q_pe + where * q_pe_stride + tl.arange(0, 64)[None, :]
        qp = tl.load(qp_at, mask=there[:, None], other=0.0).to(dot_type)
        limit = kv_len - rows // HEADS + 1 + row // HEADS
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, 512), tl.float32)
        if INTERPRETED:
            while tile < end:
                m, total, acc = _walk(
                    q, qp, m, total, acc, tile, limit, kv_len, factor, pages, latent, scales, rope,
                    latent_stride, rope_stride, FP8,
                )  # fmt: skip
                tile += 1
        else:
            for each in tl.range(tile, end):  # which Triton pipelines
                m, total, acc = _walk(
                    q, qp, m, total, acc, each, limit, kv_len, factor, pages, latent, scales, rope,
                    latent_stride, rope_stride, FP8,
                )  # fmt: skip
        divisor = tl.where(total > 0, total, 1.0)
        acc = acc / divisor[:, None]
        natural = tl.where(total > 0, (m * factor + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        if slot < 0:
            token_head = (token + row // HEADS).to(tl.int64) * out_token_stride + row % HEADS * out_head_stride
            tl.store(out + token_head[:, None] + column[None, :], acc.to(tl.bfloat16), mask=there[:, None])
            tl.store(lse + token * HEADS + row, natural, mask=there)
        else:
            base = slot.to(tl.int64) * (ROW_TILES * ROWS) + row
            tl.store(partial + base[:, None] * 512 + column[None, :], acc)
            tl.store(partial_lse + base, natural)
        item += 1


@jit
def _merge_kernel(
    out, lse, partial, partial_lse, num_merges, merges, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, SLOT_ROWS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The rows of the cut sequences: the mean of their parts, weighted by exp(lse). A program takes ROWS rows at a time
    and PARTS parts of them at once, in the order of the slots."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = SLOT_ROWS // ROWS
    column = tl.arange(0, 512)
    unit, units = tl.program_id(0), tl.load(num_merges) * blocks
    while unit < units:
        merge = merges + unit // blocks * 4
        first = tl.load(merge)
        count = tl.load(merge + 1)
        token = tl.load(merge + 2)
        row = unit % blocks * ROWS + tl.arange(0, ROWS)
        there = row < tl.load(merge + 3) * HEADS
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, 512), tl.float32)
        done = 0
        while done < count:
            part = done + tl.arange(0, PARTS)
            wanted = (part < count)[:, None] & there[None, :]
            where = (first + part).to(tl.int64)[:, None] * SLOT_ROWS + row[None, :]
            part_lse = tl.load(partial_lse + where, mask=wanted, other=float("-inf"))
            value = tl.load(partial + where[:, :, None] * 512 + column, mask=wanted[:, :, None], other=0.0)
            new = tl.maximum(m, tl.max(part_lse, axis=0))
            shift = tl.where(new == float("-inf"), 0.0, new)
            shrink, weight = tl.exp(m - shift), tl.exp(part_lse - shift[None, :])
            total = total * shrink + tl.sum(weight, axis=0)
            acc = acc * shrink[:, None] + tl.sum(value * weight[:, :, None], axis=0)
            m = new
            done += PARTS
        divisor = tl.where(total > 0, total, 1.0)
        acc = acc / divisor[:, None]
        token_head = (token + row // HEADS).to(tl.int64) * out_token_stride + row % HEADS * out_head_stride
        tl.store(out + token_head[:, None] + column[None, :], acc.to(tl.bfloat16), mask=there[:, None])
        tl.store(lse + token * HEADS + row, tl.where(total > 0, m + tl.log(divisor), float("-inf")), mask=there)
        unit += tl.num_programs(0)
