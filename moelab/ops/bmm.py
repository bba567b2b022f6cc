"""Block-FP8 matrix products of all heads at once, for MLA's absorption: out[t, h] = W[h] · x[t, h].

Decode attends to the latent cache itself (`moelab.model.mla`): W_UK is moved to the query's side (k_b, 128 → 512 values
a head) and W_UV behind the sum over the cache (v_b, 512 → 128). Both are halves of kv_b, and half a head is exactly one
128-row block of its scales, so `split_kv_b` cuts and transposes in FP8 and rounds nothing.

Activations are BF16 in memory and FP8 in the tensor cores: the kernel quantises each token, head and 128 values of K as
`quantize_rows` does, multiplies FP8 by FP8 into float32 and applies both scales after each 128 of K (arXiv 2412.19437,
section 3.3). A separate quantisation would move 4 more bytes for each 4 it saves.

256 tokens × 128 heads move 50 MB for 8.6 GFLOP, so the kernel is a stream: a program keeps the weights of its head (or
of some columns of it) and lets its tokens pass. Its weights are asked for before the kernel ahead has ended, into the
L2 only: nothing is read from there before `gdc_wait`, so weights may have been written by that very kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    config, early = _config(num_tokens, heads, columns, x.shape[2]), launches_early(x)
    splits = triton.cdiv(num_tokens, config["ROWS"] * config["TILES"])
    if grid := splits * heads * (columns // config["COLUMNS"]):
        _bmm_kernel[(grid,)](
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


def _config(num_tokens: int, heads: int, columns: int, depth: int) -> dict[str, int]:
    return {"ROWS": 64, "TILES": 1, "COLUMNS": min(columns, 256), "num_warps": 4, "num_stages": 2}


@jit
def _prefetch(address):
    """Ask for the 128-byte lines at `address` (a tensor of pointers) to be in the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def _bmm_kernel(
    x, weight, scales, out, x_token_stride, x_head_stride, out_token_stride, out_head_stride, num_tokens, heads,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes one head, COLUMNS of its N, and TILES times ROWS tokens."""
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
    scales += head * (N // 128 * (K // 128))
    kept, gains = (), ()
    for n in tl.static_range(COLUMNS // WIDTH):
        for k in tl.static_range(K // 128):
            kept += (tl.load(weight + (n * WIDTH + column)[:, None] * K + k * 128 + inner[None, :]),)
            gains += (tl.load(scales + (first + n * WIDTH) // 128 * (K // 128) + k),)
    x += head * x_head_stride
    out += head * out_head_stride + first
    for tile in tl.range(0, TILES):
        row = token + tile * ROWS + tl.arange(0, ROWS)
        there = (row < num_tokens)[:, None]
        sources = x + row.to(tl.int64)[:, None] * x_token_stride
        rows, amounts = (), ()
        for k in tl.static_range(K // 128):
            loaded = tl.load(sources + k * 128 + inner[None, :], mask=there, other=0.0).to(tl.float32)
            scaled, scale = quantize_groups(tl.reshape(loaded, (ROWS, 1, 128)), False)
            rows += (tl.reshape(scaled, (ROWS, 128)).to(weight.dtype.element_ty),)
            amounts += (scale,)  # [ROWS, 1]
        for n in tl.static_range(COLUMNS // WIDTH):
            total = tl.zeros((ROWS, WIDTH), tl.float32)
            for k in tl.static_range(K // 128):
                if INTERPRETED:
                    product = tl.dot(rows[k].to(tl.float32), tl.trans(kept[n * (K // 128) + k].to(tl.float32)))
                else:
                    product = tl.dot(rows[k], tl.trans(kept[n * (K // 128) + k]))
                total += product * (amounts[k] * gains[n * (K // 128) + k])
            where = out + row.to(tl.int64)[:, None] * out_token_stride + n * WIDTH + column[None, :]
            tl.store(where, total.to(out.dtype.element_ty), mask=there)
