"""Decode steps by the three schedules over processes: what ran is the schedule, and a sample is the slowest rank's."""

from __future__ import annotations

from itertools import pairwise
from statistics import median_low

import pytest
import torch

from moelab.bench import schedules as bench
from moelab.config import ParallelConfig
from moelab.launch import launch
from moelab.launch.generate import find_model
from moelab.results import Provenance
from moelab.stages import SCHEDULES

HERE = Provenance("cpu", 0, "", {"torch": "0"}, "0" * 40, False)
STEPS = 3


@pytest.fixture(scope="module")
def ran():
    """Two groups with unequal requests of unequal lengths."""
    lengths = ([5, 9, 4], [7])
    prompts = [[torch.randint(256, (n,)).tolist() for n in group] for group in lengths]
    job = bench.job(find_model("tinyseek"), ParallelConfig(2), prompts, STEPS, warmup=1)
    with launch("moelab.bench.schedules:worker", job, ranks=2) as run:
        return list(run), job


def test_records(ran):
    events, job = ran
    found = bench.records(events, job, HERE, "torch-gloo")
    assert [r.params["overlap"] for r in found] == list(SCHEDULES)
    for record in found:
        assert (record.n, record.unit, record.clock) == (STEPS, "us", "wall") and record.min > 0
        assert {k: record.params[k] for k in ("model", "dp", "tp", "ep", "batch", "prompt")} == {
            "model": "tinyseek", "dp": 2, "tp": 1, "ep": 2, "batch": 3, "prompt": 9}  # fmt: skip


@pytest.mark.parametrize("overlap", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_ran_is_the_schedule(ran, overlap, rank):
    events, _ = ran
    spans = bench.timeline(events, overlap, rank)
    launches = list(SCHEDULES[overlap](4))
    assert [(s.micro_batch, s.layer, s.stage) for s in spans] == [
        (x.micro_batch, x.layer, x.stage.name) for x in launches
    ]
    assert spans[0].start_us == 0 and all(a.end_us == pytest.approx(b.start_us) for a, b in pairwise(spans))
    (mine,) = [event for at, event in events if at == rank and event["overlap"] == overlap]
    assert 0 < spans[-1].end_us < median_low(mine["step_us"])  # without dense layer, embedding and head
    assert sum(s.end_us - s.start_us for s in spans) == pytest.approx(spans[-1].end_us)


def test_a_sample_is_the_slowest_rank():
    job = {"model": "m", "dp": 2, "tp": 1, "prompts": [[[1]], [[1, 2]]], "warmup": 0}
    events = [(rank, {"overlap": overlap, "step_us": us}) for overlap in SCHEDULES
              for rank, us in enumerate(([1.0, 9.0, 5.0], [2.0, 3.0, 6.0]))]  # fmt: skip
    assert {(r.min, r.p50, r.n) for r in bench.records(events, job, HERE, "x")} == {(2.0, 6.0, 3)}
