"""Schedules with times: the walk against the closed forms, and against the order that the engine runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.engine import executor
from moelab.perf import overlap
from moelab.perf.overlap import MicroBatch
from moelab.stages import DENSE_LAYER, MOE_LAYER, SCHEDULES
from tests.helpers import load_alone, one_state

time = st.floats(0, 2000)
names = [stage.name for stage in MOE_LAYER]
micro_batches = st.builds(
    lambda us, d, c: MicroBatch(dict(zip(names, us, strict=True)), d, c),
    st.lists(time, min_size=len(names), max_size=len(names)), time, time,
)  # fmt: skip


def steps(part: MicroBatch) -> dict[str, float]:
    """s1, s2, sh, m and the kernels that send and receive."""
    by_step = {i: sum(part.stages[s.name] for s in MOE_LAYER if s.step == i and not exchange(s)) for i in range(1, 5)}
    return {"s1": by_step[1], "s2": by_step[2], "sh": by_step[3], "m": by_step[4],
            **{s.name: part.stages[s.name] for s in MOE_LAYER if exchange(s)}}  # fmt: skip


def exchange(stage) -> bool:
    return stage.communicates and stage.name != "tp_reduce"


def closed(schedule: str, part: MicroBatch) -> float:
    """4.5, with the kernels of the exchange outside the max."""
    t, d, c = steps(part), part.dispatch, part.combine
    send = t["dispatch_send"] + t["dispatch_recv"] + t["combine_send"] + t["combine_recv"]
    if schedule == "none":
        return t["s1"] + t["s2"] + t["sh"] + d + t["m"] + c + send
    if schedule == "dispatch":
        return t["s1"] + t["s2"] + max(d, t["sh"]) + t["m"] + c + send
    return 2 * (max(d, t["s1"] + t["sh"]) + t["m"] + max(c, t["s2"]) + send)


@given(micro_batches)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_steady_layer_is_the_closed_form(schedule, part):
    parts = [part] * (2 if schedule == "microbatch" else 1)
    _, one = overlap.layers(schedule, 58, parts)
    # A combine hides under the other half's S2, which receives nothing in between; a dispatch under its own shared
    # expert and the other half's S1, after whose combine has been received.
    assert one.us == pytest.approx(closed(schedule, part), rel=1e-9, abs=1e-6)
    assert sum(one.by_category.values()) == pytest.approx(one.us, abs=1e-6)


@given(micro_batches, st.integers(0, 70))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_layers_at_once_is_the_whole_walk(schedule, part, count):
    parts = [part] * (2 if schedule == "microbatch" else 1)
    total, _ = overlap.layers(schedule, count, parts)
    assert total == pytest.approx(overlap.walk(schedule, count, parts).us, rel=1e-9, abs=1e-6)


@given(micro_batches)
def test_hiding_never_costs(part):
    none, dispatch = (overlap.layers(s, 58, [part])[0] for s in ("none", "dispatch"))
    assert dispatch <= none + 1e-6
    free = MicroBatch(part.stages, 0, 0)
    for schedule in SCHEDULES:
        parts = [part] * (2 if schedule == "microbatch" else 1)
        assert overlap.layers(schedule, 9, [free] * len(parts))[0] <= overlap.layers(schedule, 9, parts)[0] + 1e-6


def test_waiting_counts_as_the_exchange_that_is_waited_for():
    us = dict.fromkeys(names, 0.0) | {"shared_expert": 30.0, "mla": 100.0}
    _, none = overlap.layers("none", 58, [MicroBatch(us, 40, 50)])
    assert none.by_category["Dispatch"] == 40 and none.by_category["Combine"] == 50 and none.us == 220
    _, hidden = overlap.layers("dispatch", 58, [MicroBatch(us, 40, 50)])
    assert hidden.by_category["Dispatch"] == 10 and hidden.us == 190
    _, micro = overlap.layers("microbatch", 58, [MicroBatch(us, 40, 50)] * 2)
    assert micro.by_category["Dispatch"] == 20 and micro.by_category["Combine"] == 0 and micro.us == 280


def test_dense_layers_run_all_their_stages():
    us = {stage.name: 1.0 for stage in DENSE_LAYER}
    assert overlap.dense(us).us == len(DENSE_LAYER)


def test_engine_and_model_run_the_same_stages_in_the_same_order(tiny_checkpoint):
    """The engine's own walk, observed, beside the one that the model gives times to."""
    model = load_alone(tiny_checkpoint, max_tokens=16)
    for schedule in SCHEDULES:
        seen: list[tuple[int, str]] = []

        def note(launch, _, seen=seen) -> None:
            if launch.layer >= 0:  # not a dense one
                seen.append((launch.micro_batch, launch.stage.name))

        executor.run_layers(model, one_state(model, [3, 5, 7]), schedule, observe=note)
        walked = [(micro, stage) for micro, stage, _ in overlap.order(schedule, len(model.moe_layers))]
        assert seen == walked and seen
    for schedule, launches in SCHEDULES.items():  # what any executor is handed
        ours = overlap.order(schedule, 4)
        assert [(x.micro_batch, x.stage.name, x.stage.category) for x in launches(4)] == list(ours)
