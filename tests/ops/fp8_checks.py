"""FP8 rows with poisoned outputs, and comparisons that know what Triton's interpreter cannot do."""

from __future__ import annotations

import torch

from moelab.ops.layout import empty_scales
from tests.ops.conftest import INTERPRETING

POISON = 0x55555555  # as int32 scales; no pattern of exponents that the tests' data gives


def poisoned_pair(shape, scale_format, device):
    """An output pair of NaN values and NaN scales (POISON in packed ones)."""
    values = torch.full(shape, float("nan"), device=device).to(torch.float8_e4m3fn)
    scales = empty_scales(tuple(shape), scale_format, device)
    scales.fill_(POISON if scale_format == "ue8m0" else float("nan"))
    return values, scales


def assert_same_rows(got, want):
    """Pairs of values and scales, bit for bit. Interpreted, only the scales are: values are as `_interpreted` says, and
    NaN does not survive the conversion."""
    values, expected = got[0].cpu().float(), want[0].cpu().float()
    assert torch.equal(got[1].cpu().nan_to_num(nan=-1), want[1].cpu().nan_to_num(nan=-1))
    sound = ~expected.isnan()
    if INTERPRETING:
        _interpreted(values[sound], expected[sound], expected[sound] * 0, torch.tensor(2**-9))
    else:
        assert torch.equal(values.isnan(), ~sound)
        assert torch.equal(values[sound], expected[sound])


def assert_rounds(back, exact, scales, slack=0.0):
    """back ≈ exact (float64) to half a step of e4m3, and `slack` relative to it before that. All [..., K], scales
    [..., ⌈K/128⌉]. Interpreted, as `_interpreted` says."""
    step = scales.double().repeat_interleave(128, -1)[..., : exact.shape[-1]] * 2**-9
    tolerance = exact.abs() * (2**-4 + slack) + step * 0.501
    if INTERPRETING:
        _interpreted(back.double(), exact, tolerance, step)
    else:
        assert ((back.double() - exact).abs() <= tolerance).all()


def _interpreted(got, want, tolerance, step):
    """Triton's interpreter loses the carry where rounding up reaches a power of two (127 becomes 64), and cuts off what
    lies below the least normal number: so some values may be half of what they should, and no value worse."""
    error = (got - want).abs()
    assert (error <= want.abs() * 0.51 + step * 1.001).all()
    small = want.abs() < step * 8
    assert ((error <= tolerance) | small).float().mean() > 0.9 or got.numel() < 100
