"""Where FP8 rows and their scales stand: the three formats of scales, and contiguous segments of experts.

FP8 rows [..., M, K] carry one float32 scale for 128 values, S = ⌈K/128⌉ a row; value = fp8 · scale. Kernels read the
scales in one of three formats:

- `row`: float32 [..., M, S], row-major.
- `column_tma`: the same logical shape, column-major: stride(-2) = 1, stride(-1) = M rounded up to 4, since a TMA copy
  wants every column to start at a multiple of 16 bytes; matrices of a stack follow one another without a gap. DeepGEMM
  on Hopper reads this without a copy.
- `ue8m0`: int32 [..., M, ⌈S/4⌉], column-major likewise; each int32 packs the exponents of four consecutive scales, the
  first in the lowest byte. Byte e means 2^(e−127), 255 is NaN; bytes beyond S are 0. Only powers of two can be so
  written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.ops.fp8 import BLOCK, num_blocks

FORMATS = ("row", "column_tma", "ue8m0")


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def scales_shape(rows_shape: tuple[int, ...], format: str) -> tuple[int, ...]:
    """Logical shape of the scales of rows [..., M, K]."""
    scales = num_blocks(rows_shape[-1])
    return (*rows_shape[:-1], -(-scales // 4) if format == "ue8m0" else scales)


def scales_dtype(format: str) -> torch.dtype:
    return torch.int32 if format == "ue8m0" else torch.float32


def empty_scales(rows_shape: tuple[int, ...], format: str, device: torch.device) -> Tensor:
    """Uninitialised scales of rows [..., M, K], with the strides of the format."""
    *lead, rows, columns = scales_shape(rows_shape, format)
    if format == "row":
        return torch.empty(*lead, rows, columns, dtype=torch.float32, device=device)
    aligned = round_up(rows, 4)
    return torch.empty(*lead, columns, aligned, dtype=scales_dtype(format), device=device).mT[..., :rows, :]


def pack_ue8m0(scales: Tensor) -> Tensor:
    """float32 powers of two (or NaN) [..., S] -> int32 [..., ⌈S/4⌉]; bytes beyond S are 0."""
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return torch.nn.functional.pad(exponents, (0, -scales.shape[-1] % 4)).view(torch.int32)


def unpack_ue8m0(packed: Tensor, num_scales: int) -> Tensor:
    """int32 [..., ⌈S/4⌉], any strides -> float32 [..., S]."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=packed.device)
    exponents = (packed[..., None] >> shifts & 255).flatten(-2)[..., :num_scales]
    return torch.exp2(exponents.float() - 127).masked_fill(exponents == 255, float("nan"))


def is_power_of_two(scales: Tensor) -> Tensor:
    """Which float32 scales UE8M0 can hold exactly: normal, positive, mantissa 0."""
    bits = scales.contiguous().view(torch.int32)
    exponent = bits >> 23  # of a negative number negative, of infinity and NaN 255
    return ((bits & 0x7FFFFF) == 0) & (exponent > 0) & (exponent < 255)


def dequantize_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """rows float8 [..., M, K] and scales of any format -> float32 [..., M, K]."""
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales, num_blocks(rows.shape[-1]))
    return rows.float() * scales.repeat_interleave(BLOCK, dim=-1)[..., : rows.shape[-1]]


def segment_starts(counts: Tensor) -> Tensor:
    """First row of each expert where segments begin at multiples of 128, so that no GEMM tile straddles two experts.
    counts [E] int32 -> starts [E] int32."""
    padded = (counts + (BLOCK - 1)) // BLOCK * BLOCK
    return (torch.cumsum(padded, 0) - padded).to(torch.int32)
