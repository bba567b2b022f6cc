"""The schedules: nothing is read before it is written, ranks exchange alike, steps come in the study's order."""

from __future__ import annotations

import pytest

from moelab.stages import CATEGORIES, DENSE_LAYER, MOE_LAYER, SCHEDULES, micro_batch


@pytest.mark.parametrize("layer", [MOE_LAYER, DENSE_LAYER])
def test_stages_read_only_what_was_written(layer):
    known = {"residual"}
    for stage in layer:
        assert set(stage.reads) <= known, stage.name
        assert stage.category in CATEGORIES
        known |= set(stage.writes)
    assert layer[-1].writes == ("residual",)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_layers", [0, 1, 2, 58])
def test_every_micro_batch_runs_every_stage_once_in_an_order_that_its_data_allow(name, num_layers):
    launches = list(SCHEDULES[name](num_layers))
    parts = 2 if name == "microbatch" else 1
    assert len(launches) == parts * num_layers * len(MOE_LAYER)
    assert len({(x.micro_batch, x.layer, x.stage.name) for x in launches}) == len(launches)
    for part in range(parts):
        written: dict[str, int] = {"residual": 0}  # value -> layer in which it was last written
        for launch in (x for x in launches if x.micro_batch == part):
            for value in launch.stage.reads:
                assert written[value] >= launch.layer - (value == "residual"), launch
            written |= dict.fromkeys(launch.stage.writes, launch.layer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_exchange_goes_through_its_four_halves_before_the_next_of_its_micro_batch(name):
    halves = ["dispatch_send", "dispatch_recv", "combine_send", "combine_recv"]
    for part in (0, 1):
        seen = [x.stage.name for x in SCHEDULES[name](3) if x.micro_batch == part and x.stage.name in halves]
        assert seen == halves * (len(seen) // 4)


def test_micro_batches_run_three_steps_apart_in_the_studys_order():
    steps = []
    for launch in micro_batch(3):
        step = f"{'AB'[launch.micro_batch]}{launch.stage.step}"
        if not steps or steps[-1] != step:
            steps.append(step)
    steady = "A3 B1 A4 B2 A5 B3 A1 B4 A2 B5".split()
    assert steps == ["A1", "A2"] + steady + steady + steady[:6] + ["B4", "B5"]


def test_where_the_shared_expert_runs():
    def place(name):
        names = [x.stage.name for x in SCHEDULES[name](1)]
        return names.index("shared_expert") - names.index("dispatch_send"), names.index("dispatch_recv")

    assert place("none")[0] == -1
    for name in ("dispatch", "microbatch"):
        assert place(name)[0] == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_exchange_at_a_time_is_in_flight(name):
    """Micro-batches take turns on the wire: A's combine has been received before B's dispatch is sent."""
    flying = 0
    for launch in SCHEDULES[name](4):
        flying += {"dispatch_send": 1, "combine_recv": -1}.get(launch.stage.name, 0)
        assert flying in (0, 1)
    assert flying == 0
