"""RMSNorm: x / rms(x) · weight, the variance in float32 whatever x is (arXiv 1910.07467).

`rms_norm` is the plain form. The fused forms first add x, or the sum of two (an MoE layer's routed and shared outputs),
to a residual stream, and may quantise the result, so that a row is read once and its norm goes to memory in two bytes a
value only where somebody asks for that as well (the router does): of [M, H] bfloat16 the plain form followed by a
quantisation moves 2 + 2 + 2 + 1 bytes a value, the fused one 2 + 1. Fusing changes no rounding: each sum, the norm
before its weight and the product are each rounded to x's dtype, as the separate operations round them.

The kernel holds whole rows in the registers of one program.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.fp8 import num_blocks
from moelab.ops.jit import jit, runs_on, tl, triton
from moelab.ops.quantize import DTYPES, Quantized, prepare, quantize_groups, store_scales, write_reference

MAX_COLUMNS = 16384  # beyond, a row of float32 no longer fits into a program's registers


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension. x [..., H] of any float dtype, weight [H] -> [..., H] in x's dtype.

    Rounds to x's dtype before the weight is applied, as DeepSeek's and transformers' code do.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """x [M, H] bfloat16 or float32, weight [H] alike -> the norm of x + residual [M, H] in x's dtype.

    `residual` [M, H] is updated in place to x + residual. Without one it is the norm of x. With `also` [M, H] x + also,
    rounded to x's dtype, stands for x in all of this: residual + (x + also). `out` may be x or `also`. All share x's
    dtype. CUDA tensors take the kernel. Raises OpError for a dtype, shape, stride or device that is not accepted.
    """
    _check(x, weight, residual, also)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("out", out, tuple(x.shape), (x.dtype,), x)
    if not runs_on(_rms_norm_kernel, x):
        return out.copy_(rms_norm(_add(x, residual, also), weight, eps))
    _launch(x, weight, eps, residual, also, None, out, None)
    return out


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    scale_format: str = "row",
    power_of_two: bool = False,
    out: Quantized | None = None,
    also: Tensor | None = None,
    normed: Tensor | None = None,
) -> Quantized:
    """`quantize_rows(add_rms_norm(x, weight, eps, residual, also=also), …)` in one pass.

    The norm itself is kept only in `normed` [M, H] of x's dtype, where that is given; it may be x or `also`. Raises
    OpError as `add_rms_norm` and `quantize_rows` do.
    """
    _check(x, weight, residual, also)
    if normed is not None:
        check_tensor("normed", normed, tuple(x.shape), (x.dtype,), x)
    pair = prepare(tuple(x.shape), x, scale_format, out)
    power_of_two = power_of_two or scale_format == "ue8m0"
    if not runs_on(_rms_norm_kernel, x):
        result = rms_norm(_add(x, residual, also), weight, eps)
        if normed is not None:
            normed.copy_(result)
        return write_reference(result, power_of_two, pair)
    _launch(x, weight, eps, residual, also, normed, *pair, power_of_two)
    return pair


def _check(x: Tensor, weight: Tensor, residual: Tensor | None, also: Tensor | None) -> None:
    check_tensor("x", x, ("M", "H"), DTYPES)
    require(1 <= x.shape[1] <= MAX_COLUMNS, "x's H", x.shape[1], f"1…{MAX_COLUMNS}, a row that one program can hold")
    check_tensor("weight", weight, (x.shape[1],), (x.dtype,), x)
    for name, tensor in (("residual", residual), ("also", also)):
        if tensor is not None:
            check_tensor(name, tensor, tuple(x.shape), (x.dtype,), x)


def _add(x: Tensor, residual: Tensor | None, also: Tensor | None) -> Tensor:
    x = x if also is None else x + also
    return x if residual is None else residual.add_(x)


def _launch(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, also: Tensor | None, normed: Tensor | None,
    values: Tensor, scales: Tensor | None, power_of_two: bool = False,
) -> None:  # fmt: skip
    rows, columns = x.shape
    if not rows:
        return
    groups = max(4, triton.next_power_of_2(num_blocks(columns)))
    config, early = _config(groups), launches_early(x)
    _rms_norm_kernel[(triton.cdiv(rows, config["ROWS"]),)](
        x, weight, residual, also, normed, values, scales,
        *(0 if t is None else t.stride(0) for t in (x, residual, also, normed, values)),
        *((0, 0) if scales is None else scales.stride()), rows, columns, eps, GROUPS=groups,
        POWER_OF_TWO=power_of_two, PACKED=scales is not None and scales.dtype == torch.int32, EARLY=early,
        launch_pdl=early, **config,
    )  # fmt: skip


def _config(groups: int) -> dict[str, int]:
    """16 values a thread, 28 of H = 7168: on an H200 8192 such rows took 50.4 µs in 8 warps and 57.4 in 16. Short rows
    share a program of four warps."""
    return {"ROWS": max(1, 16 // groups), "num_warps": min(16, max(4, groups // 8))}


@jit
def _rms_norm_kernel(
    x, weight, residual, also, normed_copy, values, scales, x_stride, residual_stride, also_stride, normed_stride,
    values_stride, scales_row_stride, scales_column_stride, num_rows, num_columns, eps,
    GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS whole rows. Without `also` and `residual` nothing is added, without `scales` nothing
    quantised; a kernel compiled without one of them, or without `normed_copy`, has no trace of it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = (group[:, None] * 128 + tl.arange(0, 128)[None, :])[None, :, :]
    inside = (row < num_rows)[:, None, None] & (column < num_columns)
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + row[:, None, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if also is not None:
        other = tl.load(also + row[:, None, None] * also_stride + column, mask=inside, other=0.0).to(tl.float32)
        wide = (wide + other).to(dtype).to(tl.float32)
    gain = tl.load(weight + column, mask=column < num_columns, other=0.0).to(tl.float32)
    if residual is not None:
        stream = residual + row[:, None, None] * residual_stride + column
        wide = (wide + tl.load(stream, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(stream, wide.to(dtype), mask=inside)
    mean = tl.sum(tl.sum(wide * wide, axis=2), axis=1) / num_columns
    normed = (wide * tl.rsqrt(mean + eps)[:, None, None]).to(dtype).to(tl.float32)
    result = (normed * gain).to(dtype)
    if normed_copy is not None:
        tl.store(normed_copy + row[:, None, None] * normed_stride + column, result, mask=inside)
    where = values + row[:, None, None] * values_stride + column
    if scales is None:
        tl.store(where, result, mask=inside)
    else:
        scaled, scale = quantize_groups(result.to(tl.float32), POWER_OF_TWO)
        tl.store(where, scaled.to(values.dtype.element_ty), mask=inside)
        store_scales(
            scales, scale, row, group, row < num_rows, scales_row_stride, scales_column_stride,
            tl.cdiv(num_columns, 128), PACKED,
        )  # fmt: skip
