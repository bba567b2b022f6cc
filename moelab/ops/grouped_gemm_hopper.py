"""The grouped GEMM's kernel for Hopper, in Gluon: tiles and shares as `moelab.ops.grouped_gemm_kernel` has them, one
ring of operands for all tiles of a program, and two products in flight.

FP8 sums are kept in float32 registers, since the tensor cores add only 128 of them well. So every step of 128 along K
is a product of its own, which somebody has to multiply by its scales and add: as long a job as the product. Plain
Triton does one after the other. Here

    start product s + 1   →   wait for product s   →   add it, while s + 1 runs   →   start product s + 2   → …

and the tensor cores have one more to do. The ring holds STAGES steps of weights, rows and scales. Step s + STAGES − 2
is asked for when product s starts, in the place of s − 2, which every warp is then through with; near the end of a tile
that is a step of the program's next tile, so the ring does not run dry between tiles. Weights come by TMA, rows and
their scales by masked copies: rows beyond a count are not read.

On an H200 it takes 1 to 12 % less time than the Triton kernel up to 64 rows an expert (32 experts of 32 rows, 2048 →
7168: 118 µs and 123; 2 of 64: 12.2 and 14.4), where weights are most of the work. Beyond, it is bound by something that
was not found (0.9 µs a step of 128 × 128, products alone 0.29), and no better.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    jit = gluon.jit
except ImportError:  # no Triton, or one without Gluon
    gluon = gl = hopper = async_copy = mbarrier = tma = None

    def jit(function: Any) -> Any:
        return function


# Triton 3.7 names it `barrier`.
_barrier = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)


def runs_on(device: torch.device) -> bool:
    """Compute capability 9.0 and a Triton with Gluon."""
    return gl is not None and device.type == "cuda" and _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def weight_tiles(weight: Tensor, block_n: int) -> Any:
    """Blocks [block_n, 128] of a matrix, to be fetched by TMA; zeros beyond its end."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [block_n, 128], layout)


# Sizes whose value or divisibility would only make for more variants to compile.
_SIZES = ("scales_stack", "scales_column", "num_experts", "room")


@jit
def _plus(a, b):
    return a + b


@jit
def _find(tile, table, room, scales_stack, scales_row, N: gl.constexpr, K: gl.constexpr, PADDED: gl.constexpr,
          BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):  # fmt: skip
    """Where a tile is: (row of the weights, first column of the output, row of the buffer, populated rows from there,
    offset of the first row's scales, offset of the weights' scales)."""
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert, count, begin, tiles_m, ends = table
    e = gl.sum((ends <= tile).to(gl.int32), axis=0)
    here = expert == e
    tiles_here = gl.maximum(gl.sum(gl.where(here, tiles_m, 0), axis=0), 1)
    local = tile - gl.sum(gl.where(here, ends, 0), axis=0) + tiles_here * TILES_N
    column = local // tiles_here * BLOCK_N  # tiles that read the same weights stand side by side
    row = local % tiles_here * BLOCK_M
    left = gl.sum(gl.where(here, count, 0), axis=0) - row
    row += gl.sum(gl.where(here, begin, 0), axis=0)
    scales = row.to(gl.int64) * scales_row
    if PADDED:
        scales += e.to(gl.int64) * scales_stack
        row += e * room
    return e * N + column, column, row, left, scales, (e * ((N + 127) // 128) + column // 128) * (K // 128)


@jit
def _fetch(inputs, ring, slot, k, w_row, row, left, s_row, K: gl.constexpr, BLOCK_N: gl.constexpr,
           BLOCK_M: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Ask for step k of a tile; for nothing if it has no populated rows (`left`), as one beyond the last tile."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    x, x_scales, weight, scales_row, scales_column = inputs
    ws, xs, ss, bars = ring
    mbarrier.expect(bars.index(slot), BLOCK_N * 128, pred=left > 0)
    tma.async_copy_global_to_shared(weight, [w_row, k * 128], bars.index(slot), ws.index(slot), pred=left > 0)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS))
    at = (row + m).to(gl.int64)[:, None] * K + (k * 128 + gl.arange(0, 128, gl.SliceLayout(0, ROWS)))[None, :]
    async_copy.async_copy_global_to_shared(xs.index(slot), x + at, mask=(m < left)[:, None])
    m = gl.arange(0, BLOCK_M, LINE)
    at = s_row + m.to(gl.int64) * scales_row + k.to(gl.int64) * scales_column
    async_copy.async_copy_global_to_shared(ss.index(slot), x_scales + at, mask=m < left)
    async_copy.commit_group()


@jit
def _fetch_ahead(inputs, ring, j, k, last, here, after, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr,
                 STAGES: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """The ring's j-th step, step k of the tile `here`, has started: ask for the one STAGES − 2 later, which may belong
    to the tile `after`."""
    k += STAGES - 2
    over = k >= last
    _fetch(inputs, ring, (j + STAGES - 2) % STAGES, gl.where(over, k - last, k), gl.where(over, after[0], here[0]),
           gl.where(over, after[1], here[1]), gl.where(over, after[2], here[2]), gl.where(over, after[3], here[3]),
           K, BLOCK_N, BLOCK_M, WARPS)  # fmt: skip


@jit
def _start(ring, j, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, MMA: gl.constexpr):
    """The product of the ring's j-th step, in flight."""
    ws, xs, ss, bars = ring
    slot = j % STAGES
    async_copy.wait_group(STAGES - 3)
    mbarrier.wait(bars.index(slot), j // STAGES & 1)
    hopper.fence_async_shared()  # rows are copied by threads, and read by the tensor cores
    _barrier()
    zeros = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, MMA)
    return hopper.warpgroup_mma(ws.index(slot), xs.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def _add(acc, product, ring, j, w_scales, RUNNING: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr):
    """acc plus the product of the ring's j-th step times its scales; RUNNING later ones need not be done."""
    w_scale = gl.load(w_scales)
    done = hopper.warpgroup_mma_wait(RUNNING, deps=[product])
    scale = ring[2].index(j % STAGES).load(gl.SliceLayout(0, MMA)) * w_scale
    return acc + done * scale[None, :]


@(jit if gl is None else gluon.jit(do_not_specialize=_SIZES))
def grouped_hopper_kernel(
    x, x_scales, weight, weight_scales, counts, out, partials, arrived,
    scales_stack, scales_row, scales_column, num_experts, room,
    N: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr, PADDED: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr, LEAST: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As `grouped_kernel`; K a multiple of 128, LEAST no less than STAGES − 2."""
    STEPS: gl.constexpr = K // 128
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    DEPTH: gl.constexpr = STAGES - 2
    TOGETHER: gl.constexpr = max(1, 8192 // (BLOCK_N * BLOCK_M))
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    FP8: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ws = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 128], FP8)
    xs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, 128], FP8)
    ss = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    inputs, ring = (x, x_scales, weight, scales_row, scales_column), (ws, xs, ss, bars)
    gdc_wait()
    gdc_launch_dependents()

    expert = gl.arange(0, EXPERTS, LINE)
    count = gl.maximum(gl.load(counts + expert, mask=expert < num_experts, other=0), 0)
    begin = gl.zeros([EXPERTS], gl.int32, LINE)
    if not PADDED:
        filled = (count + 127) // 128 * 128
        begin = gl.associative_scan(filled, 0, _plus) - filled
    count = gl.maximum(gl.minimum(count, room - begin), 0)
    tiles_m = (count + BLOCK_M - 1) // BLOCK_M
    ends = gl.associative_scan(tiles_m * TILES_N, 0, _plus)
    total = gl.sum(tiles_m * TILES_N, axis=0)
    table = (expert, count, begin, tiles_m, ends)

    programs = gl.num_programs(0)
    rest = total % programs
    parts = gl.minimum(programs // gl.maximum(rest, 1), STEPS // LEAST)
    program = gl.program_id(0)
    cut = program < rest * parts
    tile = gl.where(cut, program // parts, rest + program)
    part = gl.where(cut, program % parts, 0)
    of = gl.where(cut, parts, 1)
    k = part * STEPS // of
    last = (part + 1) * STEPS // of
    w_row, column, row, left, s_row, w_scale = _find(
        tile, table, room, scales_stack, scales_row, N, K, PADDED, BLOCK_N, BLOCK_M)  # fmt: skip
    for i in gl.static_range(DEPTH):
        _fetch(inputs, ring, i, k + i, w_row, row, left, s_row, K, BLOCK_N, BLOCK_M, WARPS)
    j = 0
    while tile < total:
        after = gl.where(cut, rest + program, tile + programs)
        cut = program < 0
        w_row2, column2, row2, left2, s_row2, w_scale2 = _find(
            after, table, room, scales_stack, scales_row, N, K, PADDED, BLOCK_N, BLOCK_M)  # fmt: skip
        here, then = (w_row, row, left, s_row), (w_row2, row2, left2, s_row2)
        acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, MMA)
        # Nothing is in flight where a turn begins: ptxas would then keep products apart that share registers.
        for _ in range(0, (last - k) // 4):
            a = _start(ring, j, STAGES, BLOCK_N, BLOCK_M, MMA)
            _fetch_ahead(inputs, ring, j, k, last, here, then, K, BLOCK_N, BLOCK_M, STAGES, WARPS)
            b = _start(ring, j + 1, STAGES, BLOCK_N, BLOCK_M, MMA)
            _fetch_ahead(inputs, ring, j + 1, k + 1, last, here, then, K, BLOCK_N, BLOCK_M, STAGES, WARPS)
            acc = _add(acc, a, ring, j, weight_scales + w_scale + k, 1, STAGES, MMA)
            a = _start(ring, j + 2, STAGES, BLOCK_N, BLOCK_M, MMA)
            _fetch_ahead(inputs, ring, j + 2, k + 2, last, here, then, K, BLOCK_N, BLOCK_M, STAGES, WARPS)
            acc = _add(acc, b, ring, j + 1, weight_scales + w_scale + k + 1, 1, STAGES, MMA)
            b = _start(ring, j + 3, STAGES, BLOCK_N, BLOCK_M, MMA)
            _fetch_ahead(inputs, ring, j + 3, k + 3, last, here, then, K, BLOCK_N, BLOCK_M, STAGES, WARPS)
            acc = _add(acc, a, ring, j + 2, weight_scales + w_scale + k + 2, 1, STAGES, MMA)
            acc = _add(acc, b, ring, j + 3, weight_scales + w_scale + k + 3, 0, STAGES, MMA)
            j += 4
            k += 4
        for _ in range(k, last):
            a = _start(ring, j, STAGES, BLOCK_N, BLOCK_M, MMA)
            _fetch_ahead(inputs, ring, j, k, last, here, then, K, BLOCK_N, BLOCK_M, STAGES, WARPS)
            acc = _add(acc, a, ring, j, weight_scales + w_scale + k, 0, STAGES, MMA)
            j += 1
            k += 1

        complete = of == 1
        if of > 1:
            n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
            m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
            sums = partials + tile.to(gl.int64) * parts * (BLOCK_N * BLOCK_M) + n[:, None] * BLOCK_M + m[None, :]
            gl.store(sums + part * (BLOCK_N * BLOCK_M), acc, cache_modifier=".cg")
            _barrier()  # all threads have stored before one of them says so
            complete = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == parts - 1
            if complete:
                gl.store(arrived + tile, 0)
                acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, MMA)
                for p in range(0, parts, TOGETHER):
                    for i in gl.static_range(TOGETHER):  # so many loads in flight
                        at = sums + (p + i) * (BLOCK_N * BLOCK_M)
                        acc += gl.load(at, mask=p + i < parts, other=0.0, cache_modifier=".cg")
        n = column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
        target = out + (row + m).to(gl.int64)[None, :] * N + n[:, None]
        inside = (n < N)[:, None] & (m < left)[None, :] & complete
        gl.store(target, gl.convert_layout(acc.to(gl.bfloat16), OUT), mask=inside)

        tile = after
        w_row, column, row, left, s_row, w_scale = w_row2, column2, row2, left2, s_row2, w_scale2
        part = 0
        of = 1
        k = 0
        last = STEPS
