"""Activated experts and destinations: the checks, the limits, and draws of the routing that the formulas assume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.config import ConfigError, ParallelConfig, preset
from moelab.perf import experts

V3, TINY = preset("deepseek-v3"), preset("tinyseek")


def draw(rng, model, tokens: int, group_limited: bool) -> np.ndarray:
    """ids [tokens, k]: groups uniformly, then experts of the kept groups uniformly."""
    groups = model.n_group if group_limited else 1
    kept = model.topk_group if group_limited else 1
    size = model.n_routed_experts // groups
    ids = []
    for _ in range(tokens):
        chosen = rng.choice(groups, kept, replace=False)
        pool = (chosen[:, None] * size + np.arange(size)).ravel()
        ids.append(rng.choice(pool, model.num_experts_per_tok, replace=False))
    return np.array(ids)


@pytest.mark.parametrize(
    ("ep", "tokens", "active"),
    [(8, 2, 1.97), (8, 16, 12.75), (8, 32, 20.41), (8, 64, 27.81), (8, 128, 31.45), (128, 128, 1.97)],
)
def test_active(ep, tokens, active):  # check 8
    assert experts.active_experts(tokens, V3, ParallelConfig(ep)) == pytest.approx(active, abs=0.01)


@pytest.mark.parametrize(("ep", "rows"), [(8, 64), (128, 1024)])
def test_tokens_per_expert(ep, rows):  # check 9
    assert experts.tokens_per_expert(128, 2, V3, ParallelConfig(ep)) == rows


def test_tokens_count_dp_groups():
    assert experts.total_tokens(1, 2, ParallelConfig(1, 8)) == 2
    assert experts.total_tokens(128, 2, ParallelConfig(32, 4)) == 8192


@pytest.mark.parametrize("group_limited", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_active_against_draws(group_limited, tokens, rng):
    parallel = ParallelConfig(4)
    seen = []
    for _ in range(400):
        awake = np.unique(draw(rng, TINY, tokens, group_limited))
        seen.append(np.bincount(awake // 4, minlength=4).mean())
    error = np.std(seen) / len(seen) ** 0.5
    expected = experts.active_experts(tokens, TINY, parallel)
    assert np.mean(seen) == pytest.approx(expected, abs=4 * error + 1e-3)


@given(st.integers(1, 3000), st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]))
def test_active_is_monotone_and_bounded(tokens, ep):
    parallel = ParallelConfig(ep)
    now, more = experts.active_experts(np.array([tokens, tokens + 1]), V3, parallel)
    assert 0 < now <= more <= 256 / ep  # equal where float64 cannot tell any more
    assert now <= tokens * 8 / ep + 1e-9
    assert experts.active_experts(0, V3, parallel) == 0


@pytest.mark.parametrize(
    ("places", "group_limited", "expected"), [(8, False, 5.29), (8, True, 3.63), (16, False, 6.52), (16, True, 5.34)]
)
def test_published_destinations(places, group_limited, expected):
    assert experts.destinations(places, V3, group_limited) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("places", [1, 2, 4, 8, 16, 32, 256])
@pytest.mark.parametrize("group_limited", [True, False])
def test_destinations_against_draws(places, group_limited, rng):
    ids = draw(rng, V3, 1500, group_limited)
    seen = [len(set(row // (256 // places))) for row in ids]
    error = np.std(seen) / len(seen) ** 0.5
    assert np.mean(seen) == pytest.approx(experts.destinations(places, V3, group_limited), abs=4 * error + 1e-9)


def test_destinations_limits():
    assert experts.destinations(1, V3) == 1
    assert experts.destinations(256, V3) == pytest.approx(8)
    counts = [experts.destinations(n, V3) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert counts == sorted(counts)
    with pytest.raises(ConfigError, match="divisors of 256"):
        experts.destinations(3, V3)
    odd = V3.replace(n_routed_experts=24, n_group=6, topk_group=3, num_experts_per_tok=4)
    with pytest.raises(ConfigError, match="groups of 4 experts straddle places of 6"):
        experts.destinations(4, odd)
