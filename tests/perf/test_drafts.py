"""What drafts are worth."""

from __future__ import annotations

import pytest

from moelab.perf import drafts, predict
from moelab.perf.tables import NOTHING_RECORDED

STEPS = {0: {1: 10.0, 8: 20.0}, 1: {1: 11.0, 8: 36.0}, 2: {1: 13.0, 8: 60.0}}


def test_gain_is_tokens_over_time():
    assert drafts.gain(STEPS, 1, 0.6) == {1: pytest.approx(100 * (16 / 11 - 1)), 8: pytest.approx(100 * (32 / 36 - 1))}
    assert drafts.gain(STEPS, 2, 0.6)[1] == pytest.approx(100 * (1.96 * 10 / 13 - 1))


def test_break_even_is_where_nothing_is_gained():
    found = drafts.break_even(STEPS, 1)
    assert found == pytest.approx({1: 0.1, 8: 0.8}, abs=1e-3)
    for n in (1, 2):
        for batch, acceptance in drafts.break_even(STEPS, n).items():
            if acceptance <= 1:
                assert drafts.gain(STEPS, n, acceptance)[batch] == pytest.approx(0, abs=0.05)
    assert drafts.break_even(STEPS, 2)[8] == pytest.approx(1.0, abs=1e-3)  # 1 + a + a² = 3


def test_the_best_number():
    assert drafts.best(STEPS, 0.6) == {1: 2, 8: 0} and drafts.best(STEPS, 0.95) == {1: 2, 8: 1}
    assert drafts.best({0: {1: 1.0}, 1: {1: 1.5}}, 0.5) == {1: 0}  # as fast: the fewest


def test_tokens_by_depth():
    assert [drafts.tokens([0.9, 0.5, 0.2], n) for n in range(4)] == pytest.approx([1, 1.9, 2.35, 2.44])


def test_steps_are_the_predictions():
    given = {"kv_len": 5000, "tables": NOTHING_RECORDED}
    found = drafts.step_ms("h100", 128, [16], [0, 2], fabric="ib400", alltoall="pplx-2025", **given)
    p = predict("h100", 128, batch=16, draft_tokens=2, acceptance=0.9, fabric="ib400", alltoall="pplx-2025", **given)
    assert found[2][16] == pytest.approx(p.step_ms) and found[0][16] < found[2][16]
