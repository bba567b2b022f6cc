"""The three schedules in the engine: the same numbers, each stage in its place, the same exchanges on every rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from moelab.config import ConfigError, ParallelConfig
from moelab.engine.batch import build
from moelab.engine.engine import Engine
from moelab.engine.executor import run_layers
from moelab.engine.halves import cut, join, split
from moelab.engine.kv_cache import PagedCache
from moelab.engine.sequence import Sampling, Sequence
from moelab.engine.timeline import Timeline
from moelab.model.deepseek import DeepSeek
from moelab.stages import DENSE_LAYER, SCHEDULES
from tests.helpers import load_alone

SEND, RECV = ("dispatch_send", "combine_send"), ("dispatch_recv", "combine_recv")


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_alone(tiny_checkpoint, max_tokens=64)


def fresh(model, counts, pages_each=2, cached=0):
    """A cache full of NaN and the state of sequences that bring so many new tokens, on pages in no order."""
    cache = PagedCache(model.num_caches, 3 * pages_each * len(counts) + 1, model.config.latent_dim, torch.float32)
    pages = torch.randperm(cache.num_pages).tolist()
    chosen = []
    for i, count in enumerate(counts):
        sequence = Sequence(i, torch.randint(2, 320, (cached + count,)).tolist(), Sampling(1))
        sequence.pages, sequence.num_cached = pages[pages_each * i : pages_each * (i + 1)], cached
        chosen.append((sequence, count))
    return cache.rows, chosen


@pytest.mark.parametrize(
    ("q_lens", "first"),
    [
        ([], 0), ([1], 1), ([300], 1), ([1, 1], 1), ([1, 1, 1], 2), ([2] * 7, 4), ([1, 9], 1), ([9, 1], 1),
        ([1, 1, 30], 2), ([30, 1, 1], 1), ([3, 1, 2], 1), ([2, 2, 2, 2, 2, 40], 5),
    ],
)  # fmt: skip
def test_where_a_batch_is_cut(q_lens, first):
    assert cut(q_lens) == first


def test_halves_hold_each_request_whole_and_every_row_once(model):
    cache, chosen = fresh(model, [3, 1, 5, 2])
    whole = model.begin(build(chosen, "cpu"), cache)
    a, b = split(whole)
    assert (a.batch.num_tokens, b.batch.num_tokens) == (4, 7)
    assert [c.q_len for c in a.batch.chunks] == [3, 1] and [c.q_len for c in b.batch.chunks] == [5, 2]
    assert torch.equal(b.batch.chunks[0].pages, torch.tensor(chosen[2][0].pages))
    for name in ("tokens", "positions", "slots"):
        halves = torch.cat([getattr(part.batch, name) for part in (a, b)])
        assert torch.equal(halves, getattr(whole.batch, name)), name
    for name in ("cos", "sin", "residual"):
        assert torch.equal(torch.cat([getattr(part, name) for part in (a, b)]), getattr(whole, name)), name
    assert a.cache is whole.cache and b.cache is whole.cache
    a.residual, b.residual = a.residual + 1, b.residual + 2
    before = whole.residual.clone()
    join(whole, (a, b))
    assert torch.equal(whole.residual[:4], before[:4] + 1) and torch.equal(whole.residual[4:], before[4:] + 2)


@pytest.mark.parametrize("counts", [[], [4], [3, 2]])
def test_a_half_has_the_groups_way_to_attend_and_its_work(model, counts):
    cache, chosen = fresh(model, counts)
    batch = build(chosen, "cpu")
    for part in split(model.begin(batch, cache)):
        assert part.batch.has_work == bool(counts) and part.batch.absorbed == batch.absorbed


@pytest.mark.parametrize("counts", [[], [1], [1, 1], [1] * 7, [40], [17, 1, 1, 5], [2, 3, 1]])
@torch.no_grad()
def test_overlap_changes_no_result(model, counts):
    """Between none and dispatch not a bit differs. Halves have fewer rows, for which a matrix product may sum in
    another order: float32 rounding, in a stream whose deviation is about 3."""
    cache, chosen = fresh(model, counts)
    found = {}
    for overlap in SCHEDULES:
        rows = torch.full_like(cache, float("nan"))
        state = model.begin(build(chosen, "cpu"), rows)
        run_layers(model, state, overlap)
        found[overlap] = state.residual, rows
    residual, rows = found["none"]
    assert residual.isfinite().all()
    assert torch.equal(found["dispatch"][0], residual)
    torch.testing.assert_close(found["dispatch"][1], rows, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found["microbatch"][0], residual, rtol=0, atol=2e-5)
    torch.testing.assert_close(found["microbatch"][1], rows, rtol=0, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("overlap", SCHEDULES)
@pytest.mark.parametrize("num_requests", [0, 1, 5])
def test_stages_run_in_the_order_of_the_schedule(model, overlap, num_requests):
    """What was recorded in a step of the engine, beside the definition; a batch of 0 or 1 changes nothing in it."""
    engine = Engine(model, cache_tokens=1024, overlap=overlap)
    engine.timeline = Timeline()
    for i in range(num_requests):
        engine.add(i, torch.randint(2, 320, (5 + i,)).tolist(), Sampling(3))
    for _ in range(2):
        engine.step()
        spans = engine.timeline.spans()
        dense = [stage.name for stage in DENSE_LAYER]
        assert [(s.micro_batch, s.layer, s.stage) for s in spans[: len(dense)]] == [(0, -1, name) for name in dense]
        expected = [(x.micro_batch, x.layer, x.stage.name) for x in SCHEDULES[overlap](3)]
        assert [(s.micro_batch, s.layer, s.stage) for s in spans[len(dense) :]] == expected
        assert all(before.end_us == after.start_us for before, after in pairwise(spans))
        assert all(span.start_us < span.end_us for span in spans) and spans[0].start_us == 0


def test_the_shared_expert_stands_between_send_and_receive_only_with_overlap(model):
    for overlap in SCHEDULES:
        engine = Engine(model, overlap=overlap)
        engine.timeline = Timeline()
        engine.step()
        spans = engine.timeline.spans()
        for part in {span.micro_batch for span in spans}:
            names = [span.stage for span in spans if span.layer == 1 and span.micro_batch == part]
            place = {name: i for i, name in enumerate(names)}
            between = place["dispatch_send"] < place["shared_expert"] < place["dispatch_recv"]
            assert between == (overlap != "none")


def test_an_unknown_overlap_is_refused(model):
    with pytest.raises(ConfigError, match="overlap is 'best': legal are none, dispatch, microbatch"):
        Engine(model, overlap="best")


def text_and_exchanges(rank, folder: str, dp: int, tp: int, overlap: str, prompts: list[list[list[int]]]):
    """(output of each request, steps, the halves of exchanges in order, hidden states of the first step)."""
    parallel = ParallelConfig(dp, tp)
    model = DeepSeek.load(folder, parallel, 32, rank=rank.index, group=rank.groups[parallel.ep])
    engine = Engine(model, cache_tokens=1024, overlap=overlap)
    engine.timeline = Timeline()
    mine = prompts[parallel.dp_group(rank.index)]
    requests = [engine.add(i, prompt, Sampling(4 + 2 * i)) for i, prompt in enumerate(mine)]
    first, finish = [], model.finish
    model.finish = lambda state: first.append(finish(state)) or first[-1]
    steps, halves = 0, []
    while not engine.all_idle:
        engine.step()
        halves += [(s.micro_batch, s.layer, s.stage) for s in engine.timeline.spans() if s.stage in SEND + RECV]
        steps += 1
    model.close()
    return [request.output for request in requests], steps, halves, first[0]


# Attention cut by heads needs ranks in torch.distributed.
@pytest.mark.parametrize(("kind", "dp", "tp"), [("virtual", 4, 1), ("gloo", 4, 1), ("gloo", 2, 2)])
def test_ranks_with_0_1_odd_and_even_batches_agree_in_every_mode(pools, tiny_checkpoint, kind, dp, tp):
    """Groups of 0, 1, 3 and 4 requests, of which one's prompt fills steps alone: all ranks make the same exchanges in
    the same order, in as many steps, and write what they write without overlap."""
    sizes = (0, 1, 3, 4)[-dp:] if tp == 1 else (1, 3)
    lengths = iter([40, 3, 17, 1, 5, 9, 2, 33])
    prompts = [[torch.randint(2, 320, (next(lengths),)).tolist() for _ in range(n)] for n in sizes]
    ranks, found = pools(kind), {}
    for overlap in SCHEDULES:
        results = ranks.run(text_and_exchanges, str(tiny_checkpoint), dp, tp, overlap, prompts, ranks=dp * tp)
        assert len({steps for _, steps, _, _ in results}) == 1
        assert all(halves == results[0][2] for _, _, halves, _ in results)
        micro_batches = 2 if overlap == "microbatch" else 1
        assert len(results[0][2]) == results[0][1] * micro_batches * 3 * 4  # three MoE layers, four halves
        found[overlap] = results
    for overlap in ("dispatch", "microbatch"):
        for rank, (ours, plain) in enumerate(zip(found[overlap], found["none"], strict=True)):
            assert ours[0] == plain[0] and ours[1] == plain[1], (overlap, rank)
            atol = 0 if overlap == "dispatch" else 2e-5
            torch.testing.assert_close(ours[3], plain[3], rtol=0, atol=atol)
