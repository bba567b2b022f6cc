"""Places of a decode step that nobody needs, by how a batch size is chosen. Counted, not modelled.

A step has a place for each request, and a captured step has as many places as it was captured with. Groups g with n_g
requests then compute

    own size      Σ_g c(n_g)                      c(n): the smallest captured size that holds n
    common size   G · c(max n_g)

places, of which Σ n_g are requests. With a size for every number (c(n) = n) the first wastes nothing, and of the second
the share 1 − mean / max is padding, whatever the number of groups. With a few sizes the first wastes a little too.

`by_chance` has n_g drawn independently from a Poisson distribution: requests that go to any group and stay for as long
as they do. Its means are sums over the distribution, that of the largest by P(max ≤ k) = F(k)^G. A scheduler that gives
a request to the emptiest group does better, one that goes by cached prefixes may do worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moelab.config import ConfigError

TAIL = 1e-12  # probability that is left out


@dataclass(frozen=True)
class Places:
    """Of a step, over all groups; means where batches are drawn."""

    requests: float
    own: float
    common: float

    @property
    def own_waste(self) -> float:
        """Share of the places that are padding when each group takes its own size."""
        return 1 - self.requests / self.own if self.own else 0.0

    @property
    def common_waste(self) -> float:
        """Likewise, when all take the largest's."""
        return 1 - self.requests / self.common if self.common else 0.0


def places(batches: Sequence[int], sizes: Sequence[int] | None = None) -> Places:
    """For these requests of each group. `sizes`: those captured; None: every number. Raises ConfigError for more
    requests than the largest size holds."""
    if not batches or min(batches) < 0:
        raise ConfigError(f"batches are {list(batches)}: give one number of requests, 0 or more, for each group")
    held = _sizes(max(batches), sizes)
    return Places(sum(batches), float(held[list(batches)].sum()), float(len(batches) * held[max(batches)]))


def by_chance(mean: float, groups: int, sizes: Sequence[int] | None = None) -> Places:
    """Expected, for `groups` groups with Poisson(mean) requests each. Raises ConfigError as `places` does, for numbers
    that occur at all."""
    if mean <= 0 or groups < 1:
        raise ConfigError(f"mean is {mean} and groups {groups}: give a mean above 0 and 1 group or more")
    k = np.arange(int(mean + 12 * math.sqrt(mean) + 40))
    logs = k * math.log(mean) - mean - np.array([math.lgamma(x + 1) for x in k])
    chance = np.exp(logs)
    seen = k[: 1 + int(np.searchsorted(np.cumsum(chance), 1 - TAIL))]
    chance = chance[: len(seen)] / chance[: len(seen)].sum()
    held = _sizes(int(seen[-1]), sizes)
    of_largest = np.diff(np.minimum(np.cumsum(chance), 1) ** groups, prepend=0)
    return Places(
        groups * float((chance * seen).sum()),
        groups * float((chance * held).sum()),
        groups * float((of_largest * held).sum()),
    )


def lesson(cases: Mapping[str, Places], chance: Mapping[int, Mapping[float, Places]]) -> str:
    """What they say, in a sentence with its numbers: `places` by name, `by_chance` by number of groups and mean."""
    worst = max(cases, key=lambda name: cases[name].common_waste)
    groups = max(chance)
    at = max(chance[groups], key=lambda mean: chance[groups][mean].own_waste)
    there = chance[groups][at]
    return (
        f"At one size for all, {100 * cases[worst].common_waste:.0f} % of the places are padding for {worst} requests. "
        f"By chance among {groups} groups with {at:g} each it is {100 * there.common_waste:.0f} %; with own sizes, "
        f"since not every number has its graph, **{100 * there.own_waste:.0f} %**, the most of all means shown."
    )


def _sizes(most: int, sizes: Sequence[int] | None) -> np.ndarray:
    """[most + 1]: the size of a step of n requests."""
    numbers = np.arange(most + 1)
    if sizes is None:
        return numbers
    captured = np.array(sorted({0, *sizes}))
    if most > captured[-1]:
        raise ConfigError(f"{most} requests exceed the largest batch size, {captured[-1]}: give larger sizes")
    return captured[np.searchsorted(captured, numbers)]
