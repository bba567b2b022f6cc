"""What is counted before allocating is what is allocated, and what does not fit is refused with the arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moelab.config import ParallelConfig, preset
from moelab.engine.batch import build, choose
from moelab.engine.engine import Engine
from moelab.engine.executor import run_layers
from moelab.engine.kv_cache import pages_for
from moelab.engine.memory import (
    RESERVE,
    Need,
    OutOfMemory,
    attention_bytes,
    available_bytes,
    expert_bytes,
    largest_batch,
    need,
)
from moelab.engine.sequence import Sampling
from moelab.launch import generate_rank
from moelab.launch.worker import Context
from moelab.model.arithmetic import Plain
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from tests.engine.test_distributed import TINYSEEK
from tests.helpers import load_alone


def tensors(thing, seen=None):
    """All tensors in a tree of dataclasses and lists, each once."""
    seen = {} if seen is None else seen
    if isinstance(thing, torch.Tensor):
        seen[thing.data_ptr(), thing.shape] = thing
    elif isinstance(thing, list | tuple):
        [tensors(part, seen) for part in thing]
    elif dataclasses.is_dataclass(thing) and type(thing).__module__.startswith("moelab.model"):
        [tensors(getattr(thing, field.name), seen) for field in dataclasses.fields(thing)]
    return seen.values()


def sizes_of_rank(rank, dp: int, tp: int, kind: str) -> tuple[int, int]:
    parallel = ParallelConfig(dp, tp)
    arithmetic = BlockFp8() if kind == "fp8" else Plain(torch.float32)
    where = dict(rank=rank.index, group=rank.groups[parallel.ep], arithmetic=arithmetic)
    model = DeepSeek.load(TINYSEEK, parallel, 16, **where)
    weights = sum(tensor.nbytes for tensor in tensors(model))
    model.close()
    return weights, need(model.config, parallel, arithmetic, 16, 1).weights


@pytest.mark.parametrize("kind", ["float32", "fp8"])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_weights_are_what_is_loaded(gloo_pool, dp, tp, kind):
    for loaded, counted in gloo_pool.run(sizes_of_rank, dp, tp, kind, ranks=dp * tp):
        assert counted == loaded


def test_a_dtype_is_plain_arithmetic_in_it():
    tinyseek = preset("tinyseek")
    counted = need(tinyseek, ParallelConfig(2, 2), Plain(torch.bfloat16), 16, 100)
    assert counted == need(tinyseek, ParallelConfig(2, 2), torch.bfloat16, 16, 100)
    assert counted.weights * 2 > need(tinyseek, ParallelConfig(2, 2), torch.float32, 16, 100).weights > counted.weights


def bytes_of(rows) -> int:
    """Of a tensor, or of FP8 rows with what their scales take up."""
    if isinstance(rows, torch.Tensor):
        return rows.nbytes
    values, scales, *_ = rows
    return values.nbytes + scales.untyped_storage().nbytes()


@pytest.mark.parametrize("arithmetic", [Plain(torch.float32), BlockFp8()], ids=["float32", "fp8"])
@pytest.mark.parametrize("overlap", ["none", "microbatch"])
def test_cache_buffers_and_activations_are_what_is_allocated(overlap, arithmetic):
    model = load_alone(TINYSEEK, max_tokens=24, arithmetic=arithmetic)
    counted = need(model.config, model.parallel, arithmetic, 24, 1000)
    engine = Engine(model, cache_tokens=1000, overlap=overlap)
    assert engine.cache.rows.nbytes == counted.kv_cache == 16 * counted.page
    engine.add(0, [5] * 9, Sampling(2))
    engine._admit()
    held, sizes, together = {}, {}, []

    def observe(launch, state):
        kept = {
            name: bytes_of(t) for name in ("gate_up", "act", "expert_out") if (t := getattr(state, name)) is not None
        }
        if launch.layer >= 0 and state.rows is not None:
            values = state.rows if isinstance(state.rows, torch.Tensor) else state.rows.values
            held[values.data_ptr()] = bytes_of(state.rows)
        if launch.layer >= 0 and launch.stage.step >= 4 and launch.stage.name != "dispatch_recv":
            sizes.update(kept)
            together.append(len(kept))

    state = model.begin(build(choose(engine.running, 24), "cpu"), engine.cache.rows)
    with torch.no_grad():
        run_layers(model, state, overlap, observe)
    # Kernels make the buffers of both slots at once, this exchange each at its first use; one half's exchange ends
    # before the other's begins, so there is never a second.
    assert [2 * size for size in held.values()] == [counted.exchange]
    if isinstance(arithmetic, BlockFp8):  # the output stands where gate_up did
        sizes["gate_up"] = max(sizes["gate_up"], sizes.pop("expert_out"))
        assert model.scratch.nbytes == counted.activations
    assert sum(sizes.values()) == counted.activations and len(sizes) >= 2
    assert set(together) == {0, 1}  # each goes as soon as it is read


def test_the_arithmetic_by_hand():
    """DeepSeek-V3 over 8 ranks in bfloat16: twice the FP8 weights, so no H200 holds it."""
    counted = need(preset("deepseek-v3"), ParallelConfig(8), torch.bfloat16, 256, 5000)
    assert counted.weights == pytest.approx(2 * 102.56e9, rel=0.03)  # embedding and head are bfloat16 in either
    assert counted.kv_cache == 79 * 64 * 62 * 576 * 2
    assert counted.exchange == 2 * 32 * 8 * 256 * 7168 * 2
    assert counted.activations == 32 * 8 * 256 * (3 * 2048 + 7168) * 2
    with pytest.raises(OutOfMemory, match=r"a rank needs 2\d\d GB \(weights 2\d\d, .* has 150 GB.*; not one request"):
        counted.check(150e9, 5000)


def test_the_arithmetic_by_hand_in_fp8():
    """DeepSeek-V3 over 8 ranks as it is served; weights by the published count, and their scales."""
    model, ranks = preset("deepseek-v3"), ParallelConfig(8)
    counted = need(model, ranks, BlockFp8(), 256, 5000, window_bytes=10, attention=attention_bytes(
        model, ranks, BlockFp8(), 256
    ))  # fmt: skip
    linear = 102.56e9 - 2 * 2 * 129280 * 7168  # without embedding and head, to 0.03 % the scales' part
    assert counted.weights == pytest.approx(102.56e9 + linear * 4 / 128**2 + 2 * 7168**2, rel=3e-4)  # eh_proj in BF16
    assert counted.exchange == 2 * 32 * (8 * 256 * (7168 + 4 * 56)) + 10
    assert counted.activations == 32 * 8 * 256 * (2048 + 4 * 16 + 2 * 7168)  # 2·7168 > 2·(2·2048)
    assert counted.attention == 256 * 2 * (128 * (192 + 3 * 512 + 128) + 2 * 18432 + 8 * 7168)
    assert counted.total == sum(counted.parts.values()) and counted.kv_cache == 79 * 64 * 62 * 576 * 2
    eight = need(model, ranks, BlockFp8(), 256, 5000, kv_dtype="fp8")
    assert eight.kv_cache * 1152 == counted.kv_cache * 656


class Blocks:
    """A pool that gives out the smallest free block that is large enough, cut where more than 1 MiB is left over, and
    joins what comes back with free neighbours; torch's way with blocks of megabytes."""

    def __init__(self) -> None:
        self.free, self.segments, self.reserved = [], 0, 0  # (size, segment, start)

    def take(self, size: int) -> tuple[int, int, int]:
        fitting = [block for block in self.free if block[0] >= size]
        if fitting:
            self.free.remove(whole := min(fitting))
        else:
            whole = (-(-size // (2 << 20)) * (2 << 20), self.segments, 0)
            self.segments, self.reserved = self.segments + 1, self.reserved + whole[0]
        room, segment, start = whole
        if room - size > 1 << 20:
            self.free.append((room - size, segment, start + size))
            room = size
        return room, segment, start

    def give(self, block: tuple[int, int, int]) -> None:
        size, segment, start = block
        for other in [free for free in self.free if free[1] == segment]:
            if other[2] + other[0] == start or start + size == other[2]:
                self.free.remove(other)
                size, start = size + other[0], min(start, other[2])
        self.free.append((size, segment, start))


@pytest.mark.parametrize(("ranks", "max_tokens"), [(8, 224), (8, 16), (128, 256)])
def test_what_a_pool_of_blocks_reserves(ranks, max_tokens):
    """Layers of a step, either half's in turn: a value is made before the one it is made of is given back."""
    config, parallel = preset("deepseek-v3"), ParallelConfig(ranks)
    rows, width = 256 // ranks * ranks * max_tokens, config.moe_intermediate_size
    pool, before = Blocks(), None
    for _ in range(20):
        for size in (2 * width, width, config.hidden_size):
            made = pool.take(rows * size * 2)
            if before is not None:
                pool.give(before)
            before = made
        pool.give(before)
        before = None
    counted = need(config, parallel, Plain(torch.bfloat16), max_tokens, 64).activations
    assert counted == pytest.approx(pool.reserved, rel=0.02)
    assert counted == 256 // ranks * expert_bytes(config, Plain(torch.bfloat16), ranks * max_tokens)


def test_the_largest_batch_fits_and_the_next_does_not():
    def needs(batch: int) -> Need:
        return need(preset("deepseek-v3"), ParallelConfig(8), BlockFp8(), 2 * batch, batch * pages_for(5000) * 64)

    for capacity, reserve in ((150e9, 0.005), (141e9, 0.07), (102e9, 0.0), (104e9, 0.0)):
        batch = largest_batch(needs, capacity, reserve)
        assert not needs(batch + 1).fits(capacity, reserve) and (batch == 0 or needs(batch).fits(capacity, reserve))
        if batch < 200:
            with pytest.raises(OutOfMemory, match=f"batch of {batch} requests" if batch else "not one request"):
                needs(200).check(capacity, 5000, reserve, batch)
    assert largest_batch(needs, 102e9, 0.0) == 0 and largest_batch(needs, 150e9, 0.005) > 100


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
