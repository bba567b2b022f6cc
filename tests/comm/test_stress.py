"""10⁵ rounds where each rank has a GPU, fewer where ranks take turns or are emulated: see stress.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moelab.comm import AllToAll, Nvshmem
from moelab.config import ParallelConfig
from tests.comm import stress
from tests.conftest import SEED
from tests.pool import Rank


def rounds_of(rank: Rank, dp: int, tp: int, returns: str, inputs: int, rounds: int) -> int:
    spec = stress.spec(ParallelConfig(dp, tp))
    group = rank.groups[dp * tp]
    group = dataclasses.replace(group if isinstance(group, Nvshmem) else Nvshmem(group), returns=returns)
    with AllToAll(**stress.arguments(spec), group=group, device=rank.device, timeout_s=30) as a2a:
        return stress.Stress(a2a, inputs, SEED).run(rounds, SEED)


@pytest.mark.parametrize("returns", ["rows", "bf16"])
def test_no_byte_of_many_rounds_is_of_another(kernel_pool, returns, monkeypatch):
    ep = kernel_pool.up_to(4)
    tp = 2 if ep > 2 else 1
    inputs, rounds = 60, 1000
    if kernel_pool.kind.startswith("emulated"):
        inputs, rounds = 20, 60
    elif kernel_pool.kind.startswith("gpu-virtual"):
        rounds = 10_000
    elif kernel_pool.kind.startswith("nvshmem") and ep <= torch.cuda.device_count():
        inputs, rounds = 300, 100_000 if returns == "rows" else 10_000
    monkeypatch.setattr("tests.pool.PATIENCE_S", 200)
    results = kernel_pool.run(rounds_of, ep // tp, tp, returns, inputs, rounds, ranks=ep)
    assert results == [0] * ep
