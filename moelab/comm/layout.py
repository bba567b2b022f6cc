"""Expert-side layouts: where the rows of an expert begin, and the three formats of FP8 scales.

Rows are either padded per expert, [L, dp·M, H] with a count for each (masked grouped GEMM), or contiguous, where each
expert's segment starts at a multiple of 128 rows so that no GEMM tile straddles two experts.

Scales arrive as float32, one for 128 values, S = ceil(H/128) a row. Grouped GEMMs on Hopper and Blackwell read them
in other shapes, so the receiver writes the one it is asked for:

- `row`: float32 [..., rows, S], row-major.
- `column_tma`: the same logical shape, column-major: stride(-2) = 1 and stride(-1) = rows rounded up to 4, since a
  TMA copy wants every column to start at a multiple of 16 bytes.
- `ue8m0`: int32 [..., rows, ceil(S/4)], column-major likewise; each int32 packs the exponents of four consecutive
  scales, the first in the lowest byte, and exponent byte e means 2^(e-127). Only exact powers of two can be so
  written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.comm.spec import ALIGN, ExchangeSpec, round_up


def segment_starts(counts: Tensor) -> Tensor:
    """First row of each expert in the contiguous_128 layout. counts [L] int32 -> starts [L] int32."""
    padded = (counts + (ALIGN - 1)) // ALIGN * ALIGN
    return (torch.cumsum(padded, 0) - padded).to(torch.int32)


def grouped_layout(counts: Tensor, capacity: int) -> Tensor:
    """Local expert of each row of the contiguous_128 layout, -1 where there is none. [L] int32 -> [capacity] int32."""
    rows = torch.arange(capacity, device=counts.device)
    starts = segment_starts(counts).long()
    # The last segment that starts at or before the row; of empty segments that share a start, the last one, whose end
    # is then the only one that can lie beyond the row.
    expert = torch.searchsorted(starts, rows, right=True) - 1
    return torch.where(rows < (starts + counts)[expert], expert, -1).to(torch.int32)


def empty_rows(spec: ExchangeSpec, device: torch.device) -> Tensor:
    """Uninitialised rows of the expert side. Never filled: rows beyond the counts belong to nobody."""
    return torch.empty(spec.rows_shape, dtype=spec.payload_dtype, device=device)


def empty_scales(spec: ExchangeSpec, device: torch.device) -> Tensor | None:
    """Uninitialised scales of the expert side in the format of the spec; None unless the payload is fp8."""
    if not spec.num_scales:
        return None
    *lead, rows, _ = spec.rows_shape
    if spec.scales == "row":
        return torch.empty(*lead, rows, spec.num_scales, dtype=torch.float32, device=device)
    packed = spec.scales == "ue8m0"
    columns = -(-spec.num_scales // 4) if packed else spec.num_scales
    dtype = torch.int32 if packed else torch.float32
    return torch.empty(*lead, columns, round_up(rows, 4), dtype=dtype, device=device).mT[..., :rows, :]


def write_scales(out: Tensor, where: Tensor, scales: Tensor, spec: ExchangeSpec) -> None:
    """Put scales [n, S] float32 at the flat rows `where` [n] of `out`, converted to the spec's format."""
    values = pack_ue8m0(scales) if spec.scales == "ue8m0" else scales
    if out.dim() == 3:
        out[where // out.shape[1], where % out.shape[1]] = values
    else:
        out[where] = values


def pack_ue8m0(scales: Tensor) -> Tensor:
    """float32 powers of two [n, S] -> int32 [n, ceil(S/4)]; bytes beyond S are 0."""
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padding = -scales.shape[-1] % 4
    return torch.nn.functional.pad(exponents, (0, padding)).view(torch.int32)


def unpack_ue8m0(packed: Tensor, num_scales: int) -> Tensor:
    """int32 [..., ceil(S/4)], any strides -> float32 [..., S]."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=packed.device)
    exponents = (packed[..., None] >> shifts & 255).flatten(-2)[..., :num_scales]
    return torch.exp2(exponents.float() - 127)


def is_power_of_two(scales: Tensor) -> Tensor:
    """Which float32 scales UE8M0 can hold exactly: normal, positive, mantissa 0."""
    bits = scales.contiguous().view(torch.int32)
    exponent = bits >> 23  # of a negative number negative, of infinity and NaN 255
    return ((bits & 0x7FFFFF) == 0) & (exponent > 0) & (exponent < 255)


def dequantize_rows(rows: Tensor, row_scales: Tensor | None, spec: ExchangeSpec) -> Tensor:
    """float32 values of expert-side rows of any payload and scale format (beyond the counts: anything)."""
    if row_scales is None:
        return rows.float()
    scales = unpack_ue8m0(row_scales, spec.num_scales) if spec.scales == "ue8m0" else row_scales
    return rows.float() * scales.repeat_interleave(128, dim=-1)[..., : spec.hidden]
