"""Places that nobody needs: by hand, and against drawing the batches."""

from __future__ import annotations

import numpy as np
import pytest

from moelab.config import ConfigError
from moelab.perf import padding
from tests.conftest import SEED

SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("batches", "own", "common", "waste"),
    [([1, 64], 65, 128, 63 / 128), ([16, 128], 144, 256, 112 / 256), ([5, 5, 5], 15, 15, 0), ([0, 0, 9], 9, 27, 2 / 3)],
)
def test_with_a_size_for_every_number(batches, own, common, waste):
    found = padding.places(batches)
    assert (found.requests, found.own, found.common) == (sum(batches), own, common)
    assert found.own_waste == 0 and found.common_waste == pytest.approx(waste)
    assert found.common_waste == pytest.approx(1 - np.mean(batches) / max(batches))


def test_with_captured_sizes():
    found = padding.places([0, 3, 33], SIZES)
    assert (found.requests, found.own, found.common) == (36, 4 + 64, 3 * 64)
    assert padding.places([0, 0], SIZES).common_waste == 0
    with pytest.raises(ConfigError, match="65 requests exceed the largest batch size, 64"):
        padding.places([1, 65], SIZES)
    with pytest.raises(ConfigError, match=r"batches are \[\]: give one number"):
        padding.places([])
    with pytest.raises(ConfigError, match=r"batches are \[-1, 2\]"):
        padding.places([-1, 2])


@pytest.mark.parametrize("sizes", [None, SIZES])
@pytest.mark.parametrize(("mean", "groups"), [(0.3, 2), (4, 8), (12, 32)])
def test_expected_places_are_those_of_many_draws(mean, groups, sizes):
    drawn = np.random.default_rng(SEED).poisson(mean, (20000, groups))
    found, seen = padding.by_chance(mean, groups, sizes), [padding.places(row, sizes) for row in drawn[:4000].tolist()]
    for name in ("requests", "own", "common"):
        values = np.array([getattr(one, name) for one in seen])
        error = values.std() / len(values) ** 0.5
        assert abs(values.mean() - getattr(found, name)) < 5 * error, name
    assert found.requests == pytest.approx(mean * groups)


def test_chance_needs_sizes_for_what_occurs():
    with pytest.raises(ConfigError, match="exceed the largest batch size, 64"):
        padding.by_chance(60, 2, SIZES)
    with pytest.raises(ConfigError, match="mean is 0 and groups 2"):
        padding.by_chance(0, 2)
    one = padding.by_chance(8, 1)
    assert one.common == pytest.approx(one.own) == pytest.approx(8)


def test_the_sentence_names_the_worst():
    cases = {"1 and 3": padding.places([1, 3]), "2 and 2": padding.places([2, 2])}
    chance = {n: {m: padding.by_chance(m, n, SIZES) for m in (1, 8)} for n in (2, 4)}
    said = padding.lesson(cases, chance)
    assert "33 % of the places are padding for 1 and 3 requests" in said
    at = chance[4][8]
    assert f"By chance among 4 groups with 8 each it is {100 * at.common_waste:.0f} %" in said
    assert f"**{100 * at.own_waste:.0f} %**" in said
