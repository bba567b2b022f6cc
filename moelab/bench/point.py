"""`Point`: one setting of an op whose backend is picked from a table, and every candidate for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moelab.bench.case import Inputs


@dataclass(frozen=True)
class Candidate:
    """A backend and its config, as a line of the table has them. `kernel`: what is compiled for it, in words; equal for
    candidates, of whatever points, that share it."""

    backend: str
    config: str
    kernel: str
    run: Callable[[Inputs], object]


@dataclass(frozen=True)
class Point:
    """Where the table holds (groups, n, k, m). `make`: fresh inputs and outputs, the same for all candidates; `bytes`:
    the least they move."""

    groups: int
    n: int
    k: int
    m: int
    candidates: Sequence[Candidate]
    make: Callable[[torch.device], Inputs]
    bytes: float

    def __str__(self) -> str:
        return f"groups={self.groups} n={self.n} k={self.k} m={self.m}"
