"""The Triton kernel of the block-FP8 linear op: split-K for few tokens, a plain tiled product for many.

    out[t, n] = Σ_s xscale[t, s] · wscale[⌊n/128⌋, s] · Σ_{k in s} x[t, k] · w[n, k]        s: groups of 128 along K

The inner sum runs in the tensor cores, the outer one in float32 registers, since Hopper's FP8 wgmma keeps fewer bits
than float32 while it accumulates (arXiv 2412.19437, section 3.3).

*Weights first.* wgmma takes 64 rows of its first operand at a time and any multiple of 8 of its second. Weights always
have 64 rows; tokens do not. So a tile is BLOCK_N weight rows by BLOCK_M tokens (the idea of "swap AB" in TensorRT-LLM
and FlashInfer), and 16 tokens do not pay for 64.

*Split-K.* Up to some 64 tokens the op is a stream of weights. With one program for a tile of 64 × K, 7168 → 2112 would
keep 33 of 132 SMs busy; with the K axis cut in `split` parts all of them. Partial sums meet as `moelab.ops.arrivals`
says, in a fixed order: the result is the same, bit for bit, in every run.

*Weights before their turn.* The kernel is launched early (`moelab.ops.early_launch`), and before it waits for the
kernel ahead it asks for its weights with `cp.async.bulk.prefetch.L2`: memory is busy while the kernel ahead ends, and
the weights come from the L2 afterwards. Nothing is read into the SM before the wait, and the L2 is where all writes of
the GPU meet, so it does not matter if the kernel ahead is just writing those weights.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moelab.ops.arrivals import COUNTERS, counters
from moelab.ops.early_launch import launches_early
from moelab.ops.fp8 import BLOCK, num_blocks
from moelab.ops.jit import jit, tl, triton

AHEAD_BYTES = 24 << 20  # weights asked for early: what the L2 of an H200 (60 MB) keeps until they are read


class Config(NamedTuple):
    """A tile, in how many parts K is cut, warps of a program, and loads in flight. As text: "64x16/4 w4 s6"."""

    block_n: int
    block_m: int
    split: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_n}x{self.block_m}/{self.split} w{self.warps} s{self.stages}"


@functools.cache
def parse(text: str) -> Config:
    """The Config that `str` made this text of."""
    tile, warps, stages = text.split(" ")
    blocks, split = tile.split("/")
    block_n, block_m = blocks.split("x")
    return Config(int(block_n), int(block_m), int(split), int(warps[1:]), int(stages[1:]))


def sweep(rows: int, columns: int, depth: int) -> list[Config]:
    """The configs worth timing for [rows, depth] · [columns, depth]ᵀ: tiles of as many tokens as there are or the next
    larger ones, K cut so that there are about 1, 2, 3 or 4 programs for each of an H200's 132 multiprocessors."""
    blocks = num_blocks(depth)
    if rows <= 64:
        block_m = max(16, 1 << (rows - 1).bit_length())
        tiles = [(64, block_m, 4), (128, block_m, 8 if block_m == 64 else 4)]
    elif rows <= 256:
        tiles = [(64, 128, 4), (128, 128, 8), (64, 64, 4), (128, 64, 8)]
    else:
        tiles = [(128, 128, 8), (64, 128, 4)]
    found = []
    for block_n, block_m, warps in tiles:
        programs = -(-columns // block_n) * -(-rows // block_m)
        splits = sorted({1} | {max(1, min(132 * fill // programs, blocks // 2, 16)) for fill in (1, 2, 3, 4)})
        found += [Config(block_n, block_m, split, warps, 4) for split in splits]
    return found


def block_gemm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor, config: Config) -> None:
    """Arguments as `moelab.ops.linear.linear` has checked them, M, N and K above 0; writes `out`."""
    rows, columns = out.shape
    depth = x.shape[1]
    block_n, block_m, split, warps, stages = config
    tiles_n, tiles_m = triton.cdiv(columns, block_n), triton.cdiv(rows, block_m)
    tiles = tiles_n * tiles_m
    split = min(split, num_blocks(depth)) if tiles <= COUNTERS else 1
    early = launches_early(x)
    tma = x.is_cuda and _takes_tma(x, x_scales, weight)
    partials = arrived = out  # not touched
    if split > 1:
        partials = torch.empty(tiles * split * block_n * block_m, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
    ahead = 0
    if early and weight.stride(0) % 16 == 0 and depth % 16 == 0:
        ahead = max(BLOCK, AHEAD_BYTES // (columns * split) // BLOCK * BLOCK)
    x_from, s_from, w_from = x, x_scales, weight
    if tma:
        x_from = _descriptor(x, block_m, BLOCK)
        s_from = _descriptor(x_scales.T, 1, block_m)
        w_from = _descriptor(weight, block_n, BLOCK)
    gemm_kernel[(tiles * split,)](
        x_from, s_from, w_from, weight, weight_scales, out, partials, arrived, x.stride(0), *x_scales.stride(),
        weight.stride(0), weight_scales.stride(0), out.stride(0), rows, columns, depth, tiles_m, ahead,
        BLOCK_N=block_n, BLOCK_M=block_m, SPLIT=split, STAGES=stages, TMA=tma, EVEN=depth % BLOCK == 0,
        PREFETCH=ahead > 0, EARLY=early, THREADS=32 * warps, CUDA=x.is_cuda, num_warps=warps, launch_pdl=early,
    )  # fmt: skip


def _takes_tma(x: Tensor, x_scales: Tensor, weight: Tensor) -> bool:
    """Whether all three can be copied by TMA: Hopper, starts and strides in multiples of 16 bytes, scales column-major
    (`column_tma`)."""
    aligned = all(t.data_ptr() % 16 == 0 for t in (x, x_scales, weight))
    strided = x.stride(0) % 16 == 0 and weight.stride(0) % 16 == 0
    columns = x_scales.stride(0) == 1 and x_scales.stride(1) % 4 == 0
    return launches_early(x) and aligned and strided and columns


def _descriptor(tensor: Tensor, rows: int, columns: int):
    """What TMA wants to know of a matrix, for boxes of [rows, columns]; beyond its edges a box is 0."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


@jit
def prefetch_l2(address, size):
    """Ask the L2 for `size` bytes at `address` (int64), both multiples of 16; none where `size` is not above 0."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [address, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# Sizes whose value or divisibility would only make for more variants to compile.
_SIZES = ("scales_column", "w_scales_stride", "num_rows", "tiles_m", "ahead")


@(jit if triton is None else triton.jit(do_not_specialize=_SIZES))
def gemm_kernel(
    x, x_scales, w, weight, weight_scales, out, partials, arrived, x_stride, scales_row, scales_column, w_stride,
    w_scales_stride, out_stride, num_rows, num_columns, depth, tiles_m, ahead,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    EVEN: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr, THREADS: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """x, x_scales and w: TMA descriptors with TMA, else pointers. Parts of one tile stand side by side in the grid, and
    tiles of the same weights."""
    part = tl.program_id(0) % SPLIT
    tile = tl.program_id(0) // SPLIT
    column = tile // tiles_m * BLOCK_N
    row = tile % tiles_m * BLOCK_M
    blocks = tl.cdiv(depth, 128)
    first = part * blocks // SPLIT
    last = (part + 1) * blocks // SPLIT
    n = column + tl.arange(0, BLOCK_N)
    m = row + tl.arange(0, BLOCK_M)
    if EARLY:
        if PREFETCH:
            _prefetch_tile(weight, w_stride, column, num_columns, first, last, depth, ahead, row == 0, BLOCK_N, THREADS)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Rows beyond the edge are read as the last one; they are not stored.
    x_rows, s_rows, w_rows = x, x_scales, w
    if not TMA:
        inside_m = tl.minimum(m, num_rows - 1).to(tl.int64)
        x_rows = x + inside_m[:, None] * x_stride
        s_rows = x_scales + inside_m * scales_row
        w_rows = w + tl.minimum(n, num_columns - 1).to(tl.int64)[:, None] * w_stride
    w_scales = weight_scales + column // 128 * w_scales_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if CUDA:
        for k in tl.range(first, last, num_stages=STAGES):
            acc += _group(x_rows, s_rows, w_rows, w_scales, row, column, k, scales_column, depth, BLOCK_M, TMA, EVEN)
    else:  # a `for` over device values fails in the interpreter of Triton 3.6 with NumPy 2.4
        k = first
        while k < last:
            acc += _group(x_rows, s_rows, w_rows, w_scales, row, column, k, scales_column, depth, BLOCK_M, TMA, EVEN)
            k += 1
    target = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    inside = (n < num_columns)[:, None] & (m < num_rows)[None, :]
    if SPLIT == 1:
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        spot = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        sums = partials + tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M) + spot
        tl.store(sums + part * (BLOCK_N * BLOCK_M), acc, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for p in tl.static_range(SPLIT):
                total += tl.load(sums + p * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)
            tl.store(arrived + tile, 0)


@jit
def _prefetch_tile(
    weight, w_stride, column, num_columns, first, last, depth, ahead, wanted,
    BLOCK_N: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """The first `ahead` bytes of a part's weight rows, one request a thread."""
    PIECES: tl.constexpr = THREADS // BLOCK_N if THREADS > BLOCK_N else 1
    n = column + tl.arange(0, BLOCK_N)
    bytes = tl.minimum(tl.minimum(last * 128, depth) - first * 128, ahead)
    piece = tl.cdiv(bytes, PIECES * 16) * 16
    start = tl.arange(0, PIECES) * piece
    size = tl.minimum(bytes - start, piece)[None, :] * ((n < num_columns)[:, None] & wanted).to(tl.int32)
    address = (weight + n.to(tl.int64)[:, None] * w_stride + first * 128 + start[None, :]).to(tl.int64)
    prefetch_l2(address, size)


@jit
def _group(
    x, x_scales, w, w_scales, row, column, k, scales_column, depth,
    BLOCK_M: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What the k-th 128 values of K add to a tile, float32 [BLOCK_N, BLOCK_M]."""
    if TMA:
        xs = x.load([row, k * 128])
        ws = w.load([column, k * 128])
        scale = tl.reshape(x_scales.load([k, row]), (BLOCK_M,))
    else:
        at = (k * 128 + tl.arange(0, 128))[None, :]
        if EVEN:
            xs = tl.load(x + at)
            ws = tl.load(w + at)
        else:
            xs = tl.load(x + at, mask=at < depth, other=0.0)
            ws = tl.load(w + at, mask=at < depth, other=0.0)
        scale = tl.load(x_scales + k * scales_column)
    scale *= tl.load(w_scales + k)
    return tl.dot(ws, tl.trans(xs)) * scale[None, :]
