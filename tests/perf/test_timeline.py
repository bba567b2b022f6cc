"""The timeline is the walk, span by span."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from moelab.perf import overlap, predict, timeline
from moelab.perf.overlap import MicroBatch
from moelab.perf.tables import NOTHING_RECORDED
from moelab.stages import MOE_LAYER, SCHEDULES

STUDY = {"batch": 128, "kv_len": 5000, "draft_tokens": 1, "acceptance": 0.6, "tables": NOTHING_RECORDED}


def drawn(rng: random.Random) -> MicroBatch:
    return MicroBatch({s.name: rng.uniform(0, 50) for s in MOE_LAYER}, rng.uniform(0, 400), rng.uniform(0, 400))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("draw", range(5))
def test_the_spans_are_the_walk(schedule, draw):
    rng = random.Random(draw)
    parts = [drawn(rng) for _ in range(2 if schedule == "microbatch" else 1)]
    spans, flights = timeline.trace(schedule, 4, parts)
    walked = overlap.walk(schedule, 4, parts)
    assert spans[0].start_us == 0 and spans[-1].end_us == pytest.approx(walked.us)
    assert all(a.end_us == b.start_us for a, b in pairwise(spans))  # one stream: no gap, no two at once
    category = {s.name: s.category for s in MOE_LAYER}
    for name, us in walked.by_category.items():
        assert sum(s.end_us - s.start_us for s in spans if category[s.stage] == name) == pytest.approx(us)
    assert [(s.micro_batch, s.layer, s.stage) for s in spans] == [
        (x.micro_batch, x.layer, x.stage.name) for x in SCHEDULES[schedule](4)
    ]
    assert len(flights) == 2 * 4 * len(parts)
    for f in flights:
        size = {"Dispatch": parts[f.micro_batch].dispatch, "Combine": parts[f.micro_batch].combine}[f.category]
        assert f.end_us - f.start_us == pytest.approx(size) and 0 <= f.waited_us <= size + 1e-9


def test_what_is_hidden_by_hand():
    stages = {s.name: 1.0 for s in MOE_LAYER} | {"dispatch_recv": 0.0, "combine_recv": 0.0}
    one = MicroBatch(stages, 10.0, 20.0)
    assert timeline.shares("none", [one]) == pytest.approx((2, 0, 30))  # two sends; nothing beside the flights
    assert timeline.shares("dispatch", [one]) == pytest.approx((2, 1, 29))  # the shared expert
    # A dispatch flies beside its shared expert and the other half's S1 (6), a combine beside the other's S2 (6).
    assert timeline.shares("microbatch", [one, one]) == pytest.approx((4, 2 * (7 + 6), 2 * (3 + 14)))


@pytest.mark.parametrize("dp", [8, 128])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shares_are_the_predictions_communication(schedule, dp):
    p = predict("h100", dp, overlap=schedule, **STUDY)
    parts = timeline.micro_batches(schedule, "h100", dp, **STUDY)
    found = timeline.shares(schedule, parts)
    assert found.kernels + found.exposed == pytest.approx(p.layer_us["Dispatch"] + p.layer_us["Combine"])
    assert found.total == pytest.approx(len(parts) * (parts[0].dispatch + parts[0].combine) + found.kernels)
    if dp == 8:  # NVLink: kernels store the rows
        assert found.hidden == found.exposed == 0
