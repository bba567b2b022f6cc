"""Cases of the grouped GEMM: what they say about themselves, and one run on the CPU."""

from __future__ import annotations

import pytest
import torch

from moelab.bench import grouped
from moelab.bench.grouped import grouped_gemm_cases
from moelab.config import PRESETS, ParallelConfig
from moelab.ops.grouped_gemm_fp8 import Config
from moelab.perf.experts import tokens_per_expert
from moelab.perf.roofline import expert_gemms, grouped_gemm
from tests.bench.test_routing import tensors

DEEPSEEK = PRESETS["deepseek-v3"]


def test_the_grid_is_that_of_the_study():
    cases = [case for case in grouped_gemm_cases(False) if case.params["layout"] == "padded"]
    assert {(c.params["groups"], c.params["batch"]) for c in cases} == {
        (groups, batch) for groups in (32, 16, 8, 4, 2) for batch in (1, 2, 4, 8, 16, 32, 64, 128)
    }
    for case in cases:
        p = case.params
        parallel = ParallelConfig(dp=p["ep"], tp=1)
        assert p["m"] == tokens_per_expert(p["batch"], p["q_len"], DEEPSEEK, parallel)
        assert (p["n"], p["k"]) == expert_gemms(DEEPSEEK)[p["projection"]]
        work = grouped_gemm(p["active"], p["rows"], p["n"], p["k"], out_itemsize=2)
        assert case.flops == work.flops and work.bytes <= case.bytes < work.bytes * 1.04  # scales are ours to add
        assert p["counts"] == ("equal" if p["m"] >= 1 else "drawn")
        if p["m"] >= 1:
            assert p["rows"] == p["groups"] * p["m"] and p["active"] == p["groups"]


def test_drawn_counts_are_the_same_every_time_and_those_of_distinct_experts():
    counts = grouped.drawn_counts(16, 256)
    assert torch.equal(counts, grouped.drawn_counts(16, 256)) and counts.sum() == 16 * 8
    assert torch.equal(grouped.drawn_counts(16, 32), counts[:32])
    assert grouped.drawn_counts(1, 256).max() == 1


@pytest.mark.parametrize("room", [8, None])
def test_bytes_are_those_of_populated_rows_and_experts_that_have_some(room, monkeypatch):
    monkeypatch.setattr(grouped, "SHAPES", {"small": (256, 384)})
    counts = torch.tensor([3, 0, 5], dtype=torch.int32)
    case = grouped.case("small", counts, 8 / 3, room, {})
    inputs = case.make(torch.device("cpu"))
    out = case.backends["moelab"](inputs)
    assert out is inputs["out"]
    weight, scales = inputs["weight"]
    assert out.numel() // 256 == (3 * 8 if room else 2 * 128)
    per_row = 384 + 3 * 4 + 2 * 256
    assert case.bytes == 8 * per_row + sum(t.nbytes for t in tensors([weight[:2], scales[:2]])) + 3 * 4
    populated = [out[0, :3], out[2, :5]] if room else [out[:3], out[128:133]]
    assert all(part.isfinite().all() and part.any() for part in populated)


def test_the_tables_hold_every_equal_count_of_the_grid():
    points = {(p.groups, p.n, p.k, p.m) for p in grouped.padded_points()}
    for case in grouped_gemm_cases(False):
        p = case.params
        if p["layout"] == "padded" and p["counts"] == "equal":
            assert (p["groups"], p["n"], p["k"], p["m"]) in points
            assert p["m"] < 4 or case.bytes in [q.bytes for q in grouped.padded_points() if q.m == p["m"]]
    shapes = {(p.groups, p.n, p.k) for p in grouped.contiguous_points()}
    assert shapes == {shape[:3] for shape in points}


def test_configs_of_the_tables_are_told_apart_by_their_kernels():
    for point in grouped.padded_points() + grouped.contiguous_points():
        kernels = [candidate.kernel for candidate in point.candidates]
        assert len(set(kernels)) == len(kernels) > 0
        for candidate in point.candidates:
            assert candidate.backend == "deep_gemm" or str(Config.parse(candidate.config)) == candidate.config


def test_deep_gemm_is_timed_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert list(grouped_gemm_cases(True)[0].backends) == ["moelab", "triton", "deep_gemm"]
