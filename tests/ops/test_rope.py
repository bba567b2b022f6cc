"""YaRN's numbers for DeepSeek-V3, and the pairing of neighbours."""

from __future__ import annotations

import math

import pytest
import torch

from moelab.config import ModelConfig, RopeConfig, preset
from moelab.ops.rope import apply_rope, cos_sin, inverse_frequencies, softmax_scale


def test_softmax_scale_of_deepseek_v3_holds_m_squared():
    assert softmax_scale(preset("deepseek-v3")) == pytest.approx(0.1352338, abs=1e-7)
    plain = ModelConfig(rope=RopeConfig())
    assert softmax_scale(plain) == pytest.approx(0.0721688, abs=1e-7)
    without_all_dim = ModelConfig(rope=RopeConfig(factor=40.0))
    assert softmax_scale(without_all_dim) == pytest.approx(0.0721688, abs=1e-7)
    cos, _ = cos_sin(without_all_dim, torch.zeros(1, dtype=torch.int64))
    assert cos[0, 0].item() == pytest.approx(0.1 * math.log(40) + 1)
    cos, _ = cos_sin(preset("deepseek-v3"), torch.zeros(1, dtype=torch.int64))
    assert cos[0, 0].item() == 1.0


def test_yarn_leaves_fast_pairs_and_slows_slow_ones():
    plain = inverse_frequencies(RopeConfig(), 64)
    yarn = inverse_frequencies(preset("deepseek-v3").rope, 64)
    assert torch.equal(yarn[:11], plain[:11])  # ramp 0 up to pair 10
    torch.testing.assert_close(yarn[23:], plain[23:] / 40)  # ramp 1 from pair 23
    middle = yarn[11:23] / plain[11:23]
    assert (middle < 1).all() and (middle > 1 / 40).all() and (middle.diff() < 0).all()


def test_neighbours_are_turned_as_pairs():
    config = ModelConfig(rope=RopeConfig())
    positions = torch.tensor([0, 1, 1000])
    cos, sin = cos_sin(config, positions)
    x = torch.randn(3, 5, 64)
    turned = apply_rope(x, cos, sin)
    as_complex = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    angle = positions.double()[:, None] * 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    expected = torch.view_as_real(as_complex * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)
    torch.testing.assert_close(turned.double(), expected, rtol=0, atol=2e-4)
    assert torch.equal(turned[0], x[0])


def test_scores_depend_on_the_distance_alone():
    config = preset("tinyseek")
    q, k = torch.randn(1, 64), torch.randn(1, 64)

    def score(i, j):
        return (
            apply_rope(q, *cos_sin(config, torch.tensor([i]))) * apply_rope(k, *cos_sin(config, torch.tensor([j])))
        ).sum()

    torch.testing.assert_close(score(3, 1), score(1003, 1001), rtol=1e-3, atol=1e-3)
    assert abs(score(3, 1) - score(3, 2)) > 1e-4
