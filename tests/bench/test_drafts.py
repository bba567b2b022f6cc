"""Drafts on text: the greedy text does not change, counts are the engine's, and a turn is timed whole or not at all."""

from __future__ import annotations

import pytest

from moelab.bench import drafts as bench
from moelab.bench.timer import BenchError
from moelab.config import ModelConfig, ParallelConfig
from moelab.engine.routing import heldout_windows
from moelab.launch.generate import find_model
from moelab.model.deepseek import DeepSeek
from moelab.model.tokenizer import Tokenizer
from moelab.results import Provenance

HERE = Provenance("cpu", 0, "", {"torch": "0"}, "0" * 40, False)
REQUESTS, NEW = 3, 16


@pytest.fixture(scope="module")
def model():
    return DeepSeek.load(find_model("tinyseek"), ParallelConfig(), 96)


@pytest.fixture(scope="module")
def prompts():
    folder = find_model("tinyseek")
    return heldout_windows(Tokenizer(folder, ModelConfig.from_hf(folder).bos_token_id), REQUESTS, 24)


def test_greedy(model, prompts):
    found = bench.drafted(model, prompts, NEW, [0, 1, 2], warmup=1)
    assert all(one.texts == found[0].texts for one in found) and all(len(text) == NEW for text in found[0].texts)
    assert len({len(one.us) for one in found}) == 1  # turns in which all engines decoded
    assert set(found[0].tokens) == {REQUESTS} and not found[0].tried
    for one in found[1:]:
        assert len(one.tried) == one.draft_tokens and one.acceptance[0] > 0.6  # a trained layer
        assert REQUESTS <= min(one.tokens) and max(one.tokens) <= REQUESTS * (1 + one.draft_tokens)
        assert all(a <= t for a, t in zip(one.accepted, one.tried, strict=True))
        # Every token but a request's first comes from a step: its own, or a draft that was accepted.
        assert sum(one.accepted) < REQUESTS * NEW


def test_records(model, prompts):
    found = bench.drafted(model, prompts, NEW, [1], temperature=1.0, warmup=1)
    records = bench.records(found, HERE, "tinyseek", REQUESTS, 1.0)
    assert [r.metric for r in records] == ["step", "tokens", "acceptance"]
    step, tokens, accepted = records
    assert step.n == len(found[0].us) and step.params["temperature"] == 1.0 and step.unit == "us"
    assert 1 <= tokens.p50 <= 2 and tokens.p50 == pytest.approx(sum(found[0].tokens) / len(found[0].tokens) / REQUESTS)
    assert accepted.p50 == found[0].accepted[0] / found[0].tried[0]
    assert (accepted.params["depth"], accepted.params["tried"]) == (1, found[0].tried[0])
    (error,) = found[0].standard_errors
    a = accepted.p50
    assert error == pytest.approx((a * (1 - a) / found[0].tried[0]) ** 0.5)


def test_without_a_turn_to_time_it_says_so(model, prompts):
    with pytest.raises(BenchError, match="no step was timed in which all 3 requests decode"):
        bench.drafted(model, prompts, 3, [2])
