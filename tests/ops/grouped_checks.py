"""Grouped FP8 inputs with NaN wherever no row is, and their float64 product."""

from __future__ import annotations

import torch

from moelab.ops.fp8 import dequantize_block, num_blocks
from moelab.ops.layout import dequantize_rows, empty_scales, segment_starts
from tests.ops.conftest import INTERPRETING


def draw(layout, counts, n, k, device, room=None, scale_format="column_tma"):
    """(rows, weight, counts, mask of the rows that are there). Scales differ by up to e² between neighbours."""
    experts = len(counts)
    counts = torch.tensor(counts, dtype=torch.int32)
    if layout == "padded":
        mask = torch.arange(room) < counts[:, None]
    else:
        mask = torch.zeros(room if room is not None else int(segment_starts(torch.cat((counts, counts[:1])))[-1]) + 3)
        mask = mask.bool()
        for start, count in zip(segment_starts(counts).tolist(), counts.tolist(), strict=True):
            mask[start : start + count] = True
    mask = mask.to(device)
    values = torch.full((*mask.shape, k), float("nan"), device=device)
    scales = empty_scales((*mask.shape, k), scale_format, device).fill_(float("nan"))
    values[mask] = torch.randn(int(mask.sum()), k, device=device)
    scales[mask] = torch.randn(int(mask.sum()), num_blocks(k), device=device).clamp(-2, 2).exp()
    weight = torch.randn(experts, n, k, device=device).to(torch.float8_e4m3fn)
    w_scales = torch.randn(experts, num_blocks(n), num_blocks(k), device=device).clamp(-2, 2).exp()
    return (values.to(torch.float8_e4m3fn), scales), (weight, w_scales), counts.to(device), mask


def poisoned_out(rows, weight):
    shape = (*rows[0].shape[:-1], weight[0].shape[1])
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=rows[0].device)


def assert_product(out, rows, weight, counts, mask, untouched=True):
    """Rows of the mask: within bfloat16's rounding, and what FP8 tensor cores lose in their sums over 128: they keep
    some 14 bits (arXiv 2412.19437, section 3.3) and a group is four instructions, so more than one cut may meet. Once
    an H200 showed 1.006 · 2⁻¹³ of the sum of magnitudes. Other rows: still NaN, if `untouched`."""
    starts = [0] * counts.numel() if out.dim() == 3 else segment_starts(counts).tolist()
    checked = 0
    for expert, start in enumerate(starts):
        here = mask[expert] if out.dim() == 3 else _segment(mask, start, int(counts[expert]))
        part = (expert, here) if out.dim() == 3 else (here,)
        x = dequantize_rows(rows[0][part], rows[1][part]).double()
        w = dequantize_block(weight[0][expert], weight[1][expert]).double()
        want = x @ w.T
        error = (out[part].double() - want).abs()
        half_step = 2**-7 if INTERPRETING else 2**-8  # the interpreter cuts bits off instead of rounding
        bound = want.abs() * half_step + (x.abs() @ w.abs().T) * 2**-12
        assert (error <= bound).all(), f"expert {expert}: {(error / bound).max()} of what is allowed"
        checked += int(here.sum())
    assert checked == int(mask.sum())
    if untouched:
        assert out[~mask].isnan().all()


def _segment(mask, start, count):
    here = torch.zeros_like(mask)
    here[start : start + count] = True
    return here & mask
