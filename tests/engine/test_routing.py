"""Captured routing is what the router chose, whatever the pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moelab.config import MoelabError, ParallelConfig
from moelab.engine.routing import capture_routing, heldout_windows, rows_sent
from moelab.ops.router import route
from tests.helpers import load_alone


def test_pieces_do_not_matter(tiny_checkpoint):
    tokens = torch.randint(0, 320, (3, 50)).tolist()
    whole, pieces = load_alone(tiny_checkpoint, 64), load_alone(tiny_checkpoint, 16)
    found = capture_routing(whole, tokens)
    assert [ids.shape for ids in found] == [(3, 50, 4)] * 3
    for ids, again in zip(found, capture_routing(pieces, tokens), strict=True):
        assert torch.equal(ids, again)
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all() and ids.min() >= 0 and ids.max() < 16


def test_first_layer_by_hand(tiny_checkpoint, monkeypatch):
    """The ids are those that `route` returned, in order."""
    returned = []

    def spy(*args, **kwargs):
        ids, weights = route(*args, **kwargs)
        returned.append(ids)
        return ids, weights

    monkeypatch.setattr("moelab.model.arithmetic.route", spy)
    (ids,) = capture_routing(load_alone(tiny_checkpoint, 64), [torch.randint(0, 320, (20,)).tolist()])
    assert torch.equal(ids, torch.stack(returned))


def test_windows():
    class Bytes:
        def encode(self, text: str) -> list[int]:
            return [256, *text.encode()]

    windows = heldout_windows(Bytes(), 5, 40)
    assert [len(w) for w in windows] == [40] * 5 and all(w[0] == 256 for w in windows)
    assert len({tuple(w) for w in windows}) == 5
    with pytest.raises(MoelabError, match="too few for 100000 tokens"):
        heldout_windows(Bytes(), 5, 100_000)


def test_rows_sent():
    ids = [np.array([[0, 1], [1, 2], [3, -1]]), np.array([[2, 3]])]  # two groups of two ranks
    sent = rows_sent(ParallelConfig(2, 2), 4, ids)
    assert sent.tolist() == [[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
