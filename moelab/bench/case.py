"""`OpCase`: one setting of one op, and everybody who does that job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Inputs = Any  # whatever `make` returns and `run` takes, outputs included


@dataclass(frozen=True)
class OpCase:
    """`backends` run the same inputs; the first is ours. `bytes` and `flops` are the least the op must move and do:
    inputs read once, outputs written once. It can take no less time than either of them does at its roof."""

    op: str
    params: Mapping[str, str | int]  # the setting, as it stands in the Record
    make: Callable[[torch.device], Inputs]  # fresh inputs and outputs
    backends: Mapping[str, Callable[[Inputs], object]]
    bytes: float
    flops: float = 0.0
    compute: str = "bf16"  # the roof of its `flops`, of `roofs.UNITS`; that of `bytes` is always "copy"
    seed: int = 0

    @property
    def roofs(self) -> tuple[str, ...]:
        return ("copy", self.compute) if self.flops else ("copy",)


def compiled(reference: Callable, arguments: Callable[[Inputs], tuple]) -> Callable[[Inputs], object]:
    """A peer: `reference` through torch.compile, called with `arguments(inputs)`. Compiled for its shapes at the first
    call, which is not timed."""

    @functools.cache
    def function() -> Callable:
        torch.compiler.reset()  # else the ninth shape of one function would silently run uncompiled
        return torch.compile(reference, dynamic=False)

    return lambda inputs: function()(*arguments(inputs))
