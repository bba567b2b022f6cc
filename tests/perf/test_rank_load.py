"""The load of one rank: what all ranks have together is what all tokens ask for."""

from __future__ import annotations

import numpy as np
import pytest

from moelab.config import ConfigError, ParallelConfig, preset
from moelab.perf.balance import even_ids
from moelab.perf.experts import destinations
from moelab.perf.rank_load import ROUTINGS, _counted, by_weight, rank_load
from tests.conftest import SEED

TINY, V3 = preset("tinyseek"), preset("deepseek-v3")
SHARES = np.random.default_rng(SEED).random((3, 16)) + 0.1


def loads(routing: str, parallel: ParallelConfig, max_tokens: int, model=TINY, **options):
    shares = SHARES if routing == "tinyseek" else None
    return [
        rank_load(routing, model, parallel, max_tokens, rank, seed=SEED, shares=shares, **options)
        for rank in range(parallel.ep)
    ]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("parallel", [ParallelConfig(4), ParallelConfig(2, 2), ParallelConfig(1)])
def test_all_ranks_together(routing, parallel):
    each = loads(routing, parallel, 9)
    total = sum(load.counts.sum(-1) for load in each)
    assert (total == np.arange(10) * parallel.dp * 4).all()
    for load in each:
        assert load.counts.shape[1:] == (10, 16 // parallel.ep) and load.counts.dtype == np.int32
        assert load.max_tokens == 9 and load.routing == routing
        rows, tokens = load.counts.sum(-1), load.arrivals
        assert (tokens <= rows).all() and (rows <= tokens * min(4, 16 // parallel.ep)).all()
        assert (load.counts.max(-1) <= tokens).all(), "a token is a row of an expert at most once"
        assert (tokens <= np.arange(10) * parallel.dp).all()


def test_equal_is_equal():
    for parallel, tokens, each in ((ParallelConfig(8), 256, 64), (ParallelConfig(128), 256, 1024)):
        load = rank_load("equal", V3, parallel, 256, parallel.ep - 1)
        assert load.counts.shape == (1, 257, 256 // parallel.ep)
        assert (load.counts[0, tokens] == each).all()
        spread = np.ptp(load.counts[0], axis=-1)
        assert spread.max() == (parallel.ep == 8), "as equal as whole rows can be"
        mean = tokens * parallel.dp * destinations(parallel.ep, V3) / parallel.ep
        assert load.arrivals[0, tokens] == pytest.approx(mean, abs=0.5)


def test_counts_by_hand():
    ids = np.array([[[0, 1], [2, 3]], [[1, 3], [1, 0]]])  # two groups of two tokens
    counts, arrivals = _counted(ids, range(0, 2))
    assert counts.tolist() == [[0, 0], [1, 2], [2, 3]] and arrivals.tolist() == [0, 2, 3]


def test_draws_differ_and_seeds_repeat():
    first, again = (rank_load("uniform", TINY, ParallelConfig(4), 30, draws=3, seed=SEED) for _ in range(2))
    other = rank_load("uniform", TINY, ParallelConfig(4), 30, draws=3, seed=SEED + 1)
    assert (first.counts == again.counts).all() and (first.counts != other.counts).any()
    assert len({draw.tobytes() for draw in first.counts}) == 3


def test_uniform_is_even_on_average_and_zipf_is_not():
    uniform = rank_load("uniform", TINY, ParallelConfig(4), 400, draws=20, seed=SEED)
    mean = uniform.counts[:, -1].mean(0)
    assert mean == pytest.approx(400, rel=0.1)
    spread = {name: np.concatenate([x.counts[:, -1].ravel() for x in loads(name, ParallelConfig(4), 400)]).std()
              for name in ROUTINGS}  # fmt: skip
    assert spread["equal"] == 0 < spread["uniform"] < spread["tinyseek"] < spread["zipf"]


def test_by_weight():
    weights = np.array([8.0, 4, 2, 1, 1])
    ids = by_weight(weights, 20_000, 2, np.random.default_rng(SEED))
    assert (ids[:, 0] != ids[:, 1]).all()
    first = by_weight(weights, 20_000, 1, np.random.default_rng(SEED))
    assert np.bincount(first.ravel()) / 20_000 == pytest.approx(weights / 16, abs=0.02)


def test_shares_of_one_draw_after_another():
    shares = np.full((2, 16), 1e-12)
    shares[0, :4] = shares[1, 4:8] = 1  # K experts take all
    load = rank_load("tinyseek", TINY, ParallelConfig(4), 5, draws=3, shares=shares)
    assert load.counts[:, 5].tolist() == [[20] * 4, [0] * 4, [20] * 4] and load.arrivals[:, 5].tolist() == [20, 0, 20]


def test_even_ids_are_what_uniform_counts():
    load = rank_load("uniform", TINY, ParallelConfig(2), 7, draws=1, seed=SEED)
    ids = even_ids(2, 7, TINY, np.random.default_rng(SEED))
    assert (load.counts[0, 7] == np.bincount(ids.ravel(), minlength=16)[:8]).all()


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("routing is 'even'", {"routing": "even"}), ("max_tokens is 0", {"max_tokens": 0}),
        ("draws is 0", {"draws": 0}), ("rank is 4", {"rank": 4}), ("shares are given", {"shares": SHARES}),
        ("shares are None", {"routing": "tinyseek"}), ("ep = dp·tp is 3", {"parallel": ParallelConfig(3)}),
    ],
)  # fmt: skip
def test_errors_name_the_argument(named, changes):
    good = dict(routing="uniform", model=TINY, parallel=ParallelConfig(4), max_tokens=4)
    with pytest.raises(ConfigError, match=named):
        rank_load(**good | changes)
