"""The CPU exchange benchmark: what it sends is what must be sent, and a sample is the slowest rank's."""

from __future__ import annotations

import numpy as np
import torch

from moelab.bench import alltoall_cpu as bench
from moelab.comm.spec import ExchangeSpec
from moelab.comm.traffic import traffic
from moelab.config import ParallelConfig
from moelab.launch import launch
from moelab.results import Provenance, Store

HERE = Provenance("cpu", 0, "", {"torch": "0"}, "0" * 40, False)


def test_over_two_processes(tmp_path):
    parallel = ParallelConfig(2, 1)
    ids = torch.stack([torch.stack([torch.randperm(8)[:2] for _ in range(6)]) for _ in range(2)])
    job = bench.job(parallel, 8, 32, ids.tolist(), [3, 6], repeats=4, warmup=1)
    with launch("moelab.bench.alltoall_cpu:worker", job, ranks=2) as run:
        events = list(run)
    store = Store(tmp_path, package=False)
    for record in bench.records(events, job, HERE, "random"):
        store.append(record)
    for tokens in (3, 6):
        spec = ExchangeSpec(parallel, 8, 2, 32, tokens)
        expected = traffic(spec, [np.array(group)[:tokens] for group in ids.tolist()])
        for backend, scheme in (("torch-gloo", "sparse"), ("dense-split", "sparse"), ("dense-padded", "padded")):
            (sent,) = store.records("alltoall", backend=backend, metric="sent", tokens=tokens)
            assert sent.p50 == expected[scheme].total.sum()
            for half in ("dispatch", "combine"):
                (time,) = store.records("alltoall", backend=backend, metric=half, tokens=tokens)
                assert time.n == 4 and time.min > 0 and time.unit == "us"


def test_a_sample_is_the_slowest_rank():
    job = {"tokens": [4], "warmup": 0, "dp": 2, "tp": 1, "hidden": 8, "num_experts": 4, "top_k": 2, "payload": "bf16"}
    events = [
        (rank, {"backend": backend, "tokens": 4, "half": half, "samples_us": samples, "bytes": 10})
        for backend in bench.BACKENDS
        for half in bench.HALVES
        for rank, samples in enumerate(([1.0, 9.0, 5.0], [2.0, 3.0, 6.0]))
    ]
    found = bench.records(events, job, HERE, "random")
    times = [r for r in found if r.unit == "us"]
    assert len(found) == 9 and {(r.min, r.p50, r.n) for r in times} == {(2.0, 6.0, 3)}
    assert {r.p50 for r in found if r.metric == "sent"} == {20.0}
