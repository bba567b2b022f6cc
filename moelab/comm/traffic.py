"""Bytes that each rank sends to other ranks, for a given routing, in each way of moving it. Exact, not modelled.

| scheme     | dispatch                                    | combine                                         |
|------------|---------------------------------------------|-------------------------------------------------|
| sparse     | a row for each (token, expert), and counts  | a row for each (token, expert), to each TP rank |
| rank       | a row for each (token, rank) with K ids and | the rank's sum for a token, to each TP rank     |
|            | weights, and counts                         |                                                 |
| padded     | a worst-case block for each pair of ranks   | likewise                                        |
| all_gather | every token to every rank                   | a partial sum of every token from every rank    |

"sparse" is `AllToAll`, also over `Dense(padded=False)`; "padded" is `Dense(padded=True)`. "rank" sends a token once
to a rank that holds several of its experts (DeepEP and others). "all_gather" needs no routing at all: the experts'
outputs come home by a reduce-scatter, counted as every rank sending its partial sum of a token to each TP rank of its
group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moelab.comm.dense import padded_bytes
from moelab.comm.spec import ExchangeSpec

SCHEMES = ("sparse", "rank", "padded", "all_gather")


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends to others in one exchange; arrays [ep]."""

    dispatch: np.ndarray
    combine: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.dispatch + self.combine


def traffic(spec: ExchangeSpec, ids_by_group: Sequence[np.ndarray]) -> dict[str, Traffic]:
    """{scheme: Traffic} for topk_ids [T_g, K] of each DP group (-1: nowhere); one entry of `SCHEMES` each."""
    ep, tp = spec.parallel.ep, spec.parallel.tp
    # rows[s, d]: (token, expert) pairs that s sends to d; tokens[s, d]: distinct tokens among them.
    rows, tokens = np.zeros((ep, ep), int), np.zeros((ep, ep), int)
    shares = np.zeros(ep, int)  # tokens that each rank would send in an all-gather
    for group, ids in enumerate(np.asarray(ids) for ids in ids_by_group):
        for token, chosen in enumerate(ids):
            source = group * tp + token % tp
            experts = np.unique(chosen[chosen >= 0])
            copies = np.bincount(experts // spec.local_experts, minlength=ep)
            rows[source] += copies
            tokens[source] += copies > 0
            shares[source] += 1
    by_group = np.arange(ep) // tp == np.arange(spec.parallel.dp)[:, None]  # [dp, ep]

    def home(sent: np.ndarray) -> np.ndarray:
        """Rows that each rank sends home, from what the ranks of each group sent it: to every TP rank but itself."""
        return ((by_group @ sent) * (tp - by_group)).sum(0)

    counts = (ep - 1) * spec.header_bytes
    remote = 1 - np.eye(ep, dtype=int)
    with_routing = spec.wire_row_bytes + 8 * spec.top_k
    sums = home(np.broadcast_to(shares[:, None], (ep, ep)))
    padded = np.full(ep, ep - 1)
    return {
        "sparse": Traffic(counts + (rows * remote).sum(1) * spec.wire_row_bytes, home(rows) * spec.output_row_bytes),
        "rank": Traffic(counts + (tokens * remote).sum(1) * with_routing, home(tokens) * spec.output_row_bytes),
        "padded": Traffic(
            padded * (padded_bytes(spec, "counts") + padded_bytes(spec, "rows")),
            padded * padded_bytes(spec, "outputs"),
        ),
        "all_gather": Traffic(shares * (ep - 1) * spec.wire_row_bytes, sums * spec.output_row_bytes),
    }
