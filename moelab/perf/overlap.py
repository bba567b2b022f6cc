"""How long a schedule takes: the orders of `moelab.stages`, walked with times instead of kernels.

One stream computes, in the order of the schedule. A send leaves rows on the wire and returns; the receive of the same
exchange waits until they have come. What passes between is hidden:

    none        s1 + s2 + sh + D + m + C                  a layer, with the steps' times and the exchange's D and C
    dispatch    s1 + s2 + max(D, sh) + m + C
    microbatch  2·[max(D', s1' + sh') + m' + max(C', s2')]  halves marked by '; the steady state between layers

These closed forms are what the walk comes to; nothing here knows them. The first and the last layer of `microbatch`
fill and drain the pipeline, which the walk over all layers includes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moelab.stages import DENSE_LAYER, SCHEDULES

SETTLED = 5  # layers after which every further one adds the same


@dataclass(frozen=True)
class MicroBatch:
    """Times of one micro-batch, us: of each stage's kernels, and of what is in flight after the two sends."""

    stages: Mapping[str, float]
    dispatch: float
    combine: float


@dataclass(frozen=True)
class Walked:
    """`us` in all and by category; waiting counts as Dispatch or Combine."""

    us: float
    by_category: dict[str, float]

    def __sub__(self, other: Walked) -> Walked:
        """What came after `other`; never below 0, which rounding would allow."""
        rest = {k: max(v - other.by_category.get(k, 0.0), 0.0) for k, v in self.by_category.items()}
        return Walked(self.us - other.us, rest)


@functools.cache
def order(schedule: str, num_layers: int) -> tuple[tuple[int, str, str], ...]:
    """(micro-batch, stage, category) of every launch, from `stages.SCHEDULES`."""
    return tuple((x.micro_batch, x.stage.name, x.stage.category) for x in SCHEDULES[schedule](num_layers))


def walk(schedule: str, num_layers: int, parts: Sequence[MicroBatch]) -> Walked:
    """All MoE layers; `parts` holds one micro-batch, or the two halves for "microbatch"."""
    clock, spent = 0.0, {}
    arrival: dict[tuple[int, str], float] = {}
    for micro, stage, category in order(schedule, num_layers):
        part = parts[micro]
        us = part.stages[stage]
        if stage in ("dispatch_recv", "combine_recv"):
            waiting = arrival[micro, category] - clock
            if waiting > 0:
                us += waiting
        clock += us
        spent[category] = spent.get(category, 0.0) + us
        if stage == "dispatch_send":
            arrival[micro, category] = clock + part.dispatch
        elif stage == "combine_send":
            arrival[micro, category] = clock + part.combine
    return Walked(clock, spent)


def layers(schedule: str, num_layers: int, parts: Sequence[MicroBatch]) -> tuple[float, Walked]:
    """(us of all MoE layers, one of them in the steady state). What `walk` over all layers takes, but only the first
    few are walked."""
    some = walk(schedule, SETTLED, parts)
    one = walk(schedule, SETTLED + 1, parts) - some
    if num_layers <= SETTLED:
        return walk(schedule, num_layers, parts).us, one
    return some.us + (num_layers - SETTLED) * one.us, one


def dense(stages: Mapping[str, float]) -> Walked:
    """One dense layer: the whole batch, nothing to overlap."""
    spent: dict[str, float] = {}
    for stage in DENSE_LAYER:
        spent[stage.category] = spent.get(stage.category, 0.0) + stages[stage.name]
    return Walked(sum(spent.values()), spent)
