"""BMM in block FP8 for Hopper, in Gluon: activations go from shared memory straight into the tensor cores' registers.

What it computes is said in `moelab.ops.bmm`, whose kernel does the same in plain Triton and on any GPU. There a tile of
activations passes through shared memory twice, in bfloat16 and again in FP8, and its scales a third time, with a
barrier each. Here a program of four warps loads the bfloat16 tile as WGMMA wants its first operand in registers: a row
lies in four neighbouring threads, so that two shuffles find its amax, and the same threads later hold the row's sums,
so that its scale is where it is needed.

A program keeps the weights of its head in shared memory, 64 KiB, and lets its tokens pass through a ring that TMA
fills; two programs share a multiprocessor.

- K = 128 (k_b): one tile of activations meets all columns, 128 at a time; results leave through TMA.
- N = 128 (v_b): the groups of K are summed in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moelab.ops import multiprocessors
from moelab.ops.fp8 import BLOCK
from moelab.ops.jit import tl

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton, or one without Gluon
    gluon = gl = hopper = mbarrier = tma = None

# Triton 3.7 names it `barrier`.
_barrier = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)

ROWS = 64  # of a tile: what WGMMA takes
WIDTHS = (128, 512)  # N and K in either order; the wider one fills shared memory
PROGRAMS_PER_SM = 2


def jit(function: Any) -> Any:
    """`gluon.jit` with sizes whose value or divisibility would only make for more variants, or the function itself."""
    sizes = ("num_tokens", "heads", "tiles", "each")
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return gluon.jit(function, do_not_specialize=[n for n in sizes if n in names]) if gluon else function


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Compute capability 9.0 and a Triton with Gluon."""
    here = gl is not None and device.type == "cuda" and torch.version.hip is None
    return here and torch.cuda.get_device_capability(device) == (9, 0)


def takes(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether this kernel can run on these operands: k_b's and v_b's sizes, all heads of a token before the next
    token's, starts and strides in multiples of 16 bytes, as TMA wants them."""
    if sorted(weight.shape[1:]) != sorted(WIDTHS) or not runs_on(x.device):
        return False
    matrices = all(
        t.data_ptr() % 16 == 0
        and t.stride(0) % 8 == t.stride(1) % 8 == 0
        and t.stride(1) >= t.shape[2]
        and (t.shape[0] <= 1 or t.stride(0) >= (t.shape[1] - 1) * t.stride(1) + t.shape[2])
        for t in (x, out)
    )
    return matrices and weight.data_ptr() % 16 == 0


def launch(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """As `moelab.ops.bmm.bmm`, T and heads at least 1."""
    num_tokens, heads, depth = x.shape
    columns = weight.shape[1]
    tiles = -(-num_tokens // ROWS)
    slots = PROGRAMS_PER_SM * multiprocessors.count(x.device)
    each = -(-tiles // max(1, min(tiles, slots // heads)))  # tiles of a program
    kernel = _wide_kernel if depth == BLOCK else _deep_kernel
    kernel[(heads * -(-tiles // each),)](
        _boxes(_matrix(x), ROWS, 16), _boxes(weight.flatten(0, 1), BLOCK, 8), _boxes(_matrix(out), ROWS, 16),
        weight, scales, out, x.stride(1), out.stride(0), out.stride(1), num_tokens, heads, tiles, each,
        BLOCKS=max(columns, depth) // BLOCK, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _matrix(t: Tensor) -> Tensor:
    """[T, heads, D] as [T, everything between a token's first and last value]."""
    tokens, heads, width = t.shape
    return t.as_strided((tokens, (heads - 1) * t.stride(1) + width), (t.stride(0), 1))


def _boxes(matrix: Tensor, rows: int, bits: int) -> Any:
    """Boxes of `rows` times 128, to be moved by TMA; beyond the edges they are 0 and nothing is written."""
    layout = gl.NVMMASharedLayout(128, bits, 2)
    # TMA wants a stride in multiples of 16 bytes even of a single row, where torch may say anything.
    stride = matrix.stride(0) if matrix.shape[0] > 1 else -(-matrix.shape[1] // 16) * 16
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [rows, BLOCK], layout)


@jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _quantize(tile, ROW: gl.constexpr, A: gl.constexpr):
    """A tile bfloat16 [64, 128] in shared memory -> FP8 as WGMMA's first operand, and its rows' scales; the same bits
    as `quantize.quantize_groups` gives.

    a/448 and 1/s are a product and a reciprocal, corrected once: amax has one of 128 mantissas, or is the floor, and
    for each the results are the rounded quotients; the second even from a reciprocal that is 4 units off."""
    wide = tile.load(A).to(gl.float32)
    amax = gl.reduce(gl.abs(wide), 1, _larger)
    amax = tl.maximum(amax, 1e-4, propagate_nan=tl.PropagateNan.ALL)
    scale = amax * 0.0022321428571428572
    scale = gl.fma(gl.fma(-scale, 448.0, amax), 0.0022321428571428572, scale)
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=gl.float32, is_pure=True, pack=1
    )
    inverse = gl.fma(gl.fma(-inverse, scale, 1.0), inverse, inverse)
    values = (wide * inverse[:, None]).to(gl.float8e4nv)
    return values, gl.convert_layout(scale, ROW)


@jit
def _prefetch(weight, BYTES: gl.constexpr):
    """A head's weights into the L2, one request a thread."""
    piece = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])) * (BYTES // 128)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", [(weight + piece).to(gl.int64), gl.full_like(piece, BYTES // 128)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@jit
def _fetch(x_desc, row, column, ring, bars, stage, wanted):
    mbarrier.expect(bars.index(stage), 64 * 128 * 2, pred=wanted)
    tma.async_copy_global_to_shared(x_desc, [row, column], bars.index(stage), ring.index(stage), pred=wanted)


@jit
def _deep_kernel(
    x_desc, w_desc, out_desc, weight, scales, out, x_head_stride, token_stride, head_stride, num_tokens, heads, tiles,
    each, BLOCKS: gl.constexpr,
):  # fmt: skip
    """N = 128, K = BLOCKS · 128. A program takes `each` tiles of 64 tokens of one head."""
    STAGES: gl.constexpr = 3
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ws = gl.allocate_shared_memory(gl.float8e4nv, [BLOCKS, 128, 128], gl.NVMMASharedLayout(128, 8, 2))
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], gl.NVMMASharedLayout(128, 16, 2))
    w_bars = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BLOCKS):
        mbarrier.init(w_bars.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    hopper.fence_async_shared()
    _barrier()

    head = gl.program_id(0) % heads
    first = gl.program_id(0) // heads * each
    steps = gl.minimum(each, tiles - first) * BLOCKS
    column = head * x_head_stride
    _prefetch(weight + head.to(gl.int64) * (128 * BLOCKS * 128), 128 * BLOCKS * 128)
    gdc_wait()
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        _fetch(x_desc, (first + i // BLOCKS) * 64, column + i % BLOCKS * 128, xs, bars, i, i < steps)
        mbarrier.expect(w_bars.index(i), 128 * 128)
        tma.async_copy_global_to_shared(w_desc, [head * 128, i * 128], w_bars.index(i), ws.index(i))
    for i in gl.static_range(STAGES, BLOCKS):
        mbarrier.expect(w_bars.index(i), 128 * 128)
        tma.async_copy_global_to_shared(w_desc, [head * 128, i * 128], w_bars.index(i), ws.index(i))

    scales += head * BLOCKS
    out += head.to(gl.int64) * head_stride
    zero = gl.zeros((64, 128), gl.float32, MMA)
    total = zero
    stage = 0
    phase = 0
    for step in range(0, steps):
        k = step % BLOCKS
        gain = gl.load(scales + k)
        mbarrier.wait(bars.index(stage), phase)
        values, scale = _quantize(xs.index(stage), ROW, A)
        _barrier()  # all warps have it in registers
        again = step + STAGES
        _fetch(x_desc, (first + again // BLOCKS) * 64, column + again % BLOCKS * 128, xs, bars, stage, again < steps)
        mbarrier.wait(w_bars.index(k), 0)
        running = hopper.warpgroup_mma(values, ws.index(k).permute((1, 0)), zero, use_acc=False, is_async=True)
        by = scale * gain
        total += hopper.warpgroup_mma_wait(0, deps=[running]) * by[:, None]
        if k == BLOCKS - 1:
            row = (first + step // BLOCKS) * 64 + gl.arange(0, 64, ROW)
            where = row.to(gl.int64)[:, None] * token_stride + gl.arange(0, 128, gl.SliceLayout(0, MMA))[None, :]
            gl.store(out + where, total.to(gl.bfloat16), mask=(row < num_tokens)[:, None])
            total = zero
        phase = gl.where(stage + 1 == STAGES, phase ^ 1, phase)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)


@jit
def _wide_kernel(
    x_desc, w_desc, out_desc, weight, scales, out, x_head_stride, token_stride, head_stride, num_tokens, heads, tiles,
    each, BLOCKS: gl.constexpr,
):  # fmt: skip
    """K = 128, N = BLOCKS · 128. A program takes `each` tiles of 64 tokens of one head."""
    STAGES: gl.constexpr = 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    ws = gl.allocate_shared_memory(gl.float8e4nv, [BLOCKS, 128, 128], gl.NVMMASharedLayout(128, 8, 2))
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], gl.NVMMASharedLayout(128, 16, 2))
    leaving = gl.allocate_shared_memory(gl.bfloat16, [64, 128], gl.NVMMASharedLayout(128, 16, 2))
    w_bars = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BLOCKS):
        mbarrier.init(w_bars.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    hopper.fence_async_shared()
    _barrier()

    head = gl.program_id(0) % heads
    first = gl.program_id(0) // heads * each
    last = gl.minimum(first + each, tiles)
    column = head * x_head_stride
    _prefetch(weight + head.to(gl.int64) * (128 * BLOCKS * 128), 128 * BLOCKS * 128)
    gdc_wait()
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        _fetch(x_desc, (first + i) * 64, column, xs, bars, i, first + i < last)
    for i in gl.static_range(BLOCKS):
        mbarrier.expect(w_bars.index(i), 128 * 128)
        tma.async_copy_global_to_shared(w_desc, [(head * BLOCKS + i) * 128, 0], w_bars.index(i), ws.index(i))

    gains = ()
    for n in gl.static_range(BLOCKS):
        gains += (gl.load(scales + head * BLOCKS + n),)
    zero = gl.zeros((64, 128), gl.float32, MMA)
    for tile in range(first, last):
        stage = (tile - first) % STAGES
        mbarrier.wait(bars.index(stage), (tile - first) // STAGES & 1)
        values, scale = _quantize(xs.index(stage), ROW, A)
        _barrier()  # all warps have it in registers
        again = tile + STAGES
        _fetch(x_desc, again * 64, column, xs, bars, stage, again < last)
        mbarrier.wait(w_bars.index(0), 0)
        running = hopper.warpgroup_mma(values, ws.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        for n in gl.static_range(BLOCKS):
            product = hopper.warpgroup_mma_wait(0, deps=[running])
            if n + 1 < BLOCKS:
                mbarrier.wait(w_bars.index(n + 1), 0)
                w = ws.index(n + 1).permute((1, 0))
                running = hopper.warpgroup_mma(values, w, zero, use_acc=False, is_async=True)
            result = (product * (scale * gains[n])[:, None]).to(gl.bfloat16)
            tma.store_wait(pendings=0)
            _barrier()  # the result before has left
            leaving.store(result)
            hopper.fence_async_shared()
            _barrier()
            tma.async_copy_shared_to_global(out_desc, [tile * 64, head * head_stride + n * 128], leaving)
    tma.store_wait(pendings=0)
