"""Rooflines: the study's counts, hand-computed values, and what must hold whatever the shape."""

from __future__ import annotations

import numpy as np
import pytest

from moelab import hardware
from moelab.bench import grouped, linear
from moelab.config import ConfigError, preset
from moelab.perf import params, roofline
from moelab.results import Provenance, Record, Store

V3 = preset("deepseek-v3")
HERE = Provenance("NVIDIA H200", 1, "580", {"torch": "0"}, "0" * 40, False)


def record(metric: str, samples, unit: str = "us", bench: str = "ops", **params) -> Record:
    return Record.from_samples(
        samples, bench=bench, metric=metric, unit=unit, clock="graph", provenance=HERE, params=params
    )


def test_gemm_by_hand(rng):
    m, n, k = (int(x) for x in rng.integers(1, 5000, 3))
    a, b = np.zeros((m % 7 + 1, k % 11 + 1)), np.zeros((k % 11 + 1, n % 13 + 1))
    work = roofline.gemm(a.shape[0], b.shape[1], a.shape[1])
    assert work.bytes == a.size + b.size + (a @ b).size
    assert work.flops == 2 * a.shape[0] * b.size
    assert roofline.gemm(m, n, k, out_itemsize=2).bytes - roofline.gemm(m, n, k).bytes == m * n
    assert work.tflops(1.0) == work.flops / 1e6


def test_grouped_is_groups_of_gemm(rng):
    g, m, n, k = (int(x) for x in rng.integers(1, 500, 4))
    one, all_of_them = roofline.gemm(m, n, k, 2), roofline.grouped_gemm(g, g * m, n, k, 2)
    assert (all_of_them.flops, all_of_them.bytes) == (g * one.flops, g * one.bytes)
    asleep = roofline.grouped_gemm(g, g * m, n, k, 2).bytes - roofline.grouped_gemm(g - 1, g * m, n, k, 2).bytes
    assert asleep == n * k


def test_work_of_what_the_bench_timed():
    found = roofline.work_of(record("linear", [1.0], m=3, n=5, k=7))
    assert found == roofline.gemm(3, 5, 7)
    # 3 rows of 8 groups woke 2 experts: 2 of 8 matrices are read.
    params = {"groups": 8, "m": 0.375, "rows": 3, "active": 2, "n": 5, "k": 7}
    found = roofline.work_of(record("grouped_gemm", [1.0], **params), out_itemsize=2)
    assert (found.flops, found.bytes) == (2 * 3 * 35, 3 * 7 + 2 * 35 + 2 * 15)
    params = {"batch": 3, "q_len": 2, "kv_len": 99, "heads": 16, "kv": "fp8"}
    assert roofline.work_of(record("mla", [1.0], **params)) == roofline.mla(3, 2, 99, 16, "fp8")
    with pytest.raises(ConfigError, match="'quantize'"):
        roofline.work_of(record("quantize", [1.0], m=3))


def test_work_is_the_benchs_but_for_scales():
    """Where the bench counts bytes it adds scales, 4 bytes for 128 values and for 128 × 128, and counts."""
    for case in [*linear.linear_cases(True), *grouped.grouped_gemm_cases(True)]:
        work = roofline.work_of(record(case.op, [1.0], **case.params), out_itemsize=2)
        assert work.flops == case.flops
        assert work.bytes < case.bytes < 1.04 * work.bytes


def test_mla_by_hand():
    work = roofline.mla(batch=128, q_len=2, kv_len=5000, heads=128)
    assert work.flops == 2 * 1088 * 128 * 2 * 128 * 5000
    assert work.bytes == 128 * (5000 * 1152 + 2 * 128 * 1088 * 2)
    # The readings of FlashInfer on one H200 at this setting: 589.1 us, 605 TFLOP/s.
    assert work.tflops(589.1) == pytest.approx(605, abs=1)
    long = [roofline.mla(8, q, 10**6, h).intensity for q, h in ((1, 128), (2, 128), (1, 16))]
    assert long == pytest.approx([242, 483, 30.2], rel=2e-3)
    fewer = roofline.mla(8, 1, 4096, 16).bytes - roofline.mla(8, 1, 4096, 16, "fp8").bytes
    assert fewer == 8 * 4096 * (1152 - 656)


def test_projections_are_the_models():
    shapes = roofline.projections(V3)
    assert shapes["qkv_a"] == (2112, 7168) and shapes["q_b"] == (24576, 1536) and shapes["o_proj"] == (7168, 16384)
    assert shapes["shared gate_up"] == (4096, 7168) and shapes["shared down"] == (7168, 2048)
    # All of attention's weights but kv_b, which is absorbed and no GEMM of this kind.
    kv_b = 512 * 128 * 256
    assert sum(n * k for n, k in list(shapes.values())[:3]) == params.attention_params(V3) - kv_b
    assert sum(n * k for n, k in roofline.expert_gemms(V3).values()) == params.expert_params(V3)
    half = roofline.projections(V3, tp=2)
    assert half["qkv_a"] == shapes["qkv_a"] and half["q_b"] == (12288, 1536) and half["o_proj"] == (7168, 8192)


def test_roofs_meet_at_the_ridge():
    roofs = roofline.nominal(hardware.gpu("H100"))
    ridge = roofs.ridge("fp8")
    assert ridge == pytest.approx(1979 / 3.35)
    assert roofs.attainable(ridge / 2, "fp8") == pytest.approx(1979 / 2)
    assert roofs.attainable(ridge * 2, "fp8") == 1979
    for factor, bound in ((1 / 3, "bytes"), (3, "flops")):
        flops = 1e9 * ridge * factor
        work = roofline.Work(flops, 1e9)
        seconds = work.bytes / 3350e9 if bound == "bytes" else work.flops / 1979e12
        assert roofs.least_us(work, "fp8") == pytest.approx(seconds * 1e6)


def test_measured_roofs_come_from_records(tmp_path):
    store = Store(tmp_path, package=False)
    assert roofline.measured(store, "NVIDIA H200") is None
    store.append(record("fp8", [1400.0, 1450.0], "TFLOP/s", "roofs", size=8192))
    assert roofline.measured(store, "NVIDIA H200") is None
    store.append(record("copy", [4000.0, 4200.0, 4300.0], "GB/s", "roofs", bytes=1 << 30))
    roofs = roofline.measured(store, "NVIDIA H200")
    assert (roofs.gb_s, roofs.tflops) == (4200.0, {"fp8": 1425.0})
    assert roofline.measured(store, "NVIDIA H100") is None


def test_a_point_keeps_its_spread():
    work = roofline.gemm(64, 4096, 7168)
    point = roofline.point(record("linear", [10.0, 11.0, 12.0, 20.0, 30.0], m=64, n=4096, k=7168))
    assert point.intensity == work.intensity
    assert point.tflops == pytest.approx(work.flops / 12e6)
    assert point.low < point.tflops < point.high <= work.flops / 10e6
    assert roofline.timed(work, 12.0) == roofline.Point(point.intensity, *[point.tflops] * 3)


def test_series_are_unambiguous():
    records = [record("linear", [float(m)], m=m, n=n, k=7) for m in (64, 2, 8) for n in (5, 6)]
    found = roofline.series(records, "m", "linear", "reference", n=5)
    assert list(found) == [2, 8, 64] and [r.p50 for r in found.values()] == [2.0, 8.0, 64.0]
    assert roofline.series(records, "m", "linear", "triton", n=5) == {}
    assert roofline.series(records, "batch", "linear", "reference", n=5) == {}
    with pytest.raises(ConfigError, match=r"at m 64 differ in \['n'\]"):
        roofline.series(records, "m", "linear", "reference", k=7)


def test_halving():
    assert roofline.halving_cost({64: 14.3, 128: 37.4, 256: 20.3}, 256) == pytest.approx(54.5)
    with pytest.raises(ConfigError, match=r"timed are \[64, 128\]"):
        roofline.halving_cost({64: 1.0, 128: 2.0}, 256)
    with pytest.raises(ConfigError, match="m is 3"):
        roofline.halving_cost({1: 1.0, 3: 2.0}, 3)


def test_spread_of_curves():
    assert roofline.spread([{1: 2.0, 2: 3.0}, {2: 3.3, 4: 9.0}, {4: 9.0}]) == pytest.approx(1.1)
    assert roofline.spread([{1: 2.0}, {2: 3.0}]) is None
