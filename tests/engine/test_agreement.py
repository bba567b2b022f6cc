"""Ranks of one deployment with settings that differ: every rank says so, before anything waits for anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moelab.config import ConfigError, ParallelConfig
from moelab.engine.engine import Engine
from moelab.engine.sequence import Sampling
from moelab.model.deepseek import DeepSeek

TINYSEEK = Path(__file__).parents[2] / "moelab" / "data" / "tinyseek"
RANKS = 4
SETTINGS = dict(overlap="none", draft_tokens=0, batch_sizes=(), capture=False)


def generate(rank, odd: dict) -> str | list[int]:
    """What the last rank's other settings come to on this rank: the text, or the error."""
    settings = SETTINGS | (odd if rank.index == RANKS - 1 else {})
    model = DeepSeek.load(TINYSEEK, ParallelConfig(RANKS), 8, rank=rank.index, group=rank.groups[RANKS])
    try:
        engine = Engine(model, 256, **settings)
        request = engine.add(0, [256, 105, 102], Sampling(3))
        for _ in engine.run():
            pass
    except ConfigError as error:
        return str(error)
    finally:
        model.close()
    return request.output


@pytest.mark.parametrize("kind", ["gloo", "virtual"])
@pytest.mark.parametrize(
    ("odd", "ours", "other"),
    [
        (dict(overlap="dispatch"), "'none'", "'dispatch'"),
        (dict(draft_tokens=1), "0", "1"),
        (dict(batch_sizes=(2, 1)), "[]", "[1, 2]"),
        (dict(capture=True), "False", "True"),
    ],
)
def test_what_differs_is_named_on_every_rank(pools, kind, odd, ours, other):
    (name,) = odd
    results = pools(kind).run(generate, odd, ranks=RANKS)
    said = re.compile(rf"{name} is (.+) on rank (\d) but (.+) on rank (\d): give every rank the same")
    for rank, result in enumerate(results):
        found = isinstance(result, str) and said.fullmatch(result)
        assert found, results
        values = {int(found[2]): found[1], int(found[4]): found[3]}
        assert values.pop(RANKS - 1) == other and list(values.values()) == [ours]
        assert kind == "virtual" or int(found[2]) == rank


@pytest.mark.parametrize("kind", ["gloo", "virtual"])
def test_ranks_that_agree_write(pools, kind):
    results = pools(kind).run(generate, {}, ranks=RANKS)
    assert all(len(result) == 3 and result == results[0] for result in results)
