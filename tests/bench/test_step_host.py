"""A step by its parts, what a call launches, and which records of steps make a pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moelab.bench import step_host, step_modes
from moelab.bench.decode_setting import PACKAGED
from moelab.bench.launches import launches, num_stages
from moelab.config import ParallelConfig, preset
from moelab.model.deepseek import DeepSeek
from moelab.results import Provenance, Record, Store
from moelab.stages import DENSE_LAYER, MOE_LAYER
from tests.conftest import SEED

CPU = torch.device("cpu")
HERE = Provenance("NVIDIA H200", 1, "580.1", {"torch": "2.11.0"}, "0123456", False)


@pytest.fixture(scope="module")
def model():
    return DeepSeek.load(PACKAGED, ParallelConfig(), 16)


def test_views_and_allocations_launch_nothing():
    x = torch.zeros(4, 4)
    assert launches(lambda: x.view(16)[2:].unsqueeze(0).T, CPU) == 0
    assert launches(lambda: torch.empty_like(x), CPU) == 0
    assert launches(lambda: x.add_(1), CPU) == 1
    assert launches(lambda: (x + 1).t().contiguous(), CPU) == 2
    assert launches(lambda: x.contiguous(), CPU) == 0
    assert launches(lambda: x.add_(1), CPU, begin=lambda: x.mul_(2)) == 1


@pytest.mark.gpu
def test_launches_are_what_the_device_got():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; none here")
    x, device = torch.zeros(4, 4, device="cuda"), torch.device("cuda")
    (x + 1).t().contiguous()
    assert launches(lambda: (x + 1).t().contiguous(), device) == 2
    assert launches(lambda: x.view(16)[2:].T, device) == 0
    assert launches(lambda: x.add_(1), device, begin=lambda: torch.cuda.synchronize()) == 1


def test_stages_of_a_step():
    config = preset("deepseek-v3")
    whole = 3 * len(DENSE_LAYER) + 58 * len(MOE_LAYER)
    assert num_stages(config, "none", tp=2) == num_stages(config, "dispatch", tp=2) == whole
    assert num_stages(config, "none") == whole - 61
    assert num_stages(config, "microbatch") == 3 * (len(DENSE_LAYER) - 1) + 2 * 58 * (len(MOE_LAYER) - 1)


def test_both_shapes_are_the_same_step(model):
    """They give the same hidden states, and every part of either is on the clock."""
    with torch.no_grad():
        steps = step_host._Steps(model, 3, 70, SEED)
        outputs = []
        for shape in step_host.SHAPES:
            us, run = steps.prepared(shape)
            assert set(us) == set(step_host.PARTS[:-1]) - (set() if shape == "fixed" else {"plan"})
            assert all(value > 0 for value in us.values())
            outputs.append(run(None).hidden.clone())
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_records_of_host_parts(model):
    found = step_host.records(model, "tinyseek", [1, 3], 70, 2, HERE, SEED)
    assert len({record.key() for record in found}) == len(found) == 2 * (3 + 4 + 2 * 2)
    table = step_host.table(found)
    assert set(table) == {1, 3} and "plan" not in table[1]["anew"] and set(table[3]["fixed"]) == set(step_host.PARTS)
    assert all(record.n == 2 and record.clock == "wall" for record in table[1]["fixed"].values())
    for shape in step_host.SHAPES:
        one, three = (step_host.counted(found, batch, shape) for batch in (1, 3))
        # The reference of attention goes request by request; nothing else does, but experts that got none.
        assert three["attention"] == 3 * one["attention"] > 0 and one["rest"] > 100
        assert three["rest"] < 1.2 * one["rest"]
    (said,) = step_host.lessons(found)
    fixed = sum(record.p50 for part, record in table[3]["fixed"].items() if part != "run")
    assert "1 request takes" in said and f"3 requests take **{fixed:,.0f} µs** in fixed shape" in said


def put(store, mode, batch, us, layers=8, gpu=HERE.gpu, **params):
    common = {"model": "deepseek-v3", "layers": layers, "ep": 1, "kv_len": 4096, "shadow": False}
    store.append(
        Record.from_samples(
            [us], bench="decode", backend="virtual", metric="step", unit="us", provenance=replace(HERE, gpu=gpu),
            clock="graph" if mode == "graph" else "event",
            params=common | {"mode": mode, "batch": batch, "max_tokens": 128 * batch} | params,
        )
    )  # fmt: skip


def test_pairs_are_of_one_setting(tmp_path):
    store = Store(tmp_path, package=False)
    assert step_modes.both(store, "NVIDIA H200") == ({}, {})
    put(store, "graph", 1, 500.0, overlap="microbatch")
    put(store, "eager", 1, 5000.0, layers=61)
    assert step_modes.both(store, "NVIDIA H200") == ({}, {})  # neither has its other half
    for batch, eager, graph in ((1, 4000.0, 1000.0), (128, 6000.0, 5000.0)):
        put(store, "eager", batch, eager)
        put(store, "graph", batch, graph)
    put(store, "graph", 256, 9000.0)  # alone
    put(store, "graph", 1, 7.0, layers=61, kv_len=1)
    put(store, "eager", 1, 8.0, layers=61, kv_len=1)
    put(store, "eager", 64, 5000.0)  # from before budgets, and from after
    put(store, "graph", 64, 2000.0, comm_sms=0, compute_sms=0)
    put(store, "graph", 64, 2.0, comm_sms=0, compute_sms=100)
    common, steps = step_modes.both(store, "NVIDIA H200")
    assert common["comm_sms"] == common["compute_sms"] == 0
    assert {mode: {batch: r.p50 for batch, r in at.items()} for mode, at in steps.items()} == {
        "eager": {1: 4000.0, 64: 5000.0, 128: 6000.0}, "graph": {1: 1000.0, 64: 2000.0, 128: 5000.0},
    }  # fmt: skip
    assert common["layers"] == 8 and "batch" not in common and common["gpu_count"] == 1
    (said,) = step_modes.lessons(common, steps)
    low, high = (f"{getattr(steps['eager'][1], p):,.0f}" for p in ("p20", "p80"))
    assert f"**1,000 µs** at batch 1, an eager one 4,000 (p20–p80 {low}–{high}): **4.0×**; at batch 128 5,000" in said
    assert step_modes.title(common, "NVIDIA H200") == "deepseek-v3, 8 layers, EP1, KV 4,096, 1 × NVIDIA H200: recorded"
    put(store, "eager", 128, 4100.0)  # no longer than at batch 1, though the device has five times as much to do
    _, said = step_modes.lessons(*step_modes.both(store, "NVIDIA H200"))
    assert "grows 5.0×; an eager one takes 4 to 5 ms whatever the batch" in said
    assert step_modes.both(store, "NVIDIA H100") == ({}, {}) and step_modes.lessons({}, {}) == []
