"""The table of choices: what is compiled, what is kept, what is left out."""

from __future__ import annotations

import pytest
import torch

from moelab.bench import choice as bench
from moelab.bench.point import Candidate, Point
from moelab.bench.timer import BenchError, Samples
from moelab.ops.choice import Choice, Row
from moelab.results import Provenance


def point(m, *candidates, n=64):
    return Point(0, n, 128, m, candidates, lambda device: m, float(m * n))


def candidate(backend, config, us, kernel="k"):
    def run(inputs):
        if us is None:
            raise RuntimeError("too much shared memory\nand more")
        return us

    return Candidate(backend, config, kernel, run)


@pytest.fixture
def timed(monkeypatch):
    """A candidate takes what its `run` returns."""
    monkeypatch.setattr(bench, "num_sets", lambda size, device: 2)
    monkeypatch.setattr(bench, "graph_samples", lambda calls: Samples([call() for call in calls], 0))


def test_the_fastest_of_each_backend_is_kept_and_a_failure_said(timed):
    said = []
    at = point(
        8, candidate("triton", "a", 7.0), candidate("triton", "b", 6.0), candidate("triton", "c", None),
        candidate("deep_gemm", "", 6.5),
    )  # fmt: skip
    rows = bench.measure(at, torch.device("cpu"), said.append)
    assert rows == [Row(0, 64, 128, 8, Choice("triton", "b", 6.0)), Row(0, 64, 128, 8, Choice("deep_gemm", "", 6.5))]
    assert said == ["triton c at groups=0 n=64 k=128 m=8: RuntimeError: too much shared memory"]


def test_a_point_where_nothing_works(timed):
    with pytest.raises(BenchError, match="no candidate works at groups=0 n=64 k=128 m=8"):
        bench.measure(point(8, candidate("triton", "a", None)), torch.device("cpu"), lambda line: None)


def test_every_kernel_is_compiled_once_at_its_smallest_point():
    points = [
        point(64, candidate("triton", "a", 1, "A"), candidate("deep_gemm", "", 1, "d 64")),
        point(8, candidate("triton", "a", 1, "A"), candidate("triton", "b", 1, "B")),
        point(16, candidate("triton", "b", 1, "B"), candidate("deep_gemm", "", 1, "d 16")),
    ]
    assert bench.jobs(points) == [(1, 0), (1, 1), (2, 1), (0, 1)]


def test_without_a_table_or_a_gpu(tmp_path, monkeypatch):
    with pytest.raises(BenchError, match="op 'quantize' has no table; there are: .*linear"):
        bench.write_table("quantize", tmp_path, print)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError, match="--write-table needs a GPU"):
        bench.write_table("linear", tmp_path, print)


def test_where_a_table_comes_from():
    where = Provenance("NVIDIA H200", 1, "580.1", {"torch": "2.11.0", "sgl-deep-gemm": "0.1"}, "0123456", True)
    line = bench.origin(where)
    assert line.startswith("NVIDIA H200, driver 580.1; sgl-deep-gemm 0.1, torch 2.11.0; commit 0123456 with changes; 2")
    assert "\n" not in line
