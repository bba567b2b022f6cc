"""Round trips through FP8: exact where they must be, and as lossy as e4m3 is where they may be."""

from __future__ import annotations

import pytest
import torch

from moelab.bench import schemes
from moelab.bench.schemes import SCHEMES, round_trip
from moelab.config import MoelabError

FP8 = [name for name in SCHEMES if name not in ("BF16", "INT8 per tensor")]


@pytest.mark.parametrize("scheme", FP8)
def test_error_of_normal_values_is_that_of_three_bits(scheme):
    x = torch.randn(200, 300)
    kept = round_trip(x, scheme)
    assert kept.shape == x.shape and kept.dtype == torch.float32
    assert 0.02 < schemes.relative_error(x, kept) < 0.03
    large = x.abs() > 0.1  # far from the subnormals: half a unit of 3 bits at most
    assert ((kept - x).abs() / x.abs())[large].max() <= 2**-4 + 1e-6


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_second_trip_changes_nothing(scheme):
    once = round_trip(torch.randn(130, 260) * 3, scheme)
    torch.testing.assert_close(round_trip(once, scheme), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay(scheme):
    x = torch.zeros(3, 200)
    assert round_trip(x, scheme).eq(0).all()
    assert schemes.lost_share(x, x) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_of_a_stack_go_by_themselves(scheme):
    x = torch.randn(2, 140, 150) * torch.tensor([1.0, 1e4])[:, None, None]
    assert round_trip(x, scheme).equal(torch.stack([round_trip(part, scheme) for part in x]))


@pytest.mark.parametrize(
    ("scheme", "touched"),
    [
        ("per tensor", (slice(None), slice(None))), ("per row", (slice(5, 6), slice(None))),
        ("1×128", (slice(5, 6), slice(128, 256))), ("128×128", (slice(0, 128), slice(128, 256))),
    ],
)  # fmt: skip
def test_an_outlier_reaches_as_far_as_its_scale(scheme, touched):
    x = torch.rand(256, 384) + 0.5
    outlier = x.clone()
    outlier[5, 200] = 3.0e7  # everything else under this scale falls below the least e4m3
    before, after = round_trip(x, scheme), round_trip(outlier, scheme)
    alike = torch.ones_like(x, dtype=torch.bool)
    alike[touched] = False
    assert after[alike].equal(before[alike])
    reached = after[touched].flatten()
    assert (reached != 0).sum() == 1 and schemes.lost_share(outlier, after) == pytest.approx(
        (reached.numel() - 1) / x.numel()
    )


@pytest.mark.parametrize("scheme", ["1×128, 2ⁿ", "128×128, 2ⁿ"])
def test_scales_are_powers_of_two(scheme):
    # Values of e4m3 times a power of two pass only where the scale is one, and no larger than needed.
    x = torch.randn(128, 256).mul(40).to(torch.float8_e4m3fn).float()
    x[:, ::128] = 448.0
    assert round_trip(x * 2**-7, scheme).equal(x * 2**-7)
    assert not round_trip(x * 0.9, scheme).equal(x * 0.9)


def test_an_exponent_spares_neighbours_what_int8_does_not():
    """The module's text: e4m3 holds 2¹⁵ below the maximum, INT8 does not hold 2⁸."""
    x = torch.randn(64, 512)
    for factor, fp8, int8 in ((1, 0.026, 0.01), (2**9, 0.026, 1.0), (2**20, 1.0, 1.0)):
        outlier = x.clone()
        outlier[:, 7] = factor * 4.0
        rest = [i for i in range(512) if i != 7]
        error = {s: schemes.relative_error(x[:, rest], round_trip(outlier, s)[:, rest])
                 for s in ("per tensor", "INT8 per tensor")}  # fmt: skip
        assert error["per tensor"] == pytest.approx(fp8, abs=0.005)
        assert error["INT8 per tensor"] == pytest.approx(int8, abs=0.005)


def test_planted_outliers_leave_the_product_as_it_is():
    x, weight = torch.randn(20, 256), torch.randn(30, 256)
    grown, shrunk = schemes.plant_outliers(x, weight, [3, 200], 2.0**12)
    assert (grown @ shrunk.T).equal(x @ weight.T)
    assert grown[:, 3].equal(x[:, 3] * 4096) and grown[:, 4].equal(x[:, 4])
    plain = schemes.product_error(x, weight, "1×128", "128×128")
    assert 0.02 < plain < 0.06
    assert schemes.product_error(grown, shrunk, "BF16", "BF16") < 0.01


def test_scale_range_is_in_binades():
    x = torch.zeros(3, 300)
    x[0, 0], x[1, 130], x[2, 299] = 16.0, -4.0, 1.0
    assert sorted(schemes.scale_range(x).tolist()) == [0.0, 2.0, 4.0]


def test_an_unknown_scheme_is_named():
    with pytest.raises(MoelabError, match="no scheme 'per bit'; there are: per tensor, per row"):
        round_trip(torch.randn(1, 1), "per bit")
