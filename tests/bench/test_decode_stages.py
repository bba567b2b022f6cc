"""Stages alone: every one of them, over every layer, on what the step left; and the clock they are taken by."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from moelab.bench import decode_engine, decode_rank, decode_stages, decode_timer
from moelab.bench.decode_setting import PACKAGED
from moelab.bench.decode_stages import EXCHANGE, parts, watch
from moelab.bench.decode_timer import Ranks, split_calls, time_calls
from moelab.config import ParallelConfig
from moelab.engine.engine import Engine
from moelab.engine.executor import run_layer, run_moe_layers
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from moelab.stages import DENSE_LAYER, MOE_LAYER
from tests.bench.test_decode import SETTING, halves_together

BATCH = 3
ALONE = Ranks(torch.device("cpu"), 1)


@pytest.fixture(scope="module")
def model():
    return DeepSeek.load(PACKAGED, ParallelConfig(), 16, arithmetic=BlockFp8())


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def begun(model, overlap):
    """(engine, its step, filled, the state that enters the layers)."""
    engine = Engine(model, BATCH * 128, overlap, 1, batch_sizes=[BATCH], capture=False)
    decode_rank.fill(engine.cache.rows, 0)
    step = engine.graphs.step(BATCH)
    step.fill(decode_rank.requests(model.config.vocab_size, BATCH, replace(SETTING, overlap=overlap)))
    return engine, step, model.begin(step.batch, engine.cache.rows)


@pytest.mark.parametrize("overlap", ["none", "dispatch", "microbatch"])
def test_every_stage_of_every_layer_is_in_one_part(model, overlap):
    _, _, state = begun(model, overlap)
    found = parts(model, watch(model, state, overlap), overlap)
    halves = 2 if overlap == "microbatch" else 1
    for of, stages in (("moe", MOE_LAYER), ("dense", DENSE_LAYER)):
        names = [part.name for part in found if of in part.of]
        exchange = {"dispatch", "combine"} if of == "moe" else set()
        assert len(names) == len(set(names))
        assert set(names) == halves_together(stages) - {"tp_reduce"} - exchange | ({EXCHANGE} if exchange else set())
    for part in found:
        per_layer = {("moe",): halves, ("dense",): 1, ("dense", "moe"): 1}[part.of]
        wanted = per_layer * part.layers * (2 if part.name == EXCHANGE else 1)
        assert len(part.calls) == wanted, part.name
        assert part.layers in (1, 4, 5) and part.category == decode_stages.CATEGORY.get(part.name, "")


@pytest.mark.parametrize("overlap", ["none", "microbatch"])
def test_a_stage_alone_does_what_it_did_in_the_step(model, overlap):
    """For the last layer, whose states are kept; and each layer works on its own experts' rows."""
    _, _, state = begun(model, overlap)
    seen = watch(model, state, overlap)
    by_name = {part.name: part for part in parts(model, seen, overlap) if "moe" in part.of}
    last = slice(-2, None) if overlap == "microbatch" else slice(-1, None)
    after = {
        "gate_up": "silu_mul_quant",
        "down": "combine_send",
        "bmm_k": "mla",
        "mla": "bmm_v",
        "gate": "combine_send",
    }
    written = {
        "gate_up": "gate_up",
        "down": "expert_out",
        "bmm_k": "q_latent",
        "mla": "context",
        "gate": "topk_weights",
    }
    for name, next_stage in after.items():
        for micro, call in enumerate(by_name[name].calls[last]):
            then = getattr(seen.states["moe", micro, next_stage], written[name])
            again = getattr(call(), written[name])
            populated = seen.own[3, micro]["counts"]
            if name == "gate_up" and overlap == "microbatch" and micro == 0:
                continue  # the other half's rows have come to the same place since
            if name in ("gate_up", "down"):  # what lies beyond the counts is nobody's
                for expert, count in enumerate(populated.tolist()):
                    assert torch.equal(again[expert, :count], then[expert, :count])
            else:
                assert torch.equal(again, then), name
    # rows of other layers: their counts, not the last layer's
    counts = [own["counts"] for own in seen.own.values()]
    assert any(not torch.equal(counts[0], other) for other in counts[1:])
    for call, own in zip(by_name["gate_up"].calls, seen.own.values(), strict=True):
        assert torch.equal(call().counts, own["counts"])
    assert sum(int(c.sum()) for pair in seen.counts(4) for c in pair) == 4 * BATCH * 2 * 4


@pytest.mark.parametrize("overlap", ["none", "microbatch"])
def test_all_layers_of_a_kind_run_as_in_the_step_again_and_again(model, overlap):
    _, step, state = begun(model, overlap)
    seen = watch(model, state, overlap)
    hidden = model.finish(replace(state))
    for _ in range(2):
        dense = seen.enter("dense")
        for layer in model.dense_layers:
            run_layer(layer, dense)
        moe = seen.enter("moe")
        assert torch.equal(dense.residual, moe.residual) and len(dense.update) == len(moe.update)
        run_moe_layers(model.moe_layers, moe, overlap)
        assert torch.equal(model.finish(moe), step.run().hidden) and torch.equal(step.run().hidden, hidden)


def test_exchanges_alone_leave_no_handle_behind_and_the_step_as_it_was(model):
    engine, step, state = begun(model, "dispatch")
    before = step.run().hidden.clone()
    seen = watch(model, state, "dispatch")
    for part in parts(model, seen, "dispatch"):
        for _ in range(3):
            part.run()
    (exchange,) = (part for part in parts(model, seen, "dispatch") if part.name == EXCHANGE)
    shares = split_calls(exchange.pairs, ALONE, captured=False)
    assert sum(shares) == pytest.approx(1) and min(shares) > 0
    assert torch.equal(step.run().hidden, before)
    assert torch.equal(engine.graphs.step(BATCH).run().hidden, before)


def test_requests_and_the_cache_are_filled(model):
    engine, step, _ = begun(model, "none")
    assert engine.cache.rows.isfinite().all() and 0.9 < engine.cache.rows.float().std() < 1.1
    pieces = decode_rank.requests(model.config.vocab_size, 7, SETTING)
    pages = [page for piece in pieces for page in piece.sequence.pages]
    assert sorted(pages) == list(range(14)) != pages  # two each for 70 tokens, in no order
    assert {(piece.start, len(piece.tokens)) for piece in pieces} == {(68, 2)}
    assert step.run().hidden.isfinite().all()


def test_the_engine_steps_on_its_own(model, monkeypatch):
    engine, step, _ = begun(model, "none")
    pieces = decode_rank.requests(model.config.vocab_size, BATCH, SETTING)
    monkeypatch.setattr(decode_engine, "WARMUP", 2)
    seen, run = [], engine.step

    def watched():
        seen.append([(len(s.tokens), s.num_cached, list(s.pages)) for s in engine.running])
        return run()

    monkeypatch.setattr(engine, "step", watched)
    taken = decode_engine.engine_steps(engine, pieces, SETTING.kv_len, steps=5)
    assert len(seen) == 7 and 0 < len(taken) <= 5 and min(taken) > 0 and engine.running == []
    assert [pages for _, _, pages in seen[0]] == [piece.sequence.pages for piece in pieces]
    lengths = [length for requests in seen for length, _, _ in requests]
    assert min(lengths) == 70 - 8 * 2 and max(lengths) + engine.q_len <= 70  # rows behind the last fit on the pages
    assert all(cached == length - 1 for requests in seen for length, cached, _ in requests)
    assert decode_engine.engine_steps(engine, pieces, 17, steps=6) == []


def test_two_drafts_have_passes_of_two_shapes(model):
    engine = Engine(model, BATCH * 128, "none", 2, batch_sizes=[BATCH], capture=False)
    setting = replace(SETTING, draft_tokens=2)
    got = []
    run = decode_rank._Run(setting, engine, BATCH, ALONE, lambda *taken: got.append(taken))
    run.time_step()
    assert [(metric, params) for metric, params, *_ in got] == [
        ("step", {}), ("draft", {"of": "first"}), ("draft", {"of": "next"}),
    ]  # fmt: skip
    assert run.drafts["first"].places.q_len == 3 and run.drafts["next"].places.q_len == 1


@pytest.mark.parametrize("overlap", ["none", "microbatch"])
def test_what_is_timed_by_graphs(model, overlap, monkeypatch):
    """The way of a GPU, where a graph is its body: every stage of both kinds of layer, and what stands beside them."""
    monkeypatch.setitem(decode_timer.CALLS, "cpu", (1, 1))
    setting = replace(SETTING, overlap=overlap)
    object.__setattr__(setting, "graph", True)
    engine = Engine(model, BATCH * 128, overlap, 1, batch_sizes=[BATCH], capture=False)
    decode_rank.fill(engine.cache.rows, 0)
    got, told = [], []
    run = decode_rank._Run(setting, engine, BATCH, ALONE, lambda *taken: got.append(taken))
    run.time_parts(lambda done, total: told.append((done, total)))
    stages = {(params["of"], params["stage"]): samples for metric, params, *_, samples in got if metric == "stage"}
    wanted = {("step", name) for name in ("embed", "final_norm", "head")}
    for of, layer in (("moe", MOE_LAYER), ("dense", DENSE_LAYER)):
        wanted |= {(of, name) for name in halves_together(layer) - {"tp_reduce"}}
    assert set(stages) == wanted and all(min(samples.us) > 0 for samples in stages.values())
    assert {params["of"] for metric, params, *_ in got if metric == "layer"} == {"moe", "dense"}
    rows = next(samples.us for metric, *_, samples in got if metric == "rows")
    assert rows == [BATCH * 2 * 4] * 4
    assert {clock for metric, _, _, clock, _ in got if metric in ("stage", "layer")} == {"graph"}
    assert [done for done, _ in told[:-1]] == list(range(len(told) - 1)) and told[-1] == (1, 1)


def test_an_fp8_cache_is_filled(model):
    engine = Engine(model, 256, batch_sizes=[1], capture=False, cache_dtype=torch.float8_e4m3fn)
    decode_rank.fill(engine.cache.rows, 3)
    values = torch.cat([(c.values.float() * c.scales[0, 0, 0]).flatten() for c in engine.cache.rows])
    assert values.isfinite().all() and 0.9 < values.std() < 1.1
    assert all(c.rope.isfinite().all() and c.scales.isfinite().all() for c in engine.cache.rows)


def test_how_often_a_call_is_timed(monkeypatch):
    monkeypatch.setattr(decode_timer, "TIMED_US", 40e3)
    calls = []

    def call() -> None:
        calls.append(time.perf_counter())
        time.sleep(2e-3)

    samples = time_calls(call, ALONE)
    assert 3 <= len(samples.us) <= 15 and len(calls) == len(samples.us) + samples.warmup
    assert min(samples.us) >= 2000
    assert len(time_calls(call, ALONE, share=1e-6).us) == 3


def test_what_two_calls_share():
    first, second = (lambda s=s: time.sleep(s) for s in (2e-3, 6e-3))
    shares = split_calls([(first, second)] * 3, ALONE, captured=False)
    assert shares[0] == pytest.approx(0.25, abs=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("overlap", ["none", "dispatch", "microbatch"])
def test_on_a_gpu_by_graphs(overlap, tmp_path, monkeypatch):
    """tinyseek: all parts captured, the step's ratio to them, and the memory measured beside what was foreseen."""
    from moelab.bench import decode
    from moelab.results import collect

    setting = replace(SETTING, overlap=overlap, device="cuda", graph=True, batches=(1, 3))
    events, said = [], {}
    decode.run(setting, lambda rank, event: events.append((rank, event)), said.update)
    found = decode.collect(events, setting, said, collect("cuda", gpu_count=1))
    assert [one.batch for one in found] == [1, 3]
    for one in found:
        assert {record.clock for record in one.records} == {"graph", "none"}
        for of, stages in (("moe", MOE_LAYER), ("dense", DENSE_LAYER)):
            named = {stage for kind in one.stages(of).values() for stage in kind}
            assert named == halves_together(stages) - {"tp_reduce"}
        assert set(one.stages("step")) == {"GEMM", "norm", "other"}
        assert one.p50("step_over_stages") > 0.3 and one.p50("draft", of="first") > 0
    memory = found[-1].memory()
    assert set(memory) == {"weights", "exchange", "KV cache", "activations", "total"}
    for part in ("weights", "KV cache"):
        assert memory[part]["measured"] == memory[part]["foreseen"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_stages_of_eager_steps_are_timed_by_events():
    from moelab.bench import decode
    from moelab.results import collect

    setting = replace(SETTING, device="cuda", graph=False, batches=(2,), kv_dtype="fp8")
    events, said = [], {}
    decode.run(setting, lambda rank, event: events.append((rank, event)), said.update)
    (one,) = decode.collect(events, setting, said, collect("cuda", gpu_count=1))
    assert {record.clock for record in one.records} == {"event", "none"}
    assert one.stages("moe")["MLA"]["mla"] > 0
