"""Gains, crossings, and what the study's bars leave to be said."""

from __future__ import annotations

import math

import pytest

from moelab.perf import predict, schedules
from moelab.perf.tables import NOTHING_RECORDED

STUDY = {"kv_len": 5000, "draft_tokens": 1, "acceptance": 0.6, "tables": NOTHING_RECORDED}


def test_a_layer_is_the_predictions():
    us = schedules.layer_us("h100", 128, [4, 128], alltoall="pplx-2025", **STUDY)
    for overlap, at in us.items():
        p = predict("h100", 128, batch=128, overlap=overlap, alltoall="pplx-2025", **STUDY)
        assert at[128] == pytest.approx(p.layer_us["total"])
    gains = schedules.saved(us)
    assert gains[128] == pytest.approx(100 * (1 - us["microbatch"][128] / us["dispatch"][128]))
    assert gains[4] < -5 and 10 < gains[128] < 35  # as the study says


def test_over_nvlink_micro_batches_only_cost():
    batches = [4, 16, 64, 128]
    for dp in (2, 8):
        gains = schedules.saved(schedules.layer_us("h200", dp, batches, alltoall="deepep", **STUDY))
        assert max(gains.values()) < 0 and schedules.crossover(gains) is None


def test_crossings():
    assert schedules.crossover({4: -10, 16: 10}) == pytest.approx(8)  # half way in log batch
    assert schedules.crossover({4: -30, 8: 5, 16: -10, 32: 10}) == pytest.approx(math.sqrt(16 * 32))  # the last one
    assert schedules.crossover({4: 0.0, 8: 3}) == 4 and schedules.crossover({4: 5, 8: -1}) is None


def test_the_studys_bars():
    bars = {name: schedules.published_bar(*of) for name, of in schedules.STUDY_BARS.items()}
    assert {name: sum(bar.values()) for name, bar in bars.items()} == {
        "EP8": 1802, "EP128 NoOverlap": 2667, "EP128 DispatchOverlap": 2651, "EP128 MicroBatch": 1896}  # fmt: skip
    assert bars["EP128 MicroBatch"] == {"Dispatch": 367, "Combine": 237, "GroupGEMM": 270, "rest": 1022}
    # 1802 - 555 - 391 and 1896 - 604 - 270.
    assert schedules.published_others() == {"EP8": 856, "EP128 MicroBatch": 1022}
    hidden = {o: schedules.published_hidden(o) for o in schedules.NAMES}
    assert hidden == pytest.approx({"none": 0, "dispatch": 100 * 16 / 1605, "microbatch": 100 * 1001 / 1605})
