"""Block-FP8 matrix products of all heads at once, for MLA's absorption: out[t, h] = W[h] · x[t, h].

Decode attends to the latent cache itself (`moelab.model.mla`): W_UK is moved to the query's side (k_b, 128 → 512 values
a head) and W_UV behind the sum over the cache (v_b, 512 → 128). Both are halves of kv_b, and half a head is exactly one
128-row block of its scales, so `split_kv_b` cuts and transposes in FP8 and rounds nothing.

Activations are BF16 in memory and FP8 in the tensor cores: the kernel quantises each token, head and 128 values of K as
`quantize_rows` does, multiplies FP8 by FP8 into float32 and applies both scales after each 128 of K (arXiv 2412.19437,
section 3.3). A separate quantisation would move 4 more bytes for each 4 it saves.

256 tokens × 128 heads move 50 MB for 8.6 GFLOP, so the kernel is a stream. For K = 128 (k_b) a program keeps the
weights of some columns of its head and lets tokens pass; for larger K (v_b) it takes one tile of tokens and lets K
pass. Its weights are asked for before the kernel ahead has ended, into the L2 only: nothing is read from there before
`gdc_wait`, so weights may have been written by that very kernel. On Hopper `moelab.ops.bmm_hopper` takes the sizes at
which it is faster.

On an H200 k_b took 15.2 µs at that size and v_b 17.4 (cuBLAS on bfloat16 weights 21.1 and 17.2). A kernel that moves
the same bytes by the same addresses and computes nothing took 14.5 and 14.3, and filling k_b's output alone 10.9: a
stream of writes gets 3.1 TB/s there, where a copy gets 4.2. v_b is held back by the way of its activations through
shared memory, and by weights that come from the L2 again for every 64 tokens: the Hopper kernel spares both, starts
later, and from 512 tokens on is ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.ops import bmm_hopper
from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.fp8 import BLOCK, dequantize_block
from moelab.ops.jit import jit, runs_on, tl, triton
from moelab.ops.layout import dequantize_rows
from moelab.ops.quantize import Quantized, quantize_groups, quantize_reference


def split_kv_b(kv_b: Tensor, scales: Tensor) -> tuple[Quantized, Quantized]:
    """kv_b float8_e4m3fn [heads · 256, C], scales float32 [heads · 2, C/128], as a checkpoint holds them -> the weights
    of k_b ([heads, C, 128], scales [heads, C/128, 1]) and of v_b ([heads, 128, C], scales [heads, 1, C/128]), copied.

    C, the latent's width, is a multiple of 128. The values stay as they are. Raises OpError.
    """
    check_tensor("kv_b", kv_b, ("heads · 256", "C"), (torch.float8_e4m3fn,))
    rows, columns = kv_b.shape
    require(rows % (2 * BLOCK) == 0, "kv_b's rows", rows, "256 a head: 128 of W_UK and 128 of W_UV")
    require(columns % BLOCK == 0, "kv_b's columns", columns, "a multiple of 128")
    check_tensor("scales", scales, (rows // BLOCK, columns // BLOCK), (torch.float32,), kv_b)
    w_uk, w_uv = kv_b.unflatten(0, (-1, 2, BLOCK)).unbind(1)
    uk_scales, uv_scales = scales.unflatten(0, (-1, 2, 1)).unbind(1)
    return (w_uk.mT.contiguous(), uk_scales.mT.contiguous()), (w_uv.contiguous(), uv_scales.contiguous())


def bmm_reference(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """As `bmm`, in plain torch: the same quantisation, sums in float32."""
    rows = dequantize_rows(*quantize_reference(x))
    return torch.einsum("thk,hnk->thn", rows, dequantize_block(weight, scales)).to(x.dtype)


def bmm(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """x bfloat16 [T, heads, K]; weight float8_e4m3fn [heads, N, K], scales float32 [heads, N/128, K/128], both
    contiguous -> bfloat16 [T, heads, N].

    N and K are multiples of 128. x and `out` may be slices of wider rows: token and head strides are free. CUDA tensors
    take the kernel, in one launch. Raises OpError for a dtype, shape, stride or device that is not accepted.
    """
    shape = _check(x, weight, scales)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("out", out, shape, (x.dtype,), x)
    if not runs_on(_bmm_kernel, x):
        return out.copy_(bmm_reference(x, weight, scales))
    num_tokens, heads, columns = shape
    if not num_tokens * heads:
        return out
    if _on_hopper(num_tokens, heads, x.shape[2]) and bmm_hopper.takes(x, weight, out):
        bmm_hopper.launch(x, weight, scales, out)
        return out
    config, early = _config(num_tokens, heads, columns, x.shape[2]), launches_early(x)
    splits = triton.cdiv(num_tokens, config["ROWS"] * config["TILES"])
    _bmm_kernel[(splits * heads * (columns // config["COLUMNS"]),)](
        x, weight, scales, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1), num_tokens, heads,
        N=columns, K=x.shape[2], INTERPRETED=not x.is_cuda, EARLY=early, launch_pdl=early, **config,
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor, scales: Tensor) -> tuple[int, int, int]:
    """The shape of the result."""
    check_tensor("x", x, ("T", "heads", "K"), (torch.bfloat16,))
    num_tokens, heads, depth = x.shape
    check_tensor("weight", weight, (heads, "N", depth), (torch.float8_e4m3fn,), x)
    columns = weight.shape[1]
    require(depth % BLOCK == 0 and depth > 0, "x's K", depth, "a multiple of 128")
    require(columns % BLOCK == 0 and columns > 0, "weight's N", columns, "a multiple of 128")
    check_tensor("scales", scales, (heads, columns // BLOCK, depth // BLOCK), (torch.float32,), x)
    for name, tensor in (("weight", weight), ("scales", scales)):
        require(tensor.is_contiguous(), f"{name}'s strides", tensor.stride(), "contiguous")
    return num_tokens, heads, columns


def _on_hopper(num_tokens: int, heads: int, depth: int) -> bool:
    """Whether the Hopper kernel is the faster one, on an H200 at 1 to 1024 tokens and 16 or 128 heads. k_b: 4.6 µs to
    5.5 at 16 tokens × 128 heads, 3.3 to 2.1 at 16 × 16. v_b: 19.2 to 17.4 at 256 × 128, 52.9 to 59.9 at 1024 × 128."""
    return heads * triton.cdiv(num_tokens, 64) >= (128 if depth == BLOCK else 1024)


def _config(num_tokens: int, heads: int, columns: int, depth: int) -> dict[str, int]:
    """The fastest, or nearly so, of some thirty tried on an H200."""
    tiles = triton.cdiv(num_tokens, 64)
    if depth > BLOCK:
        rows = 64 if num_tokens > 32 else 32 if num_tokens > 16 else 16
        width = 64 if rows < 64 and heads <= 32 else BLOCK
        return _as_config(rows, 1, width, 4, 4 if tiles == 1 else 3)
    if tiles * heads <= 128:
        return _as_config(64, 1, BLOCK, 4, 1)
    return _as_config(64, 2 if tiles <= 2 else 4, min(256, columns & -columns), 4, 3)


def _as_config(rows: int, tiles: int, columns: int, warps: int, stages: int) -> dict[str, int]:
    return {"ROWS": rows, "TILES": tiles, "COLUMNS": columns, "STAGES": stages, "num_warps": warps}


@jit
def _prefetch(address):
    """Ask for the 128-byte lines at `address` (a tensor of pointers) to be in the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _quantize(tile, INTERPRETED: tl.constexpr):
    """tile bfloat16 [A, 128] -> (values, scaled, float32 alike; scales float32 [A, 1]), as `quantize_groups` has them.

    a/448 and 1/s are a product and a reciprocal, corrected once: amax has one of 128 mantissas, or is the floor, and
    for each the results are the rounded quotients; the second even from a reciprocal that is 4 units off."""
    wide = tile.to(tl.float32)
    if INTERPRETED:
        scaled, scale = quantize_groups(tl.reshape(wide, (tile.shape[0], 1, 128)), False)
        return tl.reshape(scaled, tile.shape), scale
    amax = tl.maximum(tl.reduce(tl.abs(wide), 1, _larger, keep_dims=True), 1e-4, propagate_nan=tl.PropagateNan.ALL)
    scale = amax * 0.0022321428571428572
    scale = tl.fma(tl.fma(-scale, 448.0, amax), 0.0022321428571428572, scale)
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
    )
    return wide * tl.fma(tl.fma(-inverse, scale, 1.0), inverse, inverse), scale


@jit
def _product(a, w, INTERPRETED: tl.constexpr):
    """a · wᵀ of FP8; Triton's interpreter multiplies no FP8."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), tl.trans(w.to(tl.float32)))
    return tl.dot(a, tl.trans(w))


@jit
def _bmm_kernel(
    x, weight, scales, out, x_token_stride, x_head_stride, out_token_stride, out_head_stride, num_tokens, heads,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes one head, COLUMNS of its N and TILES times ROWS tokens; with K > 128 at most 128 columns and one
    tile. Scales of rows are spread over the columns before the product is asked for: they then reach the threads that
    need them through shared memory together with the FP8 tile, and not after it, with a barrier of their own."""
    WIDTH: tl.constexpr = min(COLUMNS, 128)  # of one product, so that it has one scale of the weight
    program = tl.program_id(0)
    first = program % (N // COLUMNS) * COLUMNS
    head = (program // (N // COLUMNS) % heads).to(tl.int64)
    token = program // (N // COLUMNS) // heads * (ROWS * TILES)
    weight += (head * N + first) * K
    if EARLY:
        _prefetch(weight + tl.arange(0, COLUMNS * K // 128) * 128)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inner = tl.arange(0, 128)
    column = tl.arange(0, WIDTH)
    fp8: tl.constexpr = weight.dtype.element_ty
    weight += column[:, None] * K + inner[None, :]
    scales += (head * (N // 128) + first // 128) * (K // 128)
    x += head * x_head_stride + inner[None, :]
    out += head * out_head_stride + first + column[None, :]
    gains = ()
    for i in tl.static_range(COLUMNS // WIDTH * (K // 128)):
        gains += (tl.load(scales + i),)
    if K == 128:
        kept = ()
        for n in tl.static_range(COLUMNS // WIDTH):
            kept += (tl.load(weight + n * WIDTH * K),)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            row = (token + tile * ROWS + tl.arange(0, ROWS))[:, None]
            loaded = tl.load(x + row.to(tl.int64) * x_token_stride, mask=row < num_tokens, other=0.0)
            scaled, scale = _quantize(loaded, INTERPRETED)
            values, by = scaled.to(fp8), tl.broadcast_to(scale, (ROWS, WIDTH))
            for n in tl.static_range(COLUMNS // WIDTH):
                result = _product(values, kept[n], INTERPRETED) * (by * gains[n])
                where = out + row.to(tl.int64) * out_token_stride + n * WIDTH
                tl.store(where, result.to(out.dtype.element_ty), mask=row < num_tokens)
    else:
        row = (token + tl.arange(0, ROWS))[:, None]
        x += row.to(tl.int64) * x_token_stride
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for k in tl.range(0, K // 128, num_stages=STAGES):
            w = tl.load(weight + k * 128)
            scaled, scale = _quantize(tl.load(x + k * 128, mask=row < num_tokens, other=0.0), INTERPRETED)
            gain = gains[0]
            for i in tl.static_range(1, K // 128):
                gain = tl.where(k == i, gains[i], gain)
            by = tl.broadcast_to(scale * gain, (ROWS, WIDTH))
            total += _product(scaled.to(fp8), w, INTERPRETED) * by
        where = out + row.to(tl.int64) * out_token_stride
        tl.store(where, total.to(out.dtype.element_ty), mask=row < num_tokens)
