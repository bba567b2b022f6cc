"""Do the intervals hold what they promise? An 80 % interval should hold 80 % of what is measured, a 50 % one half.

A prediction carries one interval, of 80 %. Read as log-normal on either side of the prediction it gives all others: at
level p each side is z(p)/z(80 %) times as long in the logarithm, z(p) the half-width of a standard normal's p. The
share of points inside, by level, lies on the diagonal if the errors are as large as stated, above it if they are
smaller.

Points of one source err together (same engine, same machine), so fewer of them are independent than there are rows, and
the spread that `band` gives is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

from moelab.perf.prediction import LEVEL

if TYPE_CHECKING:
    from moelab.perf.validate import Row


def half_width(level: float) -> float:
    """z: a standard normal lies within ±z with probability `level`."""
    return NormalDist().inv_cdf((1 + level) / 2)


def standing(row: Row) -> float | None:
    """How many of its own half-widths the measured value lies above (+) or below (−) the prediction, in logarithms: ±1
    is the end of the interval. None for a row without one."""
    if row.low is None or not row.measured:
        return None
    off = math.log(row.measured / row.predicted)
    return off / math.log(row.high / row.predicted if off >= 0 else row.predicted / row.low)


def inside(rows: Sequence[Row], level: float) -> float:
    """The share of rows that lie inside their interval at `level`; NaN if none has an interval."""
    found = [abs(s) for s in map(standing, rows) if s is not None]
    if not found:
        return math.nan
    return sum(s <= half_width(level) / half_width(LEVEL) for s in found) / len(found)


def band(level: float, count: int, share: float = LEVEL) -> tuple[float, float]:
    """Where `inside` at `level` falls with probability `share` if intervals are right and `count` rows independent."""
    spread = half_width(share) * math.sqrt(level * (1 - level) / count)
    return max(level - spread, 0.0), min(level + spread, 1.0)
