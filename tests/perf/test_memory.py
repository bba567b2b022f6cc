"""Weights, KV and what fits: the checks by hand, and what must hold for any deployment."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.config import ConfigError, ParallelConfig, preset
from moelab.perf import memory

V3 = preset("deepseek-v3")
X, A, A0, H, E = 44_040_192, 187_105_280, 15_138_816, 7168, 256


def by_hand(dp: int, tp: int) -> float:
    """W written out, with the symbols' values instead of the table of components."""
    e = E / (dp * tp)
    attention = A0 + (A - A0) / tp
    mtp = e * X + X + attention + 2 * H * H
    return (
        58 * e * X + 58 * X + 61 * attention + 9 * 18432 * H + 4 * 129280 * H + 116 * E * H + mtp
    )  # norms and biases: 6 MB


@pytest.mark.parametrize(
    ("dp", "tp", "gb"),
    [
        (8, 1, 102.56), (16, 1, 60.98), (32, 1, 40.20), (64, 1, 29.80), (128, 1, 24.61), (32, 4, 16.61), (1, 8, 93.23),
    ],
)  # fmt: skip
def test_weights(dp, tp, gb):  # check 4
    weights = memory.weight_bytes(V3, ParallelConfig(dp, tp))
    assert weights / 1e9 == pytest.approx(gb, abs=0.02)
    assert weights == pytest.approx(by_hand(dp, tp), abs=0.01e9)
    assert weights > by_hand(dp, tp)


def test_parts_and_mtp():
    parallel = ParallelConfig(8, 1)
    parts = memory.weight_parts(V3, parallel)
    assert sum(parts.values()) == memory.weight_bytes(V3, parallel)
    without = memory.weight_bytes(V3, parallel, mtp=False)
    assert parts["MTP layer"] == pytest.approx(memory.weight_bytes(V3, parallel) - without)
    assert parts["routed experts"] == 58 * 32 * X
    with pytest.raises(ConfigError, match="divide only over"):
        memory.weight_bytes(V3, ParallelConfig(3, 1))


def test_kv():  # check 3
    assert memory.kv_bytes_per_token(V3) == 70_272
    assert memory.kv_bytes_per_token(V3, mtp=True) == 70_272 + 1_152
    fit = memory.fit(V3, ParallelConfig(8), 5000, 141e9, 0.07)
    assert fit.kv_per_request == 351_360_000


@pytest.mark.parametrize(("capacity", "reserve", "batch"), [(141e9, 0, 109), (141e9, 0.07, 81), (150e9, 0.07, 105)])
def test_requests_on_h200(capacity, reserve, batch):  # check 5
    assert memory.fit(V3, ParallelConfig(8), 5000, capacity, reserve).batch == pytest.approx(batch, abs=1)


def test_requests_on_h100():  # checks 6 and 7
    for dp, batch in ((16, 38), (32, 97), (64, 126), (128, 141)):
        assert memory.fit(V3, ParallelConfig(dp), 5000, 80e9, 0.07).batch == pytest.approx(batch, abs=1)
    for tokens, gb, batch in ((128, 1.908, 136), (256, 3.817, 130)):
        buffers = memory.deep_ep_buffer_bytes(V3, tokens)
        assert buffers / 1e9 == pytest.approx(gb, abs=0.001)
        assert memory.fit(V3, ParallelConfig(128), 5000, 80e9, 0.07, buffers).batch == pytest.approx(batch, abs=1)


def test_what_does_not_fit():
    fit = memory.fit(V3, ParallelConfig(8), 5000, 80e9, 0.07)
    assert not fit.weights_fit and fit.batch == 0 and fit.room < 0


deployments = st.sampled_from([(dp, tp) for tp in (1, 2, 4, 8) for dp in (1, 2, 4, 8, 16, 32) if dp * tp <= 256])


@given(deployments, st.integers(1, 20000), st.floats(20e9, 400e9), st.floats(0, 0.5), st.floats(0, 5e9))
def test_the_largest_batch_is_the_largest(deployment, kv_len, capacity, reserve, buffers):
    """B fits and B + 1 does not, counted anew from the inequality."""
    fit = memory.fit(V3, ParallelConfig(*deployment), kv_len, capacity, reserve, buffers)

    def used(batch: int) -> float:
        return by_hand(*deployment) + batch * kv_len * 61 * 576 * 2 + buffers

    slack = 0.01e9  # what the formula by hand leaves out
    if fit.batch:
        assert used(fit.batch) <= capacity * (1 - reserve) + slack
    assert used(fit.batch + 1) > capacity * (1 - reserve) - slack


@given(deployments, st.integers(1, 20000))
def test_more_never_fits_less(deployment, kv_len):
    parallel = ParallelConfig(*deployment)
    base = memory.fit(V3, parallel, kv_len, 141e9, 0.07).batch
    assert memory.fit(V3, parallel, kv_len + 1, 141e9, 0.07).batch <= base
    assert memory.fit(V3, parallel, kv_len, 150e9, 0.07).batch >= base
    assert memory.fit(V3, parallel, kv_len, 141e9, 0.08).batch <= base
    assert memory.fit(V3, parallel, kv_len, 141e9, 0.07, mtp=False).batch >= base


def test_limits():
    """With more and more GPUs a GPU keeps what is never cut."""
    whole = 58 * X + 61 * A + 9 * 18432 * H + 4 * 129280 * H + 116 * E * H + X + A + 2 * H * H
    assert memory.weight_bytes(V3, ParallelConfig(256)) == pytest.approx(whole + 59 * X, abs=0.01e9)
    with pytest.raises(ConfigError, match="kv_len is 0"):
        memory.fit(V3, ParallelConfig(8), 0, 141e9, 0.07)
    with pytest.raises(ConfigError, match="reserve 1"):
        memory.fit(V3, ParallelConfig(8), 5000, 141e9, 1.0)
    assert math.isfinite(memory.fit(V3, ParallelConfig(8), 5000, 141e9, 0.0).room)


def test_redundant_experts_and_experts_cut_by_tp():
    """EP72 of 288 slots: 4 experts a GPU, as EP64 of 256; cut by TP, a GPU holds an eighth of everything but norms,
    the gate and what comes before the heads divide."""
    at_72 = memory.weight_bytes(V3, ParallelConfig(72), redundant=32)
    at_64 = memory.weight_bytes(V3, ParallelConfig(64))
    assert at_72 == pytest.approx(at_64)
    whole = memory.weight_bytes(V3, ParallelConfig(1, 8))
    cut = memory.weight_bytes(V3, ParallelConfig(1, 8), expert_tp=True)
    saved = 7 / 8 * (59 * X + 9 * 18432 * H + 4 * 129280 * H)
    assert whole - cut == pytest.approx(saved, abs=0.01e9)
    fp4 = memory.weight_bytes(V3, ParallelConfig(8), expert_itemsize=0.5)
    assert memory.weight_bytes(V3, ParallelConfig(8)) - fp4 == pytest.approx(59 * 32 * X / 2)
    with pytest.raises(ConfigError, match="256 experts and 8 redundant divide only over .* or 32 redundant"):
        memory.weight_bytes(V3, ParallelConfig(72), redundant=8)


def test_pplx_buffers():
    """Each of the two float32 buffers of combine takes 0.94 GB at EP8 and 128 tokens."""
    row = 7408  # 7168 + 4·56 + 4, in steps of 16
    found = memory.pplx_buffer_bytes(V3, ParallelConfig(8), 128)
    assert found == 128 * row + 32 * 8 * 128 * row + 4 * 32 * 8 * 128 * 7168 + 4 * 128 * 256 * 7168
    assert 4 * 128 * 256 * 7168 == pytest.approx(0.94e9, rel=0.01)
