"""What is counted before allocating is what is allocated, and what does not fit is refused with the arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moelab.config import ParallelConfig, preset
from moelab.engine.batch import build, choose
from moelab.engine.engine import Engine
from moelab.engine.executor import run_layers
from moelab.engine.memory import RESERVE, Need, OutOfMemory, available_bytes, need
from moelab.engine.sequence import Sampling
from moelab.launch import generate_rank
from moelab.launch.worker import Context
from moelab.model.deepseek import DeepSeek
from tests.engine.test_distributed import TINYSEEK
from tests.helpers import load_alone


def tensors(thing, seen=None):
    """All tensors in a tree of dataclasses and lists, each once."""
    seen = {} if seen is None else seen
    if isinstance(thing, torch.Tensor):
        seen[thing.data_ptr(), thing.shape] = thing
    elif isinstance(thing, list):
        [tensors(part, seen) for part in thing]
    elif dataclasses.is_dataclass(thing) and type(thing).__module__.startswith("moelab.model"):
        [tensors(getattr(thing, field.name), seen) for field in dataclasses.fields(thing)]
    return seen.values()


def sizes_of_rank(rank, dp: int, tp: int) -> tuple[int, int]:
    parallel = ParallelConfig(dp, tp)
    model = DeepSeek.load(TINYSEEK, parallel, 16, rank=rank.index, group=rank.groups[parallel.ep])
    weights = sum(tensor.nbytes for tensor in tensors(model))
    model.close()
    return weights, need(model.config, parallel, torch.float32, 16, 1).weights


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_weights_are_what_is_loaded(gloo_pool, dp, tp):
    for loaded, counted in gloo_pool.run(sizes_of_rank, dp, tp, ranks=dp * tp):
        assert counted == loaded


@pytest.mark.parametrize("overlap", ["none", "microbatch"])
def test_cache_buffers_and_activations_are_what_is_allocated(overlap):
    model = load_alone(TINYSEEK, max_tokens=24)
    counted = need(model.config, model.parallel, torch.float32, 24, 1000, overlap)
    engine = Engine(model, cache_tokens=1000, overlap=overlap)
    assert engine.cache.rows.nbytes == counted.kv_cache == 16 * counted.page
    engine.add(0, [5] * 9, Sampling(2))
    engine._admit()
    held, kept = {}, {}

    def observe(launch, state):
        kept[launch.micro_batch] = [t for t in (state.gate_up, state.act, state.expert_out) if t is not None]
        if launch.layer >= 0 and state.rows is not None:
            held[state.rows.data_ptr()] = state.rows.nbytes

    state = model.begin(build(choose(engine.running, 24), "cpu"), engine.cache.rows)
    with torch.no_grad():
        run_layers(model, state, overlap, observe)
    # Kernels make the buffers of both slots at once, this exchange each at its first use; one half's exchange ends
    # before the other's begins, so there is never a second.
    assert [2 * size for size in held.values()] == [counted.exchange]
    gate_up = counted.activations - sum(t.nbytes for parts in kept.values() for t in parts)
    assert gate_up == 16 * 24 * 2 * model.config.moe_intermediate_size * 4  # the one on its way


def test_the_arithmetic_by_hand():
    """DeepSeek-V3 over 8 ranks in bfloat16: twice the FP8 weights, so no H200 holds it."""
    counted = need(preset("deepseek-v3"), ParallelConfig(8), torch.bfloat16, 256, 5000)
    assert counted.weights == pytest.approx(2 * 102.56e9, rel=0.03)  # embedding and head are bfloat16 in either
    assert counted.kv_cache == 79 * 64 * 62 * 576 * 2
    assert counted.exchange == 2 * 32 * 8 * 256 * 7168 * 2
    assert counted.activations == 32 * 8 * 256 * (3 * 2048 + 7168 + 2 * 2048) * 2
    with pytest.raises(OutOfMemory, match=r"a rank needs 2\d\d GB \(weights 2\d\d, .* has 150 GB.*; not one request"):
        counted.check(150e9, 5000)


def test_what_fits_is_let_through_and_the_batch_named_would_fit():
    counted = Need(weights=400, kv_cache=800, exchange=40, activations=60, page=10)
    counted.check(1300 / (1 - RESERVE) + 1, kv_len=100)
    with pytest.raises(OutOfMemory, match="batch of 22 requests of 100 tokens would fit"):
        counted.check(950 / (1 - RESERVE) + 1, kv_len=100)  # 950 − 500 is 45 pages, two for each
    smaller = dataclasses.replace(counted, kv_cache=22 * 2 * 10)
    smaller.check(950 / (1 - RESERVE) + 1, kv_len=100)
    assert counted.batch(400, 100) < 0 and available_bytes("cpu", 2) <= available_bytes("cpu")


def test_a_rank_is_refused_before_it_loads(monkeypatch):
    monkeypatch.setattr(generate_rank, "available_bytes", lambda device, ranks: 10_000_000)
    monkeypatch.setattr(DeepSeek, "load", None)  # would fail if it came to that
    job = {
        "folder": str(TINYSEEK), "dp": 1, "tp": 1, "prompts": [[256] * 30], "max_tokens": 9, "step_tokens": 30,
        "overlap": "none", "draft_tokens": 0,
    }  # fmt: skip
    with pytest.raises(OutOfMemory, match="a rank needs .* GB .weights"):
        generate_rank.generate(Context(0, 1, 0, "cpu", print), job)
