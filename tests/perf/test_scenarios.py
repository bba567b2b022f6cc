"""Presets, sweeps, and calibration from a user's records."""

from __future__ import annotations

import time

import pytest

from moelab.config import ConfigError
from moelab.perf import calibrate, laws, scenarios
from moelab.perf.prediction import predict
from moelab.perf.sweeps import frontier, study_sweep, sweep, throughput_at
from moelab.perf.tables import NOTHING_RECORDED, load
from moelab.results import Provenance, Record, Store


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_a_preset_runs_and_says_what_it_assumes(name):
    chosen = scenarios.scenario(name)
    assert len(chosen.assumes) >= 2 and chosen.title
    p = scenarios.run(name, NOTHING_RECORDED)
    assert p.step_ms > 0 and p.fits
    assert scenarios.run(name, NOTHING_RECORDED, batch=1).step_ms < p.step_ms


def test_presets_are_what_they_are_called():
    doubled = scenarios.run("nics-2x400g", NOTHING_RECORDED, overlap="none")
    single = scenarios.run("nics-2x400g", NOTHING_RECORDED, overlap="none", fabric="ib400")
    saved = single.layer_us["Combine"] - doubled.layer_us["Combine"]
    assert saved == pytest.approx((single.layer_us["Combine"] - 27) / 2)
    tree = scenarios.run("eagle-tree", NOTHING_RECORDED)
    assert tree.deployment.q_len == 7 and tree.deployment.tokens_per_step == pytest.approx(1 + 0.75 + 0.4875 + 0.268125)
    rack = scenarios.run("gb200-nvl72", NOTHING_RECORDED)
    assert rack.deployment.parallel.gpus_per_node == 72 and rack.origins["GEMM"].origin == "extrapolated"
    matched = scenarios.run_matched("prefill-disaggregation", NOTHING_RECORDED)
    assert matched.prefill_gpus > 0 and matched.ttft_ms > 0
    with pytest.raises(ConfigError, match="those that have: prefill-disaggregation"):
        scenarios.run_matched("eagle-tree")
    with pytest.raises(ConfigError, match="unknown scenario 'eagle'; did you mean eagle-tree"):
        scenarios.scenario("eagle")


def test_a_sweep_is_predictions():
    frame = sweep("h100", ep=[16, 64], tp=[1, 2, 3], batch=[1, 64], kv_len=5000, tables=NOTHING_RECORDED)
    assert len(frame) == 2 * 2 * 2  # tp 3 is left out
    row = frame[(frame["ep"] == 64) & (frame["tp"] == 2) & (frame["batch"] == 64)].iloc[0]
    p = predict("h100", 32, 2, batch=64, kv_len=5000, tables=NOTHING_RECORDED)
    assert row["step_ms"] == p.step_ms and row["layer_MLA"] == p.layer_us["MLA"] and row["overlap"] == p.overlap
    assert row["step_low"] < row["step_ms"] < row["step_high"] and bool(row["fits"]) == p.fits
    with pytest.raises(ConfigError, match="give ep"):
        sweep("h100", batch=1, kv_len=1)
    with pytest.raises(ConfigError, match="nearest"):
        sweep("h100", ep=3, batch=1, kv_len=1)


def test_the_studys_sweep_and_its_claims():
    started = time.process_time()
    frame = study_sweep()
    assert time.process_time() - started < 10 and len(frame) == 160
    one = {ep: part for ep, part in frame.groupby("ep")}
    assert not one[8][(one[8]["tp"] == 1) & (one[8]["batch"] == 128)]["fits"].any()  # one node cannot reach 128
    assert one[128][(one[128]["tp"] == 1) & (one[128]["batch"] == 128)]["fits"].all()
    for speed in (40, 50, 60):  # more GPUs: faster and more, up to here
        more = [throughput_at(one[ep], speed) for ep in (16, 32, 64, 128)]
        assert more == sorted(more) and more[-1] > 3 * throughput_at(one[8], speed)
    flat = one[128][one[128]["tp"] == 1].set_index("batch")["tok_s_per_request"]
    assert flat[8] > 0.85 * flat[1] and flat[128] < 0.3 * flat[1]
    edge = frontier(frame)
    assert edge["tok_s_per_request"].is_monotonic_increasing and edge["tok_s_per_node"].is_monotonic_decreasing
    assert edge["fits"].all()
    assert throughput_at(frame, 10_000) == 0.0


def exchange_records(own: Store, alpha: float, beta: float) -> None:
    where = Provenance("NVIDIA H200", 8, "580", {"torch": "2.11.0"}, "a" * 40, False)
    for stage in laws.STAGES:
        for tokens in (1, 32, 128, 512):
            us = alpha + tokens * laws.SIZE[stage] * 7 / 8 / beta / 1e3
            own.append(Record.from_samples(
                [us], bench="alltoall", backend="deepep", metric=stage, unit="us", clock="graph", provenance=where,
                params={"tokens": tokens, "experts": 256, "hidden": 7168, "dp": 8, "tp": 1},
            ))  # fmt: skip


def test_a_users_own_exchange_is_fitted_and_used(tmp_path):
    own = Store(tmp_path, package=False)
    exchange_records(own, 8.0, 330.0)
    tables = load(tmp_path)
    fits = [f for f in calibrate.recorded_fits(tables) if f.library == "deepep"]
    assert [(f.stage, f.gpu, f.ep, f.points, f.origin) for f in fits] == [
        ("combine", "H200", "8", 4, "measured"), ("dispatch", "H200", "8", 4, "measured"),
    ]  # fmt: skip
    for f in fits:
        assert (f.alpha_us, f.beta_gb_s) == pytest.approx((8.0, 330.0)) and abs(f.worst_residual_us) < 1e-6
    p = predict("h200", 8, batch=64, kv_len=4000, overlap="none", tables=tables)
    assert p.origins["Dispatch"].origin == "measured"
    assert p.layer_us["Dispatch"] == pytest.approx(8 + 64 * 59_264 * 7 / 8 / 330e3)


def test_a_measured_host_replaces_the_assumption(tmp_path):
    own = Store(tmp_path, package=False)
    where = Provenance("NVIDIA H200", 1, "580", {"torch": "2.11.0"}, "a" * 40, False)
    own.append(Record.from_samples([400.0], bench="engine", metric="host", unit="us", clock="wall", provenance=where))
    tables = load(tmp_path)
    (found,) = calibrate.overheads(tables)
    assert (found.us, found.origin) == (400.0, "measured")
    p = predict("h200", 8, batch=8, kv_len=1000, tables=tables)
    assert p.tail_us["host"] == 400.0 and p.origins["host"].origin == "measured"
    assert predict("h100", 16, batch=8, kv_len=1000, tables=tables).origins["host"].origin == "extrapolated"
