"""`Term`: a time, where it comes from, and how far off it may be.

`origin` is one of ORIGINS, best first:

    measured      a Record in the user's own folder
    recorded      a Record that ships with the package
    published     somebody else's number, or a law fitted to several of them
    extrapolated  outside what any of these cover: beyond the ends of a table, scaled from another GPU, a
                  roofline with a stated efficiency, or an assumption

`error` is relative: the half-width of an 80 % interval. Errors of one term repeat in every layer; those of different
terms are taken as independent (`combined`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

SEPARATOR = " | "  # between the sources of a sum
ORIGINS = ("measured", "recorded", "published", "extrapolated")


@dataclass(frozen=True)
class Term:
    """`us` of `origin`, right to ±`error` of itself with 80 % confidence; `source` names table, law or record."""

    us: float
    origin: str
    error: float
    source: str

    def scaled(self, factor: float) -> Term:
        """The same knowledge about `factor` times the time."""
        return replace(self, us=self.us * factor)

    def moved(self, factor: float, error: float, why: str) -> Term:
        """Carried by a rule to where it was not measured: `factor` times as long, extrapolated, `error` more."""
        return Term(self.us * factor, "extrapolated", math.hypot(self.error, error), f"{self.source}; {why}")


def worst(origins: Iterable[str]) -> str:
    """The weakest of several origins; "measured" of none."""
    return max(origins, key=ORIGINS.index, default="measured")


def combined(terms: Iterable[Term]) -> Term:
    """Terms that follow each other, with independent errors. The weakest origin that holds a tenth of the time is
    named: a small extrapolated part does not rename a measured sum (its error counts all the same)."""
    terms = list(terms)
    total = sum(t.us for t in terms)
    source = SEPARATOR.join(dict.fromkeys(part for t in terms for part in t.source.split(SEPARATOR)))
    if not total:
        return Term(0.0, worst(t.origin for t in terms), 0.0, source)
    error = math.sqrt(sum((t.us * t.error) ** 2 for t in terms)) / total
    origin = worst(t.origin for t in terms if t.us >= 0.1 * total)
    return Term(total, origin, error, source)
