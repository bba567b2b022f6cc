from __future__ import annotations

import math

import pytest

from moelab.perf.coverage import band, half_width, inside, standing
from moelab.perf.validate import Row


def row(measured: float, low: float | None = 80.0, high: float | None = 125.0) -> Row:
    return Row("r", "deployment", "step", "ms", measured, 100.0, low, high)


def test_half_widths_are_the_normal_ones():
    assert half_width(0.8) == pytest.approx(1.2816, abs=1e-4)
    assert half_width(0.6827) == pytest.approx(1, abs=1e-3)


def test_standing_is_one_at_the_ends_of_the_interval():
    assert standing(row(125.0)) == pytest.approx(1)
    assert standing(row(80.0)) == pytest.approx(-1)
    assert standing(row(100.0)) == 0
    assert standing(row(95.0, low=90.0)) == pytest.approx(math.log(0.95) / -math.log(0.9))  # the shorter side counts
    assert standing(row(100.0, None, None)) is None


def test_right_intervals_hold_what_they_promise(rng):
    """Errors drawn as the intervals say: 80 % is what a factor of 1.25 holds."""
    rows = [row(100 * math.exp(math.log(1.25) / half_width(0.8) * z)) for z in rng.standard_normal(4000)]
    for level in (0.2, 0.5, 0.8, 0.95):
        low, high = band(level, len(rows), 0.999)
        assert low < inside(rows, level) < high
    narrow = [row(r.measured, 90.0, 111.0) for r in rows]
    assert inside(narrow, 0.8) < band(0.8, len(rows), 0.999)[0]


def test_half_the_points_at_the_level_of_the_middle_one():
    rows = [row(100 * 1.25**s) for s in (0.1, -0.2, 0.9, -3.0)]
    assert inside(rows, 0.8) == 0.75
    assert inside([*rows, row(100.0, None, None)], 0.8) == 0.75  # rows without an interval do not count
    assert math.isnan(inside([row(100.0, None, None)], 0.8))


def test_a_band_stays_between_nothing_and_all():
    assert band(0.5, 25) == pytest.approx((0.5 - 1.2816 * 0.1, 0.5 + 1.2816 * 0.1), abs=1e-4)
    assert band(0.99, 4)[1] == 1 and band(0.01, 4)[0] == 0
