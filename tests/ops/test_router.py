"""The router's rules, each broken once by a published engine."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.ops.router import route

V3 = dict(top_k=8, n_group=8, topk_group=4, scale=2.5)


def oracle(logits, bias, top_k, n_group, topk_group, scale):
    """Float64, one token and one comparison at a time."""
    ids, weights = [], []
    for row in logits.double():
        scores = row.sigmoid()
        biased = scores + bias.double()
        groups = biased.view(n_group, -1)
        group_score = groups.sort(-1, descending=True).values[:, :2].sum(-1)
        kept = sorted(range(n_group), key=lambda g: (-group_score[g].item(), g))[:topk_group]
        size = len(row) // n_group
        allowed = [e for g in sorted(kept) for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: (-biased[e].item(), e))[:top_k]
        ids.append(chosen)
        weights.append(scores[chosen] / scores[chosen].sum() * scale)
    return torch.tensor(ids), torch.stack(weights)


@pytest.mark.parametrize("shift", [-3.0, 0.0, 6.9])
def test_ids_and_weights_equal_a_float64_oracle(shift):
    logits = torch.randn(64, 256)
    bias = torch.rand(256) * 0.3 + shift
    ids, weights = route(logits, bias, **V3)
    expected_ids, expected_weights = oracle(logits, bias, **V3)
    # A float32 sum may merge what float64 tells apart: such a proven tie may fall either way.
    biased = logits.double().sigmoid() + bias.double()
    gap = (biased.gather(-1, ids) - biased.gather(-1, expected_ids)).abs()
    assert gap.max() < 2e-6
    same = (ids == expected_ids).all(-1)
    assert same.float().mean() > 0.95
    torch.testing.assert_close(weights[same].double(), expected_weights[same], rtol=1e-5, atol=1e-6)


def test_adding_a_constant_to_all_biases_changes_nothing():
    def grid(step):
        return torch.stack([torch.randperm(256) for _ in range(64)]) * step

    # Biased scores lie at least 2^-16 apart, so rounding decides nothing; rows whose group sums tie are left out.
    logits, bias = (grid(1 / 256) + 1 / 512).logit(), grid(1 / 65536)[0]
    sums = (logits.double().sigmoid() + bias).view(-1, 8, 32).topk(2).values.sum(-1).sort(-1).values
    clear = (sums.diff(dim=-1) > 1e-5).all(-1)
    assert clear.float().mean() > 0.5
    ids, weights = route(logits, bias, **V3)
    moved_ids, moved_weights = route(logits, bias + 1.0, **V3)
    assert torch.equal(ids[clear], moved_ids[clear]) and torch.equal(weights[clear], moved_weights[clear])


def test_weights_come_from_the_scores_without_bias():
    logits, bias = torch.randn(200, 256), torch.randn(256)
    ids, weights = route(logits, bias, **V3)
    chosen = logits.sigmoid().gather(-1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True) * 2.5)


def test_no_expert_of_a_dropped_group_is_chosen_when_all_biased_scores_are_negative():
    logits, bias = torch.randn(200, 256), torch.full((256,), -5.0) + torch.rand(256)
    ids, _ = route(logits, bias, **V3)
    groups = (logits.sigmoid() + bias).view(-1, 8, 32).topk(2).values.sum(-1)
    kept = groups.topk(4).indices
    assert all(set((row // 32).tolist()) <= set(k.tolist()) for row, k in zip(ids, kept, strict=True))


def test_a_bias_in_a_narrow_band_far_from_zero_still_decides():
    """Biases of 6.82 … 7.06 keep 8 values in bfloat16; in float32 each expert keeps its own."""
    bias = torch.linspace(6.82, 7.06, 256)[torch.randperm(256)]
    ids, _ = route(torch.zeros(1, 256), bias, top_k=8, n_group=1, topk_group=1)
    assert ids[0].tolist() == bias.argsort(descending=True)[:8].tolist()


def test_the_lower_id_wins_a_tie():
    ids, _ = route(torch.zeros(3, 256), torch.zeros(256), **V3)
    assert ids.tolist() == [list(range(8))] * 3
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])
    assert route(logits, None, top_k=4)[0].tolist() == [[1, 2, 4, 0]]


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=8, max_size=8))
def test_ties_of_every_pattern(values):
    ids, _ = route(torch.tensor([values]), None, top_k=3, n_group=2, topk_group=1)
    first, second = values[:4], values[4:]
    best = [sum(torch.tensor(sorted(g)[-2:]).sigmoid().tolist()) for g in (first, second)]
    base = 0 if best[0] >= best[1] else 4
    expected = sorted(range(4), key=lambda e: (-values[base + e], e))[:3]
    assert ids.tolist() == [[base + e for e in expected]]


def test_mixtral_is_the_case_of_softmax_and_one_group():
    logits = torch.randn(50, 8)
    ids, weights = route(logits, None, top_k=2, scoring="softmax")
    top = logits.softmax(-1).topk(2)
    assert torch.equal(ids, top.indices)
    torch.testing.assert_close(weights, top.values / top.values.sum(-1, keepdim=True))


def test_no_tokens():
    for scoring, bias in itertools.product(("sigmoid", "softmax"), (None, torch.zeros(256))):
        ids, weights = route(torch.empty(0, 256), bias, scoring=scoring, **V3)
        assert ids.shape == weights.shape == (0, 8)
