"""Both ways of attention on one cache: they agree, and are what they are called."""

from __future__ import annotations

import pytest
import torch

from moelab.bench import attention_ways as bench
from moelab.config import ParallelConfig
from moelab.model.deepseek import DeepSeek
from moelab.model.mla import Attention
from moelab.results import Provenance

HERE = Provenance("cpu", 0, "", {"torch": "0"}, "0" * 40, False)
TOKENS, Q_LENS = 70, [1, 3, 64]


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return DeepSeek.load(tiny_checkpoint, ParallelConfig(), TOKENS)


def test_both_agree_and_are_timed(model):
    text = torch.randint(300, (TOKENS,)).tolist()
    found = bench.both(model, text, Q_LENS, repeats=3)
    assert [one.q_len for one in found] == Q_LENS
    for one in found:
        assert 0 <= one.difference < 1e-4 and one.same_top1 == 1
        assert {way: len(us) for way, us in one.us.items()} == {"absorbed": 3, "expanded": 3}
    records = bench.records(found, HERE, "tiny", TOKENS)
    assert [(r.params["q_len"], r.params["way"]) for r in records] == [(q, way) for q in Q_LENS for way in bench.WAYS]
    assert all(r.n == 3 and r.min > 0 and r.unit == "us" and r.params["kv_len"] == TOKENS for r in records)


def test_a_way_that_differs_is_seen(model, monkeypatch):
    """The comparison is between two computations, not of one with itself."""
    right = Attention._mha
    monkeypatch.setattr(Attention, "_mha", lambda self, *given: right(self, *given) * 1.1)
    (one,) = bench.both(model, torch.randint(300, (TOKENS,)).tolist(), [5], repeats=1)
    assert one.difference > 1e-3
