"""What an exchange must do, said in loops: the oracle of the tests, sharing no arithmetic with what it judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moelab.comm.spec import ExchangeSpec


def expected_rows(spec: ExchangeSpec, rank: int, ids_by_group: Sequence[Tensor]) -> list[list[tuple[int, int]]]:
    """For each local expert of `rank`, its rows in order as (DP group, token). ids_by_group: [T_g, K] for each group.

    A token that names an expert twice has one row there.
    """
    first = rank * spec.local_experts
    rows: list[list[tuple[int, int]]] = [[] for _ in range(spec.local_experts)]
    for group, ids in enumerate(ids_by_group):
        for token, chosen in enumerate(ids.tolist()):
            for expert in range(first, first + spec.local_experts):
                if expert in chosen:
                    rows[expert - first].append((group, token))
    return rows


def dense_moe(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """out[t] = Σ_k w[t, k] · expert(id[t, k], x[t]) in float64, without any exchange; -1 adds nothing.

    x [T, H] any float dtype; `expert(e, row [H] as given)` returns [H], as the expert side would hand it to combine.
    """
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(topk_ids.tolist()):
        for k, e in enumerate(chosen):
            if e >= 0:
                out[token] += topk_weights[token, k].double() * expert(e, x[token]).double()
    return out


def rounding_bound(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The most by which a float32 sum may differ from `dense_moe`, element by element: (K + 1)·2^-24·Σ|w·y|.

    Each of K products and K - 1 additions rounds once, relative 2^-24, of partial sums no larger than Σ|w·y| (Higham,
    Accuracy and Stability of Numerical Algorithms, 3.1). The rounding to the output's dtype comes on top.
    """

    def magnitude(e: int, row: Tensor) -> Tensor:
        return expert(e, row).double().abs()

    return (topk_ids.shape[1] + 1) * 2.0**-24 * dense_moe(x, topk_ids, topk_weights.abs(), magnitude)
