"""Expert-side layouts: where the rows of an expert begin, and what an exchange writes there.

Rows are either padded per expert, [L, dp·M, H] with a count for each (masked grouped GEMM), or contiguous, where each
expert's segment starts at a multiple of 128 rows so that no GEMM tile straddles two experts.

Scales arrive as float32, one for 128 values, and the receiver writes them in the format it is asked for; the formats
are those of the kernels, `moelab.ops.layout`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.comm.spec import ExchangeSpec
from moelab.ops import layout
from moelab.ops.layout import is_power_of_two, pack_ue8m0, segment_starts, unpack_ue8m0

__all__ = [
    "dequantize_rows", "empty_rows", "empty_scales", "grouped_layout", "is_power_of_two", "pack_ue8m0",
    "segment_starts", "unpack_ue8m0", "write_scales",
]  # fmt: skip


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
    return layout.empty_scales((*spec.rows_shape[:-1], spec.hidden), spec.scales, device)


def write_scales(out: Tensor, where: Tensor, scales: Tensor, spec: ExchangeSpec) -> None:
    """Put scales [n, S] float32 at the flat rows `where` [n] of `out`, converted to the spec's format."""
    values = pack_ue8m0(scales) if spec.scales == "ue8m0" else scales
    if out.dim() == 3:
        out[where // out.shape[1], where % out.shape[1]] = values
    else:
        out[where] = values


def dequantize_rows(rows: Tensor, row_scales: Tensor | None, spec: ExchangeSpec) -> Tensor:
    """float32 values of expert-side rows of any payload and scale format (beyond the counts: anything)."""
    return rows.float() if row_scales is None else layout.dequantize_rows(rows, row_scales)
