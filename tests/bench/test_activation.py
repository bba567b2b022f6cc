"""Activated experts are counted over one token of each sequence."""

from __future__ import annotations

import torch

from moelab.bench import activation
from moelab.results import Provenance

HERE = Provenance("cpu", 0, "", {"torch": "0"}, "0" * 40, False)


def test_counts():
    # Four sequences, one layer, positions 0 (left out) and 1; experts {0,1} {1,2} {3,4} {3,4}.
    chosen = torch.tensor([[[[9, 9], a]] for a in ([0, 1], [1, 2], [3, 4], [4, 3])])
    one, two, four = activation.records(list(chosen), [1, 2, 4], HERE, "by hand")
    assert (one.n, one.min, one.p99) == (4, 2, 2)
    assert two.n == 2 and two.min == 2 and two.p50 == 2.5
    assert (four.n, four.p50, four.params["tokens"]) == (1, 5, 4)
