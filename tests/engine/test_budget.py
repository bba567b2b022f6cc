"""A budget of multiprocessors of an engine: its construction and its steps are within it, and nothing else is."""

from __future__ import annotations

import pytest

from moelab.config import ConfigError
from moelab.engine import engine as module
from moelab.engine.decode import DecodeStep
from moelab.engine.engine import Engine
from moelab.ops.multiprocessors import at_most, budget
from tests.conftest import SEED
from tests.engine.test_speculative import checkpoint_with_mtp, random_prompts, texts
from tests.helpers import load_alone


def test_what_an_engine_makes_and_runs_is_within_its_budget(tmp_path, monkeypatch):
    """Also of two engines in turn, drafts and all; the text is the same."""
    model = load_alone(checkpoint_with_mtp(tmp_path, SEED), max_tokens=64)
    seen = []

    def spied(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: seen.append((name, budget())) or real(*a, **k))

    spied(module, "decode_for")
    spied(module, "run_model")
    spied(DecodeStep, "run")
    prompts = random_prompts(5, 9, 3)
    options = dict(draft_tokens=2, batch_sizes=(1, 3))
    plain, *_ = texts(model, prompts, [12, 7, 9], **options)
    assert {count for _, count in seen} == {None}
    seen.clear()
    fewer, engine, _ = texts(model, prompts, [12, 7, 9], **options, compute_sms=5)
    assert fewer == plain and budget() is None
    assert {name for name, _ in seen} == {"decode_for", "run_model", "run"} and {count for _, count in seen} == {5}
    seen.clear()
    with at_most(9, "cpu"):
        engine.step()
        assert budget() == 9
    assert {count for _, count in seen} == {5}
    seen.clear()
    Engine(model, cache_tokens=1024, compute_sms=7, batch_sizes=(1,))
    assert {count for _, count in seen} == {7}
    with pytest.raises(ConfigError, match="compute_sms is -1: legal are 1 or more"):
        Engine(model, cache_tokens=1024, compute_sms=-1)
