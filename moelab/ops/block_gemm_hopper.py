"""The block-FP8 linear kernel for Hopper, in Gluon: a ring of TMA copies that WGMMA reads where they land.

What it computes, and why weights are the first operand and K is cut, is said in `moelab.ops.block_gemm`, whose kernel
does the same in plain Triton and on any GPU. But plain Triton copies 16 bytes a thread, with an address for each, and
scales one by one: for 64 tokens that is most of its work. Here one thread asks TMA for three boxes (weights, rows,
scales of the rows) that hold several groups of 128, and all others wait for one barrier before the tensor cores begin.
While one group is multiplied, the one before is scaled and added in float32. On an H200 7168 → 2112 took 9.4 µs so and
10.9 in plain Triton at 64 tokens, 1536 → 24576 12.1 and 13.6.

*Parts are added together.* Where every program has a multiprocessor to itself, the programs of a tile wait for one
another, and each adds all parts of some of the rows: 0.4 µs less on 7168 → 2112 than when the last to arrive adds all.
All programs run then, so the wait ends; of kernels on several streams, the GPU starts one whole before the next. Where
there are more programs nobody waits, and the last to arrive adds. Either way in the order of K.

What did not help, on the same H200: asking the L2 for weights before the kernel's turn (0.9 µs more on 7168 → 2112, up
to 0.4 less where weights have 25 MB and more: hence a Config's `ahead`), or TMA for them before it (0.8 more). Reading
19 MB from the L2 takes the multiprocessors hardly less time than from memory, and the kernel ahead is reading, too.

TMA wants starts and strides in multiples of 16 bytes and scales in the format `column_tma`, and a box of several groups
wants whole groups: `takes` says whether operands are so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moelab.ops import multiprocessors
from moelab.ops.arrivals import COUNTERS, ROUND, counters, rounds
from moelab.ops.block_gemm import Config
from moelab.ops.fp8 import BLOCK, num_blocks

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton, or one without Gluon
    gluon = gl = hopper = mbarrier = tma = None

_ROUND = None if gl is None else gl.constexpr(ROUND)

# Triton 3.7 names it `barrier`.
_barrier = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)


def jit(function: Any) -> Any:
    """`gluon.jit` with sizes whose value or divisibility would only make for more variants, or the function itself."""
    sizes = ("w_scales_stride", "num_rows", "blocks", "tiles_m", "split", "ahead")
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return gluon.jit(function, do_not_specialize=[n for n in sizes if n in names]) if gluon else function


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Compute capability 9.0 and a Triton with Gluon."""
    here = gl is not None and device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return here and torch.cuda.get_device_capability(device) == (9, 0)


def takes(x: Tensor, x_scales: Tensor, weight: Tensor) -> bool:
    """Whether this kernel can run on these operands, as they are."""
    aligned = all(t.data_ptr() % 16 == 0 for t in (x, x_scales, weight))
    strided = x.stride(0) % 16 == 0 and weight.stride(0) % 16 == 0
    columns = x_scales.stride(0) == 1 and x_scales.stride(1) % 4 == 0
    return runs_on(x.device) and aligned and strided and columns and x.shape[1] % BLOCK == 0


def sweep(rows: int, columns: int, depth: int) -> list[Config]:
    """The configs worth timing for [rows, depth] · [columns, depth]ᵀ on an H200: tiles of as many tokens as there are,
    K cut so that there are about one or two programs for each of its 132 multiprocessors."""
    blocks = num_blocks(depth)
    if rows <= 32:
        tiles, loops = [(64, 32)], [(2, 3), (2, 4)]
    elif rows <= 64:
        tiles, loops = [(64, 64)], [(2, 2), (2, 3)]
    else:
        tiles, loops = [(64, 64), (64, 128)], [(2, 2)] if rows > 256 else [(2, 3)]
    aheads = (0, 8) if rows <= 64 and columns * depth >= 25_000_000 else (0,)
    found = []
    for block_n, block_m in tiles:
        programs = -(-columns // block_n) * -(-rows // block_m)
        splits = {max(1, min(132 * fill // programs, blocks // 4, 14)) for fill in (1, 2)}
        for split in sorted(splits) if rows <= 256 else (1,):
            found += [Config(block_n, block_m, split, 4, *loop, ahead) for loop in loops for ahead in aheads]
    return found


def block_gemm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor, config: Config) -> None:
    """As `moelab.ops.block_gemm.block_gemm`. block_m: 32, 64 or 128; block_n: 64 or 128."""
    rows, columns = out.shape
    blocks = num_blocks(x.shape[1])
    block_n, block_m, split, warps, unroll, stages, ahead = config
    tiles_m = -(-rows // block_m)
    tiles = -(-columns // block_n) * tiles_m
    split = min(split, blocks) if tiles <= COUNTERS else 1
    rows_each = share(rows, columns, split, block_n, block_m, x.device)
    partials = arrived = out  # not touched
    if split > 1:
        partials = torch.empty(tiles * split * block_n * block_m, dtype=torch.float32, device=x.device)
        arrived = rounds(x.device) if rows_each else counters(x.device)
    _kernel[(tiles * split,)](
        _groups(x, block_m, unroll), _boxes(x_scales.T, [unroll, block_m], 0), _groups(weight, block_n, unroll),
        weight, weight_scales, out, partials, arrived, weight.stride(0), weight_scales.stride(0), out.stride(0),
        rows, columns, blocks, tiles_m, split, (ahead << 20) // (columns * split) // BLOCK * BLOCK,
        BLOCK_N=block_n, BLOCK_M=block_m, GROUPS=unroll, STAGES=stages, WHOLE=split == 1, WARPS=warps,
        SHARE=rows_each, num_warps=warps, launch_pdl=True,
    )  # fmt: skip


def share(rows: int, columns: int, split: int, block_n: int, block_m: int, device: torch.device) -> int:
    """Where the parts of a tile are added together: of how many of its rows each program adds them. Else 0."""
    programs = -(-rows // block_m) * -(-columns // block_n) * split
    together = split > 1 and programs <= multiprocessors.count(device)
    return block_n >> min(split.bit_length() - 1, 3) if together else 0


def _groups(matrix: Tensor, rows: int, groups: int) -> Any:
    """A matrix [R, K] as [K/128, R, 128], to be fetched by TMA in boxes of `groups` times rows times 128."""
    view = matrix.unflatten(1, (-1, BLOCK)).transpose(0, 1)
    return _boxes(view, [groups, rows, BLOCK], 128)


def _boxes(tensor: Tensor, box: list[int], swizzle: int) -> Any:
    """What TMA wants to know of a tensor; beyond its edges a box is 0."""
    layout = gl.NVMMASharedLayout(swizzle, element_bitwidth=tensor.element_size() * 8, rank=len(box))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)


@jit
def _fetch_weights(w_desc, ws, bar, column, k, wanted, BYTES: gl.constexpr):
    mbarrier.expect(bar, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(w_desc, [k, column, 0], bar, ws, pred=wanted)


@jit
def _fetch_rows(x_desc, s_desc, xs, ss, bar, row, k, wanted):
    tma.async_copy_global_to_shared(x_desc, [k, row, 0], bar, xs, pred=wanted)
    tma.async_copy_global_to_shared(s_desc, [k, row], bar, ss, pred=wanted)


@jit
def _multiply(ws, xs, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, MMA: gl.constexpr):
    """Weights times rows of one group of 128, in flight."""
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, MMA)
    return hopper.warpgroup_mma(ws, xs.permute((1, 0)), zero, use_acc=False, is_async=True)


@jit
def _prefetch(
    weight, w_stride, column, num_columns, first, last, ahead, wanted, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The first `ahead` bytes of a part's weights into the L2, one request a thread."""
    PIECES: gl.constexpr = WARPS * 32 // BLOCK_N
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 1], [32 // PIECES, PIECES], [WARPS, 1], [1, 0])
    n = column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SPREAD))
    bytes = gl.minimum((last - first) * 128, ahead)
    piece = (bytes + (PIECES * 16 - 1)) // (PIECES * 16) * 16
    start = gl.arange(0, PIECES, gl.SliceLayout(0, SPREAD)) * piece
    size = gl.where(((n < num_columns) & wanted)[:, None], gl.minimum(bytes - start, piece)[None, :], 0)
    address = (weight + n.to(gl.int64)[:, None] * w_stride + (first * 128 + start)[None, :]).to(gl.int64)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _sum(sums, split, SIZE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr):
    """The partial sums of a tile, SIZE values each, or of some rows of it, added in the order of K."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BLOCK_M, BLOCK_M // 4], [WARPS, 1], [1, 0])
    AT_ONCE: gl.constexpr = 8 if BLOCK_N * BLOCK_M <= 2048 else 4 if BLOCK_N * BLOCK_M <= 4096 else 2
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, WIDE))
    where = sums + n[:, None] * BLOCK_M + m[None, :]
    total = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, WIDE)
    for p in range(0, split, AT_ONCE):  # so many loads are under way at a time
        for i in gl.static_range(AT_ONCE):
            at = where + (p + i) * SIZE
            total += gl.load(at, mask=p + i < split, other=0.0, cache_modifier=".cg")
    return total


@jit
def _put(
    out, value, column, row, num_columns, num_rows, out_stride,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_M] into out [rows, columns], 16 bytes a thread."""
    SPREAD: gl.constexpr = gl.BlockedLayout([8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, WARPS], [0, 1])
    value = gl.convert_layout(value.to(gl.bfloat16), SPREAD)
    n = column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SPREAD))
    m = row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SPREAD))
    inside = (n < num_columns)[:, None] & (m < num_rows)[None, :]
    gl.store(out + m.to(gl.int64)[None, :] * out_stride + n[:, None], value, mask=inside)


@jit
def _kernel(
    x_desc, s_desc, w_desc, weight, w_scales, out, partials, arrived, w_stride, w_scales_stride, out_stride,
    num_rows, num_columns, blocks, tiles_m, split, ahead,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    WARPS: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Parts of one tile stand side by side in the grid, and so do tiles of the same weights."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    BYTES: gl.constexpr = GROUPS * ((BLOCK_N + BLOCK_M) * 128 + BLOCK_M * 4)
    ws = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, GROUPS, BLOCK_N, 128], gl.NVMMASharedLayout(128, 8, 3))
    xs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, GROUPS, BLOCK_M, 128], gl.NVMMASharedLayout(128, 8, 3))
    ss = gl.allocate_shared_memory(gl.float32, [STAGES, GROUPS, BLOCK_M], gl.NVMMASharedLayout(0, 32, 2))
    # The same memory, group by group, as WGMMA and the threads read it.
    w_tiles = ws._reinterpret(gl.float8e4nv, [STAGES * GROUPS, BLOCK_N, 128], TILE)
    x_tiles = xs._reinterpret(gl.float8e4nv, [STAGES * GROUPS, BLOCK_M, 128], TILE)
    s_rows = ss._reinterpret(gl.float32, [STAGES * GROUPS, BLOCK_M], gl.NVMMASharedLayout(0, 32, 1))
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    hopper.fence_async_shared()
    _barrier()

    part = gl.program_id(0) % split
    tile = gl.program_id(0) // split
    column = tile // tiles_m * BLOCK_N
    row = tile % tiles_m * BLOCK_M
    first = part * blocks // split
    last = (part + 1) * blocks // split
    if ahead > 0:
        _prefetch(weight, w_stride, column, num_columns, first, last, ahead, row == 0, BLOCK_N, WARPS)
    gdc_wait()
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        k = first + i * GROUPS
        _fetch_weights(w_desc, ws.index(i), bars.index(i), column, k, k < last, BYTES)
        _fetch_rows(x_desc, s_desc, xs.index(i), ss.index(i), bars.index(i), row, k, k < last)

    w_scales += column // 128 * w_scales_stride
    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, MMA)
    stage = 0
    phase = 0
    for k in range(first, last, GROUPS):
        mbarrier.wait(bars.index(stage), phase)
        at = stage * GROUPS
        running = _multiply(w_tiles.index(at), x_tiles.index(at), BLOCK_N, BLOCK_M, MMA)
        for i in gl.static_range(GROUPS):
            # A group that belongs to the next part counts nothing.
            by = gl.load(w_scales + k + i, mask=k + i < last, other=0.0) * s_rows.index(at + i).load(COLUMNS)
            if i + 1 < GROUPS:
                following = _multiply(w_tiles.index(at + i + 1), x_tiles.index(at + i + 1), BLOCK_N, BLOCK_M, MMA)
                product = hopper.warpgroup_mma_wait(1, deps=[running])
                running = following
            else:
                product = hopper.warpgroup_mma_wait(0, deps=[running])
            acc += product * by[None, :]
        _barrier()  # all warps are through with this place in the ring
        again = k + STAGES * GROUPS
        _fetch_weights(w_desc, ws.index(stage), bars.index(stage), column, again, again < last, BYTES)
        _fetch_rows(x_desc, s_desc, xs.index(stage), ss.index(stage), bars.index(stage), row, again, again < last)
        phase = gl.where(stage + 1 == STAGES, phase ^ 1, phase)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)

    if WHOLE:
        _put(out, acc, column, row, num_columns, num_rows, out_stride, BLOCK_N, BLOCK_M, WARPS)
    else:
        SIZE: gl.constexpr = BLOCK_N * BLOCK_M
        sums = partials + (tile * split).to(gl.int64) * SIZE
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
        m = gl.arange(0, BLOCK_M, COLUMNS)
        gl.store(sums + part * SIZE + n[:, None] * BLOCK_M + m[None, :], acc, cache_modifier=".cg")
        _barrier()  # all threads have stored before one of them says so
        if SHARE > 0:
            # `full`: what the counter comes to when all parts of this launch are there.
            mine = _ROUND // split + gl.where(part == 0, _ROUND % split, 0)
            count = gl.atomic_add(arrived + tile, mine, sem="acq_rel")
            full = count - (count & (_ROUND - 1)) + _ROUND
            count += mine
            if part * SHARE < BLOCK_N:
                while count - full < 0:
                    count = gl.atomic_add(arrived + tile, 0, sem="acquire")
                total = _sum(sums + part * SHARE * BLOCK_M, split, SIZE, SHARE, BLOCK_M, WARPS)
                _put(out, total, column + part * SHARE, row, num_columns, num_rows, out_stride, SHARE, BLOCK_M, WARPS)
        elif gl.atomic_add(arrived + tile, 1, sem="acq_rel") == split - 1:
            total = _sum(sums, split, SIZE, BLOCK_N, BLOCK_M, WARPS)
            _put(out, total, column, row, num_columns, num_rows, out_stride, BLOCK_N, BLOCK_M, WARPS)
            gl.store(arrived + tile, 0)
