"""Activations to FP8: one float32 scale for each 128 values of a token (1 × 128 groups).

    scale = max(amax, 1e-4) / 448        value8 = e4m3(value · (1/scale))        value ≈ value8 · scale

448 is the largest e4m3. The floor under amax, DeepGEMM's, keeps a group of zeros from 0/0. With `power_of_two` the
scale is rounded up to a power of two, as UE8M0 demands; then value · (1/scale) is exact before it is rounded. The last
group of a K that is no multiple of 128 is shorter.

A group that holds NaN or an infinity has no amax: its scale becomes NaN and every value of it NaN, so that a GEMM shows
the damage instead of hiding it (a saturating cast would turn infinity into 448). Other groups are not touched.

The kernel finds amax as an integer: the bits of |x| order like |x|, with infinity above every number and NaN above it.
It moves 3 bytes per bfloat16 value and is bound by them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.fp8 import BLOCK, E4M3_MAX, num_blocks
from moelab.ops.jit import jit, runs_on, tl, triton
from moelab.ops.layout import FORMATS, empty_scales, pack_ue8m0, scales_dtype, scales_shape

AMAX_FLOOR = 1e-4
DTYPES = (torch.bfloat16, torch.float32)

Quantized = tuple[Tensor, Tensor]


def quantize_rows(
    x: Tensor, scale_format: str = "row", power_of_two: bool = False, out: Quantized | None = None
) -> Quantized:
    """x bfloat16 or float32 [M, K], rows contiguous -> (values float8_e4m3fn [M, K], scales in `scale_format`).

    Formats: `moelab.ops.layout`; "ue8m0" implies `power_of_two`. `out`: a pair to write into, as returned. CUDA tensors
    take the kernel. Raises OpError for a dtype, shape, stride or device that is not accepted.
    """
    check_tensor("x", x, ("M", "K"), DTYPES)
    values, scales = prepare(tuple(x.shape), x, scale_format, out)
    power_of_two = power_of_two or scale_format == "ue8m0"
    if not runs_on(_quantize_kernel, x):
        return write_reference(x, power_of_two, (values, scales))
    rows, columns = x.shape
    config, early = _config(rows), launches_early(x)
    chunks = triton.cdiv(columns, config["GROUPS"] * BLOCK)
    if grid := triton.cdiv(rows, config["ROWS"]) * chunks:
        _quantize_kernel[(grid,)](
            x, values, scales, x.stride(0), values.stride(0), *scales.stride(), rows, columns, chunks,
            POWER_OF_TWO=power_of_two, PACKED=scale_format == "ue8m0", EARLY=early, launch_pdl=early,
            **config,
        )  # fmt: skip
    return values, scales


def quantize_reference(x: Tensor, power_of_two: bool = False) -> Quantized:
    """x [..., K] of any float dtype -> (values float8_e4m3fn [..., K], scales float32 [..., ⌈K/128⌉], row-major)."""
    columns = x.shape[-1]
    groups = pad(x.float(), (0, -columns % BLOCK)).unflatten(-1, (num_blocks(columns), BLOCK))
    amax = groups.abs().amax(-1)
    # By a tensor: dividing one on a GPU by a number, torch multiplies by its reciprocal, which is not the same.
    scales = amax.clamp(min=AMAX_FLOOR) / torch.full_like(amax, E4M3_MAX)
    if power_of_two:
        scales = _ceil_power_of_two(scales)
    scales = torch.where(amax.isfinite(), scales, float("nan"))
    values = (groups * (1 / scales)[..., None]).to(torch.float8_e4m3fn)
    return values.flatten(-2)[..., :columns], scales


def _ceil_power_of_two(scales: Tensor) -> Tensor:
    """By the exponent and not by log2, whose rounding would miss exact powers. float32, normal and positive."""
    bits = scales.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def prepare(rows_shape: tuple[int, ...], like: Tensor, scale_format: str, out: Quantized | None) -> Quantized:
    """The (values, scales) that an op which quantises rows [..., M, K] writes: new, or `out` if it fits."""
    require(scale_format in FORMATS, "scale_format", repr(scale_format), ", ".join(map(repr, FORMATS)))
    if out is None:
        values = torch.empty(rows_shape, dtype=torch.float8_e4m3fn, device=like.device)
        return values, empty_scales(rows_shape, scale_format, like.device)
    values, scales = out
    check_tensor("out[0]", values, rows_shape, (torch.float8_e4m3fn,), like)
    strides = values.stride()
    uniform = all(strides[i] == strides[i + 1] * rows_shape[i + 1] for i in range(len(rows_shape) - 2))
    require(uniform, "out[0]'s strides", strides, "matrices of a stack one after another")
    shape, dtype = scales_shape(rows_shape, scale_format), scales_dtype(scale_format)
    require(scales.dtype == dtype, "out[1]'s dtype", scales.dtype, f"{dtype} for {scale_format!r}")
    require(tuple(scales.shape) == shape, "out[1]'s shape", list(scales.shape), f"{list(shape)} for {scale_format!r}")
    wanted = empty_scales(rows_shape, scale_format, torch.device("meta")).stride()
    require(scales.stride() == wanted, "out[1]'s strides", scales.stride(), f"{wanted} for {scale_format!r}")
    require(scales.device == like.device, "out[1]'s device", scales.device, str(like.device))
    return values, scales


def write_reference(x: Tensor, power_of_two: bool, out: Quantized) -> Quantized:
    """The reference into a prepared pair; packed scales if the pair's are int32."""
    values, scales = quantize_reference(x, power_of_two)
    out[0].copy_(values)
    out[1].copy_(pack_ue8m0(scales) if out[1].dtype == torch.int32 else scales)
    return out


def _config(rows: int) -> dict[str, int]:
    """16 values a thread: two 16-byte loads in flight and one 16-byte store, small enough for full occupancy. Few rows
    are spread thinner, for latency: [128, 7168] is then 896 programs on 132 SMs."""
    return {"ROWS": 2, "GROUPS": 4, "num_warps": 2} if rows <= 256 else {"ROWS": 4, "GROUPS": 4, "num_warps": 4}


@jit
def quantize_groups(values, POWER_OF_TWO: tl.constexpr):
    """values float32 [A, G, 128] -> (values · 1/scale, float32 alike; scale float32 [A, G])."""
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    # div_rn: `/` of float32 is approximate on the GPU, and one per group costs nothing.
    scale = tl.div_rn(tl.maximum(amax.to(tl.float32, bitcast=True), 1e-4), tl.full(amax.shape, 448.0, tl.float32))
    bits = scale.to(tl.int32, bitcast=True)
    if POWER_OF_TWO:
        bits = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)) << 23
    scale = tl.where(amax >= 0x7F800000, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    return values * inverse[:, :, None], scale


@jit
def store_scales(scales, scale, row, group, valid, row_stride, column_stride, num_groups, PACKED: tl.constexpr):
    """scale float32 [A, G] of rows `row` [A] int64 and groups `group` [G]; rows where not `valid` [A] are left out.
    With PACKED, G and the first group are multiples of 4."""
    if PACKED:
        exponent = tl.where((group < num_groups)[None, :], scale.to(tl.int32, bitcast=True) >> 23, 0)
        quads = tl.reshape(exponent, (scale.shape[0], scale.shape[1] // 4, 4))
        packed = tl.sum(quads << (tl.arange(0, 4) * 8)[None, None, :], axis=2)
        column = tl.min(group, axis=0) // 4 + tl.arange(0, scale.shape[1] // 4)
        where = scales + row[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride
        tl.store(where, packed, mask=valid[:, None] & (column * 4 < num_groups)[None, :])
    else:
        where = scales + row[:, None] * row_stride + group[None, :].to(tl.int64) * column_stride
        tl.store(where, scale, mask=valid[:, None] & (group < num_groups)[None, :])


@jit
def _quantize_kernel(
    x, values, scales, x_stride, values_stride, scales_row_stride, scales_column_stride, num_rows, num_columns, chunks,
    POWER_OF_TWO: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows × GROUPS groups; neighbours in the grid stand side by side in a row."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    row = (program // chunks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = program % chunks * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (row < num_rows)[:, None, None] & (column < num_columns)[None, :, :]
    loaded = tl.load(x + row[:, None, None] * x_stride + column[None, :, :], mask=inside, other=0.0).to(tl.float32)
    scaled, scale = quantize_groups(loaded, POWER_OF_TWO)
    where = values + row[:, None, None] * values_stride + column[None, :, :]
    tl.store(where, scaled.to(values.dtype.element_ty), mask=inside)
    store_scales(
        scales, scale, row, group, row < num_rows, scales_row_stride, scales_column_stride,
        tl.cdiv(num_columns, 128), PACKED,
    )  # fmt: skip
