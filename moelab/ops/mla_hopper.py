"""MLA decode on Hopper, in Gluon: TMA, asynchronous WGMMA, and accumulators divided among warps by columns.

A program of eight warps takes 64 query rows (several heads, or queries, of one sequence). Plain Triton divides a
chained product among warps by rows, and 64 rows of a 512-wide float32 sum do not fit four warps; here two groups of
four warps take 256 columns each (FlashMLA and FlashInfer divide them so, too). A tile of 64 cached rows is a page:

    scores of tile i  →  softmax  →  its values into the sum  ∥  scores of tile i + 1  →  …

The values of tile i and the scores of tile i + 1 are queued one behind the other on the tensor cores; when the values
are done, their half of the ring is refilled with tile i + 2 by TMA. Shared memory holds the queries (72 KiB), two tiles
(144 KiB) and the probabilities (8 KiB): all of it, hence one program a multiprocessor.

Rows in FP8 take the way through registers, loaded two tiles ahead, and are put into the ring as bfloat16 while the
scores of the next tile are on the tensor cores. The kernel is set up early (`moelab.ops.early_launch`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moelab.ops.mla_cache import LATENT_DIM, PAGE_SIZE, ROPE_DIM, Fp8Cache, LatentCache

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    jit = gluon.jit
except ImportError:  # no Triton, or one without Gluon
    gluon = gl = hopper = mbarrier = tma = None

    def jit(function: Any) -> Any:
        return function


ROWS = 64  # of queries, a program

# Triton 3.7 names it `barrier`.
_barrier = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)


def runs_on(device: torch.device) -> bool:
    """Compute capability 9.0 and a Triton with Gluon."""
    return gl is not None and device.type == "cuda" and _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def launch(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: LatentCache,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    steps: tuple[Tensor, ...],
    max_pages: int,
    factor: float,
    num_heads: int,
    row_tiles: int,
    programs: int,
) -> None:
    """outputs: out, lse, partial, partial_lse; steps: the parts of the plan in the kernel's order."""
    out = outputs[0]
    fp8 = isinstance(cache, Fp8Cache)
    if fp8:
        values, scales, rope = cache.values, cache.scales, _tiles(cache.rope.flatten(0, 1), ROPE_DIM)
        latent = rope  # not used
    else:
        values, scales, rows = cache, outputs[1], cache.flatten(0, 1)  # the first two not used
        latent, rope = _tiles(rows, LATENT_DIM), _tiles(rows, ROPE_DIM)
    _decode_kernel[(programs,)](
        _tiles(q_latent.flatten(0, 1), LATENT_DIM), _tiles(q_pe.flatten(0, 1), ROPE_DIM), latent, rope, values, scales,
        *outputs, *steps, max_pages, out.stride(0), out.stride(1), factor,
        FP8=fp8, HEADS=num_heads, ROW_TILES=row_tiles, num_warps=8, launch_pdl=True,
    )  # fmt: skip


def _tiles(matrix: Tensor, width: int) -> Any:
    """Blocks of 64 rows of a matrix, `width` columns of it, to be fetched by TMA; zeros beyond its end."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [PAGE_SIZE, width], layout)


@jit
def _fetch(latent_desc, rope_desc, page, bar, k, k_pe, wanted, FP8: gl.constexpr):
    """A page by TMA into one half of the ring; of the FP8 form k_pe only."""
    if FP8:
        mbarrier.expect(bar, 64 * 128, pred=wanted)
        tma.async_copy_global_to_shared(rope_desc, [page * 64, 0], bar, k_pe, pred=wanted)
    else:
        mbarrier.expect(bar, 64 * 1152, pred=wanted)
        tma.async_copy_global_to_shared(latent_desc, [page * 64, 0], bar, k, pred=wanted)
        tma.async_copy_global_to_shared(rope_desc, [page * 64, 512], bar, k_pe, pred=wanted)


@jit
def _scores(q, q_pe, k, k_pe, S: gl.constexpr):
    """Q·Kᵀ, in flight: two groups."""
    s = hopper.warpgroup_mma(q, k.permute((1, 0)), gl.zeros((64, 64), gl.float32, S), use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q_pe, k_pe.permute((1, 0)), s, is_async=True)


@jit
def _softmax(s, m, total, tile, kv_len, limit, least, factor, k, p_shared, S: gl.constexpr):
    """A tile's scores -> m, total, by what to shrink the sums so far; the probabilities go to shared memory.

    `least`: the smallest of the limits. `k`: the tile, whose values beyond kv_len are replaced by zeros."""
    if (tile + 1) * 64 > least:
        column = tile * 64 + gl.arange(0, 64, gl.SliceLayout(0, S))
        s = gl.where(column[None, :] < limit[:, None], s, float("-inf"))
        if (tile + 1) * 64 > kv_len:
            _barrier()  # all warps have read the tile for their scores
            SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
            row = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, SPREAD))
            for i in gl.static_range(8):
                part = k.slice(i * 64, 64, dim=1)
                value = part.load(SPREAD)
                part.store(gl.where((row < kv_len)[:, None], value, gl.zeros_like(value)))
    new = gl.maximum(m, gl.max(s, axis=1))
    shift = gl.where(new == float("-inf"), 0.0, new * factor)
    shrink = gl.exp2(m * factor - shift)
    p = gl.exp2(s * factor - shift[:, None])
    p_shared.store(p.to(gl.bfloat16))
    return new, total * shrink[:, None] + p, shrink


@jit
def _load_fp8(values, scales, page):
    """A page of FP8 rows into registers: 128 columns each, and their scales."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0])
    row = page.to(gl.int64) * 64 + gl.arange(0, 64, gl.SliceLayout(1, SPREAD))
    where = values + row[:, None] * 512 + gl.arange(0, 128, gl.SliceLayout(0, SPREAD))[None, :]
    scales += row * 4
    a, b, c, d = gl.load(where), gl.load(where + 128), gl.load(where + 256), gl.load(where + 384)
    return a, b, c, d, gl.load(scales), gl.load(scales + 1), gl.load(scales + 2), gl.load(scales + 3)


@jit
def _put(k, a, b, c, d, scale_a, scale_b, scale_c, scale_d):
    """What was loaded into one half of the ring, as bfloat16. Before WGMMA reads it come a fence and a barrier."""
    k.slice(0, 128, dim=1).store((a.to(gl.float32) * scale_a[:, None]).to(gl.bfloat16))
    k.slice(128, 128, dim=1).store((b.to(gl.float32) * scale_b[:, None]).to(gl.bfloat16))
    k.slice(256, 128, dim=1).store((c.to(gl.float32) * scale_c[:, None]).to(gl.bfloat16))
    k.slice(384, 128, dim=1).store((d.to(gl.float32) * scale_d[:, None]).to(gl.bfloat16))


@jit
def _decode_kernel(
    q_desc, q_pe_desc, latent_desc, rope_desc, values, scales, out, lse, partial, partial_lse,
    group_start, items, page_table, max_pages, out_token_stride, out_head_stride, factor,
    FP8: gl.constexpr, HEADS: gl.constexpr, ROW_TILES: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(gl.bfloat16, [64, 512], SHARED)
    q_pe = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    ks = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SHARED)
    k_pes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bar, count=1)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)

    gdc_wait()
    gdc_launch_dependents()
    row_tile = gl.program_id(0) % ROW_TILES
    group = gl.program_id(0) // ROW_TILES
    row = row_tile * 64 + gl.arange(0, 64, ROW)
    q_phase = 0
    tick = 0  # tiles so far: half of the ring and phase of its barrier follow from it
    for item in range(gl.load(group_start + group), gl.load(group_start + group + 1)):
        first = gl.load(items + item * 8)
        end = gl.load(items + item * 8 + 1)
        slot = gl.load(items + item * 8 + 2)
        token = gl.load(items + item * 8 + 3)
        q_len = gl.load(items + item * 8 + 4)
        kv_len = gl.load(items + item * 8 + 5)
        pages = page_table + gl.load(items + item * 8 + 6) * max_pages
        least = kv_len - q_len + 1
        limit = least + row // HEADS
        if row_tile * 64 < q_len * HEADS:
            acc = gl.zeros((64, 512), gl.float32, WIDE)
            total = gl.zeros((64, 64), gl.float32, S)
            m = gl.full((64,), float("-inf"), gl.float32, ROW)
            if first < end:
                mbarrier.expect(q_bar, 64 * 1152)
                tma.async_copy_global_to_shared(q_desc, [token * HEADS + row_tile * 64, 0], q_bar, q)
                tma.async_copy_global_to_shared(q_pe_desc, [token * HEADS + row_tile * 64, 0], q_bar, q_pe)
                for i in gl.static_range(2):
                    half = (tick + i) % 2
                    page = gl.load(pages + gl.minimum(first + i, end - 1))
                    wanted = first + i < end
                    _fetch(
                        latent_desc, rope_desc, page, bars.index(half), ks.index(half), k_pes.index(half), wanted, FP8
                    )
                    if FP8:
                        _put(ks.index(half), *_load_fp8(values, scales, page))
                if FP8:
                    hopper.fence_async_shared()
                    _barrier()
                mbarrier.wait(q_bar, q_phase)
                q_phase ^= 1
                half = tick % 2
                mbarrier.wait(bars.index(half), tick // 2 & 1)
                pending = _scores(q, q_pe, ks.index(half), k_pes.index(half), S)
                s = hopper.warpgroup_mma_wait(0, deps=[pending])
                for tile in range(first, end - 1):
                    half = tick % 2
                    tick += 1
                    other = tick % 2
                    k = ks.index(half)
                    page = gl.load(pages + gl.minimum(tile + 2, end - 1))
                    if FP8:
                        a, b, c, d, scale_a, scale_b, scale_c, scale_d = _load_fp8(values, scales, page)
                    m, total, shrink = _softmax(s, m, total, tile, kv_len, limit, least, factor, k, p_shared, S)
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, WIDE))[:, None]
                    hopper.fence_async_shared()
                    _barrier()
                    running = hopper.warpgroup_mma(p_shared, k, acc, is_async=True)
                    mbarrier.wait(bars.index(other), tick // 2 & 1)
                    pending = _scores(q, q_pe, ks.index(other), k_pes.index(other), S)
                    acc = hopper.warpgroup_mma_wait(2, deps=[running])
                    _barrier()  # both halves of the columns are through with the tile
                    _fetch(latent_desc, rope_desc, page, bars.index(half), k, k_pes.index(half), tile + 2 < end, FP8)
                    if FP8:
                        _put(k, a, b, c, d, scale_a, scale_b, scale_c, scale_d)
                    s = hopper.warpgroup_mma_wait(0, deps=[pending])
                k = ks.index(tick % 2)
                tick += 1
                m, total, shrink = _softmax(s, m, total, end - 1, kv_len, limit, least, factor, k, p_shared, S)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, WIDE))[:, None]
                hopper.fence_async_shared()
                _barrier()
                running = hopper.warpgroup_mma(p_shared, k, acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(0, deps=[running])
                _barrier()
            sums = gl.sum(total, axis=1)
            divisor = gl.where(sums > 0, sums, 1.0)
            acc = acc * gl.convert_layout(1 / divisor, gl.SliceLayout(1, WIDE))[:, None]
            natural = gl.where(sums > 0, (m * factor + gl.log2(divisor)) * 0.6931471805599453, float("-inf"))
            wide_row = row_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
            column = gl.arange(0, 512, gl.SliceLayout(0, WIDE))
            rows = q_len * HEADS
            if slot < 0:
                where = (token + wide_row // HEADS).to(gl.int64) * out_token_stride + wide_row % HEADS * out_head_stride
                inside = (wide_row < rows)[:, None]
                gl.store(out + where[:, None] + column[None, :], acc.to(gl.bfloat16), mask=inside)
                gl.store(lse + token * HEADS + row, natural, mask=row < rows)
            else:
                base = slot.to(gl.int64) * (ROW_TILES * 64)
                gl.store(partial + (base + wide_row)[:, None] * 512 + column[None, :], acc)
                gl.store(partial_lse + base + row, natural)
