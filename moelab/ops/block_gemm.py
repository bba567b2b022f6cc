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
kernel ahead it can ask for its weights with `cp.async.bulk.prefetch.L2`, so that memory is busy while the kernel ahead
ends. Nothing is read into the SM before the wait, and the L2 is where all writes of the GPU meet, so it does not matter
if the kernel ahead is just writing those weights. On an H200 it took 0.3 µs off 7168 → 2112 at 16 tokens and added 1.1
at 64, where the L2 itself is busy: a Config says how much is asked for, and by default nothing is.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import torch
from torch import Tensor

from moelab.ops.arrivals import COUNTERS, counters
from moelab.ops.early_launch import launches_early
from moelab.ops.fp8 import BLOCK, num_blocks
from moelab.ops.jit import jit, tl, triton


class Config(NamedTuple):
    """A tile, in how many parts K is cut, warps of a program, groups of 128 along K in one turn of its loop, turns in
    flight, and how many MiB of the weights the L2 is asked for early. As text: "64x16/4 w4 u2 s3 a0"."""

    block_n: int
    block_m: int
    split: int
    warps: int
    unroll: int
    stages: int
    ahead: int = 0

    def __str__(self) -> str:
        return f"{self.block_n}x{self.block_m}/{self.split} w{self.warps} u{self.unroll} s{self.stages} a{self.ahead}"


@functools.cache
def parse(text: str) -> Config:
    """The Config that `str` made this text of. Raises ValueError for any other."""
    if not (numbers := re.fullmatch(r"(\d+)x(\d+)/(\d+) w(\d+) u(\d+) s(\d+) a(\d+)", text)):
        raise ValueError(f"{text!r} is no config; one is written like '64x16/4 w4 u2 s3 a0'")
    return Config(*map(int, numbers.groups()))


def sweep(rows: int, columns: int, depth: int) -> list[Config]:
    """The configs worth timing for [rows, depth] · [columns, depth]ᵀ: tiles of as many tokens as there are or the next
    larger number, K cut so that there are about one or two programs for each of an H200's 132 multiprocessors."""
    blocks = num_blocks(depth)
    block_m = min(64, max(16, 1 << (rows - 1).bit_length()))
    found = []
    for block_n, unroll, stages in ((64, 1, 4), (128, 1, 7)) if block_m == 16 else ((64, 1, 4),):
        programs = -(-columns // block_n) * -(-rows // block_m)
        for split in sorted({max(1, min(132 * fill // programs, blocks // 4, 14)) for fill in (1, 2)}):
            found.append(Config(block_n, block_m, split, 4, unroll, stages))
    return found


def block_gemm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor, config: Config) -> None:
    """Arguments as `moelab.ops.linear.linear` has checked them, M, N and K above 0; writes `out`."""
    rows, columns = out.shape
    depth = x.shape[1]
    block_n, block_m, split, warps, unroll, stages, ahead = config
    tiles_m = triton.cdiv(rows, block_m)
    tiles = triton.cdiv(columns, block_n) * tiles_m
    blocks = num_blocks(depth)
    split = min(split, blocks) if tiles <= COUNTERS else 1
    partials = arrived = out  # not touched
    if split > 1:
        partials = torch.empty(tiles * split * block_n * block_m, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
    early = launches_early(x)
    aligned = weight.data_ptr() % 16 == weight.stride(0) % 16 == depth % 16 == 0
    ahead = (ahead << 20) // (columns * split) // BLOCK * BLOCK if early and aligned else 0
    gemm_kernel[(tiles * split,)](
        x, x_scales, weight, weight_scales, out, partials, arrived, x.stride(0), *x_scales.stride(), weight.stride(0),
        weight_scales.stride(0), out.stride(0), rows, columns, depth, tiles_m, split, ahead,
        BLOCK_N=block_n, BLOCK_M=block_m, UNROLL=unroll, STAGES=stages, WHOLE=split == 1,
        EVEN=depth % BLOCK == 0 and blocks % (split * unroll) == 0,
        AT_ONCE=max(1, min(8, 128 * 32 * warps // (block_n * block_m))),  # 128 registers a thread
        PREFETCH=ahead > 0, EARLY=early, THREADS=32 * warps, CUDA=x.is_cuda, num_warps=warps, launch_pdl=early,
    )  # fmt: skip


@jit
def prefetch_l2(address, size):
    """Ask the L2 for `size` bytes at `address` (int64), both multiples of 16; none where `size` is not above 0."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [address, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# Sizes whose value or divisibility would only make for more variants to compile.
_SIZES = ("scales_column", "w_scales_stride", "num_rows", "tiles_m", "split", "ahead")


@(jit if triton is None else triton.jit(do_not_specialize=_SIZES))
def gemm_kernel(
    x, x_scales, weight, weight_scales, out, partials, arrived, x_stride, scales_row, scales_column, w_stride,
    w_scales_stride, out_stride, num_rows, num_columns, depth, tiles_m, split, ahead,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, AT_ONCE: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr, THREADS: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """Parts of one tile stand side by side in the grid, and so do tiles of the same weights."""
    part = tl.program_id(0) % split
    tile = tl.program_id(0) // split
    column = tile // tiles_m * BLOCK_N
    blocks = tl.cdiv(depth, 128)
    first = part * blocks // split
    last = (part + 1) * blocks // split
    n = column + tl.arange(0, BLOCK_N)
    m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if EARLY:
        if PREFETCH:
            wanted = (tile % tiles_m == 0) & (n < num_columns)
            _prefetch_rows(weight + n.to(tl.int64) * w_stride, first, last, depth, ahead, wanted, BLOCK_N, THREADS)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Rows beyond the edge are read as the last one; they are not stored.
    row = tl.minimum(m, num_rows - 1).to(tl.int64)
    inner = tl.arange(0, 128)[None, :]
    x_rows = x + row[:, None] * x_stride + inner
    s_rows = x_scales + row * scales_row
    w_rows = weight + tl.minimum(n, num_columns - 1).to(tl.int64)[:, None] * w_stride + inner
    w_scales = weight_scales + column // 128 * w_scales_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if CUDA:
        for k in tl.range(first, last, UNROLL, num_stages=STAGES):
            for u in tl.static_range(UNROLL):
                acc += _group(x_rows, s_rows, w_rows, w_scales, k + u, last, scales_column, depth, EVEN)
    else:  # a `for` over device values fails in the interpreter of Triton 3.6 with NumPy 2.4
        k = first
        while k < last:
            for u in tl.static_range(UNROLL):
                acc += _group(x_rows, s_rows, w_rows, w_scales, k + u, last, scales_column, depth, EVEN)
            k += UNROLL
    target = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    inside = (n < num_columns)[:, None] & (m < num_rows)[None, :]
    if WHOLE:
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        spot = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        sums = partials + (tile * split).to(tl.int64) * (BLOCK_N * BLOCK_M) + spot
        tl.store(sums + part * (BLOCK_N * BLOCK_M), acc, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == split - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            p = 0
            while p < split:
                for i in tl.static_range(AT_ONCE):  # so many loads are under way at a time
                    total += tl.load(
                        sums + (p + i) * (BLOCK_N * BLOCK_M), mask=p + i < split, other=0.0, cache_modifier=".cg"
                    )
                p += AT_ONCE
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)
            tl.store(arrived + tile, 0)


@jit
def _prefetch_rows(rows, first, last, depth, ahead, wanted, BLOCK_N: tl.constexpr, THREADS: tl.constexpr):
    """The first `ahead` bytes of a part of each of the rows [BLOCK_N] that are `wanted`, one request a thread."""
    PIECES: tl.constexpr = THREADS // BLOCK_N if THREADS > BLOCK_N else 1
    bytes = tl.minimum(tl.minimum(last * 128, depth) - first * 128, ahead)
    piece = tl.cdiv(bytes, PIECES * 16) * 16
    start = tl.arange(0, PIECES)[None, :] * piece
    size = tl.where(wanted[:, None], tl.minimum(bytes - start, piece), 0)
    prefetch_l2((rows[:, None] + first * 128 + start).to(tl.int64), size)


@jit
def _group(x_rows, s_rows, w_rows, w_scales, k, last, scales_column, depth, EVEN: tl.constexpr):
    """What the k-th 128 values of K add to a tile, float32 [BLOCK_N, BLOCK_M]; 0 for a k that is not below `last`."""
    if EVEN:
        xs = tl.load(x_rows + k * 128)
        ws = tl.load(w_rows + k * 128)
        scale = tl.load(s_rows + k.to(tl.int64) * scales_column) * tl.load(w_scales + k)
    else:
        inside = (tl.arange(0, 128) < tl.minimum(depth, last * 128) - k * 128)[None, :]
        xs = tl.load(x_rows + k * 128, mask=inside, other=0.0)
        ws = tl.load(w_rows + k * 128, mask=inside, other=0.0)
        scale = tl.load(s_rows + k.to(tl.int64) * scales_column, mask=k < last, other=0.0)
        scale *= tl.load(w_scales + k, mask=k < last, other=0.0)
    return tl.dot(ws, tl.trans(xs)) * scale[None, :]
