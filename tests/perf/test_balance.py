from __future__ import annotations

import itertools

import numpy as np
import pytest

from moelab.config import ConfigError
from moelab.perf import balance


def test_in_order_is_the_checkpoints():
    placed = balance.in_order(8, 4)
    assert placed.slots.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placed.loads(np.arange(8)).tolist() == [1, 5, 9, 13]
    assert balance.imbalance(placed.loads(np.arange(8))) == pytest.approx(13 / 7)
    with pytest.raises(ConfigError, match=r"8 experts divide only over \[1, 2, 4, 8\]"):
        balance.in_order(8, 3)


def test_by_hand():
    """Rows 12, 6, 4, 2 on two GPUs: 12 + 2 and 6 + 4 of 24. With two copies more the first expert has three."""
    rows = np.array([12.0, 6, 4, 2])
    plain = balance.balanced(rows, 2)
    assert sorted(map(sorted, plain.slots.tolist())) == [[0, 3], [1, 2]]
    assert balance.imbalance(plain.loads(rows)) == pytest.approx(14 / 12)
    more = balance.balanced(rows, 2, 2)
    assert more.copies.tolist() == [3, 1, 1, 1]  # 12 a copy -> 6; then 6 and 6, of equals the first
    # Pieces 6, 4, 4, 4, 4, 2: the two GPUs get 6 + 4 + 2 (or 4 + 4 + 4) each.
    assert balance.imbalance(more.loads(rows)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("experts", "gpus", "redundant"), [(16, 4, 0), (16, 8, 8), (256, 72, 32), (256, 64, 64), (6, 4, 2)]
)
def test_every_expert_stands_somewhere(rng, experts, gpus, redundant):
    rows = rng.lognormal(0, 1, experts)
    placed = balance.balanced(rows, gpus, redundant)
    assert placed.slots.shape == (gpus, (experts + redundant) // gpus)
    assert np.bincount(placed.slots.ravel(), minlength=experts).tolist() == placed.copies.tolist()
    assert placed.copies.min() >= 1
    assert placed.loads(rows).sum() == pytest.approx(rows.sum())
    assert placed.loads(np.stack([rows, 2 * rows])).shape == (2, gpus)
    each = rows / placed.copies
    # Greedy: an expert that was copied was then the heaviest, so before its last copy it outweighed all that are left.
    copied = placed.copies > 1
    if copied.any():
        before = (rows / np.maximum(placed.copies - 1, 1))[copied].min()
        assert before >= each.max() - 1e-12


def test_copies_on_one_gpu_are_avoided(rng):
    placed = balance.balanced(np.array([100.0, 1, 1, 1, 1, 1]), 4, 2)
    assert all(len(set(held)) == len(held) for held in placed.slots.tolist())


def test_near_the_best_of_all(rng):
    """Against every way of putting 8 experts on 2 GPUs of 4 slots."""
    for _ in range(20):
        rows = rng.lognormal(0, 0.7, 8)
        best = min(max(rows[list(half)].sum(), rows.sum() - rows[list(half)].sum())
                   for half in itertools.combinations(range(8), 4))  # fmt: skip
        found = balance.balanced(rows, 2).loads(rows).max()
        assert best - 1e-9 <= found <= 1.2 * best


def test_packing_helps_where_gpus_hold_many_copies_where_they_hold_one(rng):
    rows = [balance.uneven_experts(64, 1.0, rng) for _ in range(10)]

    def mean(place, gpus, *copies):
        return np.mean([balance.imbalance(place(r, gpus, *copies).loads(r)) for r in rows])

    assert mean(lambda r, g: balance.in_order(64, g), 8) > 1.15 > 1.08 > mean(balance.balanced, 8) >= 1
    alone, twice, thrice = (mean(balance.balanced, 64, copies) for copies in (0, 64, 128))
    assert alone > 2 * twice and twice > thrice > 1


def test_copies_must_fill_all_gpus():
    with pytest.raises(ConfigError, match="legal are 32, 104, 176"):
        balance.balanced(np.ones(256), 72, 33)
    with pytest.raises(ConfigError, match="redundant is -8"):
        balance.balanced(np.ones(16), 8, -8)


def test_chance(rng):
    """Many tokens come out even; the expected maximum of two GPUs is known: 1 + sqrt(2/(pi n)) for n rows."""
    assert balance.by_chance(10**7, 8, 16, rng).max() < 1.01
    two = balance.by_chance(50, 8, 2, rng, draws=20000)
    assert two.mean() - 1 == pytest.approx(np.sqrt(2 / np.pi / 400), rel=0.05)
    uneven = balance.by_chance(10**6, 8, 4, rng, shares=np.array([2, 1, 1, 0]))
    assert uneven.mean() == pytest.approx(2, rel=0.01)


def test_made_up_shares(rng):
    shares = np.concatenate([balance.uneven_experts(4096, 0.5, rng) for _ in range(10)])
    assert shares.mean() == pytest.approx(1)
    assert shares.std() == pytest.approx(0.5, rel=0.05)
    assert balance.uneven_experts(16, 0.0, rng).tolist() == [1.0] * 16


def test_rows_are_counted(rng):
    # 2 texts, 2 layers, 2 places, 2 experts a token
    ids = np.array([[[[0, 1], [1, 2]], [[3, 0], [3, 3]]], [[[0, 2], [1, 0]], [[0, 1], [2, -1]]]])
    assert balance.rows_by_expert(ids, 4).tolist() == [[3, 3, 2, 0], [2, 1, 1, 3]]
    steps = balance.rows_by_step(ids, 2, 4)
    assert steps.shape == (2, 2, 4)
    assert steps[0].tolist() == [[2, 1, 1, 0], [1, 2, 1, 0]]  # place 0 of both texts, then place 1
    assert balance.rows_by_step(ids, 1, 4).shape == (2, 4, 4)
    with pytest.raises(ConfigError, match="tokens is 3: legal are 1 to 2"):
        balance.rows_by_step(ids, 3, 4)


def test_places_are_counted(rng):
    from moelab.config import preset
    from moelab.perf.experts import destinations

    assert balance.places_by_token(np.array([[0, 1, 2, 3], [0, 4, 8, 12], [0, 1, 4, 5]]), 16, 4) == pytest.approx(7 / 3)
    v3 = preset("deepseek-v3")
    ids = np.stack([rng.choice(256, 8, replace=False) for _ in range(4000)])
    assert balance.places_by_token(ids, 256, 8) == pytest.approx(destinations(8, v3, group_limited=False), rel=0.01)


def test_even_ids_are_a_router_without_preferences(rng):
    from moelab.config import preset

    model = preset("tinyseek")
    ids = balance.even_ids(50, 40, model, rng)
    assert ids.shape == (50, 40, 4)
    assert all(len(set(token)) == 4 for token in ids.reshape(-1, 4).tolist())
    groups = ids // (model.n_routed_experts // model.n_group)
    assert max(len(set(token)) for token in groups.reshape(-1, 4).tolist()) == model.topk_group
    share = np.bincount(ids.ravel(), minlength=16) / ids.size * 16
    assert share.min() > 0.85 and share.max() < 1.15
