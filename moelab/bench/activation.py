"""How many experts a step of real tokens wakes, as Records; the model's guess is `moelab.perf.experts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moelab.results import Provenance, Record

if TYPE_CHECKING:
    from torch import Tensor

BENCH = "activated_experts"


def records(ids: Sequence[Tensor], tokens: Sequence[int], provenance: Provenance, model: str) -> list[Record]:
    """One Record for each of `tokens`, T: distinct experts of a layer that one token from each of T sequences
    chooses together, as in a decode step. `ids`: [layers, positions, K] per sequence, alike in shape.

    A sample is one position of T neighbouring sequences in one layer. Position 0, the same token everywhere, is
    left out."""
    import torch

    chosen = torch.stack(list(ids))[:, :, 1:]  # [sequences, layers, positions, K]
    found = []
    for count in tokens:
        groups = chosen[: len(chosen) // count * count].unflatten(0, (-1, count))
        together = groups.permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 2)  # [samples, T·K]
        samples = [len(set(row)) for row in together.tolist()]
        found.append(
            Record.from_samples(
                samples, bench=BENCH, metric="active_experts", unit="1", clock="none", provenance=provenance,
                params={"model": model, "tokens": count},
            )
        )  # fmt: skip
    return found
