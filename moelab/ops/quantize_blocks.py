"""Weights to block FP8 on the GPU: `fp8.quantize_block` as one kernel, the same bit for bit.

    scale = max(amax, 1e-12) / 448        value8 = e4m3(value / scale)

over blocks of 128 × 128, smaller ones at the edges. It moves 3 bytes per bfloat16 value.

The quotient is the rounded one, as torch divides. A division for each value would cost more time than its bytes do, so
bfloat16 takes q = x·r with r = 1/s rounded, and corrects it once: q − (q·s − x)·r (in this order −0 stays −0). For each
of the 128 mantissas of x and of the block's maximum this is the rounded quotient, and exponents change nothing: all
were tried. For float32 there are too many to try; it divides.

A program takes one block, and loads it twice: for the maximum, and then, out of the L1, to divide. Kept in registers,
in float32 as the compiler will have it, a block takes 192 of them a thread, too many for a second program on the SM.
On an H200 [7168, 16384] takes 90 µs, 3.9 TB/s; with divisions 104, and 121 at best with the block in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.fp8 import num_blocks, quantize_block
from moelab.ops.jit import jit, runs_on, tl
from moelab.ops.quantize import DTYPES, Quantized


def quantize_blocks(weight: Tensor, out: Quantized | None = None) -> Quantized:
    """weight bfloat16 or float32 [..., N, K]; a matrix may be a slice of a wider one, a stack is contiguous
    -> (float8_e4m3fn [..., N, K], scales float32 [..., ⌈N/128⌉, ⌈K/128⌉]), contiguous.

    `out`: a pair to write into, as returned. CUDA tensors take the kernel. Raises OpError for a dtype, shape, stride or
    device that is not accepted.
    """
    require(isinstance(weight, Tensor), "weight", f"a {type(weight).__name__}", "a tensor")
    lead = weight.shape[:-2]
    check_tensor("weight", weight, (*lead, "N", "K"), DTYPES)
    require(not lead or weight.is_contiguous(), "weight's strides", weight.stride(), "a stack that is contiguous")
    values, scales = _prepare(weight, out)
    if not runs_on(_quantize_blocks_kernel, weight):
        for target, made in zip((values, scales), quantize_block(weight), strict=True):
            target.copy_(made)
        return values, scales
    rows, columns = weight.shape[-2:]
    early = launches_early(weight)
    if weight.numel():
        _quantize_blocks_kernel[(scales.numel(),)](
            weight, values, scales, weight.stride(-2), rows, columns,
            DIVIDE=weight.dtype == torch.float32, ROWS=32, EARLY=early, launch_pdl=early, num_warps=8,
        )  # fmt: skip
    return values, scales


def _prepare(weight: Tensor, out: Quantized | None) -> Quantized:
    *lead, rows, columns = weight.shape
    shape = (*lead, num_blocks(rows), num_blocks(columns))
    if out is None:
        values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        return values, torch.empty(shape, dtype=torch.float32, device=weight.device)
    wanted = (("out[0]", out[0], tuple(weight.shape), torch.float8_e4m3fn), ("out[1]", out[1], shape, torch.float32))
    for name, tensor, size, dtype in wanted:
        check_tensor(name, tensor, size, (dtype,), weight)
        require(tensor.is_contiguous(), f"{name}'s strides", tensor.stride(), "contiguous")
    return out


@jit
def _quantize_blocks_kernel(
    weight, values, scales, stride, num_rows, num_columns, DIVIDE: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """A program takes one block, ROWS rows at a time; neighbours in the grid stand side by side."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    across, down = tl.cdiv(num_columns, 128), tl.cdiv(num_rows, 128)
    program = tl.program_id(0)
    matrix = (program // across // down).to(tl.int64)
    first = program // across % down * 128 + tl.arange(0, ROWS)[:, None]
    column = program % across * 128 + tl.arange(0, 128)[None, :]
    weight += matrix * num_rows * stride + column  # the matrices of a stack follow one another
    values += matrix * num_rows * num_columns + column
    most = tl.zeros((ROWS, 128), tl.int32)
    for part in tl.static_range(0, 128, ROWS):
        row = first + part
        inside = (row < num_rows) & (column < num_columns)
        value = tl.load(weight + row.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
        # The bits of |x| order like |x|, with infinity above every number and NaN above it.
        most = tl.maximum(most, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(tl.max(most, axis=1), axis=0)
    scale = tl.div_rn(tl.maximum(bits.to(tl.float32, bitcast=True), 1e-12), 448.0)
    scale = tl.where(bits >= 0x7F800000, float("nan"), scale)
    tl.store(scales + program, scale)
    inverse = tl.div_rn(1.0, scale)
    for part in tl.static_range(0, 128, ROWS):
        row = first + part
        inside = (row < num_rows) & (column < num_columns)
        value = tl.load(weight + row.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
        if DIVIDE:
            quotient = tl.div_rn(value, scale)
        else:
            quotient = value * inverse
            quotient = tl.fma(tl.fma(quotient, scale, -value), -inverse, quotient)
        tl.store(values + row.to(tl.int64) * num_columns, quotient.to(values.dtype.element_ty), mask=inside)
