"""Grouped FP8 inputs with NaN wherever no row is, their float64 product, and how far from it a result may be.

A product of two e4m3 values has 4 + 4 significant bits and is exact in float32. Plain torch and the interpreter sum in
float32: an addition costs 2⁻²⁴ of what has been summed, K of them at most K · 2⁻²⁴ of Σ |x·w|.

An FP8 instruction of Hopper's tensor cores adds 32 products to its accumulator. It aligns all 33 to the largest of them
and keeps 13 bits below that one's first bit; what lies below is cut off, and so is the sum (arXiv 2412.19437, section
3.5.2). The largest itself has no more than 14 bits and loses nothing. So of a group of 128, four instructions, with p_j
the largest product of the j-th and c_j the sum after it,

    lost ≤ 2⁻¹³ · Σ_j (32 · max(p_j, |c_{j−1}|) + |c_j|)

All three backends run these instructions on the same groups of 128, scale each sum (2 roundings in float32), add them
in float32 in an order of their own, and round once to bfloat16. So one bound holds for all of them, and any two may
differ by twice that.

The worst case is far away: every product has to lose nearly all that it can. A bound for it does not see a product left
out. So the root mean square over an expert's outputs is bounded as well: by that of rounding the exact values, and, for
what is cut off, by 2⁻¹³ of that of Σ |x·w|. An emulation of the instruction loses less than two thirds of it on normal
values, most of whose products lose nothing (`test_grouped_checks.py`); the most seen in one output of an H200 was
1.006 · 2⁻¹³ beyond its rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
    """Rows of the mask: `assert_close` to the product. Other rows: still NaN, if `untouched`."""
    starts = [0] * counts.numel() if out.dim() == 3 else segment_starts(counts).tolist()
    checked = 0
    for expert, start in enumerate(starts):
        here = mask[expert] if out.dim() == 3 else _segment(mask, start, int(counts[expert]))
        part = (expert, here) if out.dim() == 3 else (here,)
        x = dequantize_rows(rows[0][part], rows[1][part]).double()
        w = dequantize_block(weight[0][expert], weight[1][expert]).double()
        assert_close(out[part], x, w, tensor_cores=out.is_cuda)
        checked += int(here.sum())
    assert checked == int(mask.sum())
    if untouched:
        assert out[~mask].isnan().all()


def assert_close(out, x, w, tensor_cores):
    """out [M, N] = x [M, K] · w [N, K]ᵀ, dequantised and in float64, as the module says."""
    if not out.numel():
        return
    want, sizes = x @ w.T, x.abs() @ w.abs().T
    error = (out.double() - want).abs()
    half_step = 2**-7 if INTERPRETING else 2**-8  # the interpreter cuts bits off instead of rounding
    sums = sizes * (x.shape[1] + 4) * 2**-24
    bound = want.abs() * half_step + (cut_off(x, w) if tensor_cores else 0) + sums * 1.01
    assert (error <= bound).all(), f"{(error / bound).max()} of what is allowed"
    rounding = rms(want) * half_step if INTERPRETING else rms(want.bfloat16().double() - want)
    mean = rounding + (2**-13 * rms(sizes) if tensor_cores else rms(sums))
    assert rms(error) <= mean, f"{rms(error) / mean} of what is allowed in the mean"


def cut_off(x, w):
    """The most that tensor cores lose of x · wᵀ [M, N]. Scales are alike within a group, so dequantised values do."""
    x, w = (F.pad(t, (0, -t.shape[1] % 128)).view(len(t), -1, 4, 32).permute(2, 1, 0, 3) for t in (x, w))
    total, lost = 0, 0
    for xs, ws in zip(x, w, strict=True):  # [groups, M or N, 32]
        largest = xs.abs().amax(-1)[:, :, None] * ws.abs().amax(-1)[:, None, :]
        largest = largest.maximum(total.abs()) if torch.is_tensor(total) else largest
        total = total + xs @ ws.mT
        lost = lost + 32 * largest + total.abs()
    return 1.01 * 2**-13 * lost.sum(0)  # 1.01: sums are not exact where products are compared with them


def rms(x):
    return x.square().mean().sqrt()


def _segment(mask, start, count):
    here = torch.zeros_like(mask)
    here[start : start + count] = True
    return here & mask
