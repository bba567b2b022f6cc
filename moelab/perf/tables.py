"""Measured times by shape: records first, published tables after, and reading them between their points.

A table of times has an axis (or two) along which it is interpolated linearly: rows of a GEMM, batch and KV length
of attention. Inside its points a time is as good as the table; outside, `Axis.place` says so and the caller decides by
what rule to go on (never in silence).

Times are made monotone in rows (Curve's x, Grid's y): t(m) = min over m' >= m of t(m'), since a kernel can run on
padded rows. It takes out points where the smallest batch was measured slower than a larger one (InferSim's q_a at 16
rows: 16.4 us, at 64: 10.9).

`Records` that count (`Store.winners`) become tables too, one per op, GPU and exact parameters; where several backends
did the same job the fastest counts, PEERS aside.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from moelab.config import ConfigError
from moelab.hardware import gpu as find_gpu
from moelab.results import published
from moelab.results.store import DEFAULT_RECORDS, PACKAGE_RECORDS, Store

# Backends that stand in a record of bench "ops" for comparison only: other arithmetic (one scale a tensor, BF16
# weights), two launches for one, or nothing that an engine here would run.
PEERS = ("torch.compile", "torch", "reference", "cublas per tensor", "cublas", "two launches")


@dataclass(frozen=True)
class Curve:
    """Times (us) over one axis, rising in it."""

    x: np.ndarray
    us: np.ndarray
    source: str
    origin: str  # of `term.ORIGINS`

    @classmethod
    def of(cls, points: Mapping[float, float], source: str, origin: str) -> Curve:
        x = np.array(sorted(points), dtype=float)
        us = np.array([points[v] for v in x], dtype=float)
        return cls(x, np.minimum.accumulate(us[::-1])[::-1], source, origin)

    def inside(self, x: float) -> bool:
        return bool(self.x[0] <= x <= self.x[-1])

    def at(self, x: float) -> float:
        """Linear between points; the nearest end outside."""
        return float(np.interp(x, self.x, self.us))

    def nearest(self, x: float) -> float:
        """x, or the end of the table that is nearer."""
        return float(min(max(x, self.x[0]), self.x[-1]))


@dataclass(frozen=True)
class Grid:
    """Times (us) over two axes, every pair given, rising in y: bilinear between points, the nearest edge outside."""

    x: np.ndarray
    y: np.ndarray
    us: np.ndarray  # [x, y]
    source: str
    origin: str

    @classmethod
    def of(cls, points: Mapping[tuple[float, float], float], source: str, origin: str) -> Grid:
        """Of {(x, y): us}; an x or a y that lacks a pair is left out, those with fewest pairs first."""
        left = dict(points)
        while True:
            xs, ys = sorted({x for x, _ in left}), sorted({y for _, y in left})
            lacking = [
                (sum((x, y) in left for y in ys) / len(ys), "x", x) for x in xs if any((x, y) not in left for y in ys)
            ] + [(sum((x, y) in left for x in xs) / len(xs), "y", y) for y in ys if any((x, y) not in left for x in xs)]
            if not lacking:
                break
            _, axis, value = min(lacking)
            left = {k: v for k, v in left.items() if k["xy".index(axis)] != value}
        us = np.array([[left[x, y] for y in ys] for x in xs], dtype=float)
        us = np.minimum.accumulate(us[:, ::-1], axis=1)[:, ::-1]
        return cls(np.array(xs, float), np.array(ys, float), us, source, origin)

    def inside(self, x: float, y: float) -> bool:
        return bool(self.x[0] <= x <= self.x[-1] and self.y[0] <= y <= self.y[-1])

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        return float(min(max(x, self.x[0]), self.x[-1])), float(min(max(y, self.y[0]), self.y[-1]))

    def at(self, x: float, y: float) -> float:
        i, u = _place(self.x, x)
        j, v = _place(self.y, y)
        low = (1 - v) * self.us[i[0], j[0]] + v * self.us[i[0], j[1]]
        high = (1 - v) * self.us[i[1], j[0]] + v * self.us[i[1], j[1]]
        return float((1 - u) * low + u * high)


def _place(axis: np.ndarray, x: float) -> tuple[tuple[int, int], float]:
    """The two points around x and x's weight between them; the end itself outside."""
    if x <= axis[0] or len(axis) == 1:
        return (0, 0), 0.0
    if x >= axis[-1]:
        return (len(axis) - 1,) * 2, 0.0
    i = int(np.searchsorted(axis, x, side="right")) - 1
    return (i, i + 1), float((x - axis[i]) / (axis[i + 1] - axis[i]))


@dataclass(frozen=True)
class Tables:
    """Everything that was recorded, by op and GPU: ((parameters, us, origin), …). Curves and grids are made once."""

    recorded: Mapping[tuple[str, str], tuple[tuple[Mapping, float, str], ...]] = field(default_factory=dict)
    _made: dict = field(default_factory=dict, compare=False, repr=False)

    def points(self, op: str, gpu: str, axes: tuple[str, ...], **exact) -> tuple[dict[tuple, float], str]:
        """({(value of each axis): us}, origin) of the records of `op` on `gpu` that carry the parameters `exact`.
        The user's own records precede the package's point by point; "measured" if any point is the user's own."""
        found: dict[tuple, float] = {}
        own = False
        for params, us, origin in self.recorded.get((op, gpu), ()):
            if all(params.get(name) == value for name, value in exact.items()) and all(a in params for a in axes):
                key = tuple(float(params[a]) for a in axes)
                found[key] = min(us, found.get(key, us))
                own |= origin == "measured"
        return found, "measured" if own else "recorded"

    def curve(self, op: str, gpu: str, axis: str, **exact) -> Curve | None:
        """The records over one axis; None of fewer than two."""

        def make() -> Curve | None:
            points, origin = self.points(op, gpu, (axis,), **exact)
            if len(points) < 2:
                return None
            return Curve.of({x: us for (x,), us in points.items()}, f"records of {op} on {gpu}", origin)

        return self.once((op, gpu, axis, tuple(sorted(exact.items()))), make)

    def grid(self, op: str, gpu: str, axes: tuple[str, str], **exact) -> Grid | None:
        """The records over two axes, lines with holes left out; None without two points on the first axis."""

        def make() -> Grid | None:
            points, origin = self.points(op, gpu, axes, **exact)
            grid = Grid.of(points, f"records of {op} on {gpu}", origin) if len(points) > 1 else None
            return grid if grid is not None and len(grid.x) > 1 else None

        return self.once((op, gpu, axes, tuple(sorted(exact.items()))), make)

    def shapes(self, op: str, gpu: str, names: tuple[str, ...], axis: str) -> list[tuple[int, ...]]:
        """The values of the parameters `names` for which there is a curve over `axis`."""

        def make() -> list[tuple[int, ...]]:
            rows = self.recorded.get((op, gpu), ())
            found = sorted({tuple(int(p[n]) for n in names) for p, _, _ in rows if all(n in p for n in names)})
            return [v for v in found if self.curve(op, gpu, axis, **dict(zip(names, v, strict=True))) is not None]

        return self.once((op, gpu, names), make)

    def once(self, key: tuple, make: Callable):
        """What `make()` returns, made at the first call for `key`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


NOTHING_RECORDED = Tables()


def load(records: str | Path | None = None) -> Tables:
    """Records of the user's folder (default ./records) and of the package. Read anew when a file changes."""
    folder = Path(records) if records is not None else DEFAULT_RECORDS
    if records is not None and not folder.is_dir():
        raise ConfigError(f"no folder {records}: --records names one that holds records")
    files = [p for top in (folder, PACKAGE_RECORDS) for p in sorted(top.glob("**/*.jsonl"))]
    return _load(folder.resolve(), tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in files))


@functools.lru_cache(maxsize=8)
def _load(folder: Path, state: tuple) -> Tables:
    entries: dict[tuple[str, str], list] = {}
    for r, own in _winners(folder, state):
        peer = r["bench"] == "ops" and r["backend"] in PEERS
        if r["unit"] != "us" or r["kind"] != "measured" or peer or r["gpu"] == "cpu":
            continue
        try:
            name = find_gpu(r["gpu"]).name
        except ConfigError:  # a GPU whose peaks are not known here cannot be scaled from, nor predicted
            continue
        params = {**r["params"], "backend": r["backend"], "bench": r["bench"], "gpus": r["gpu_count"]}
        entries.setdefault((r["metric"], name), []).append((params, r["p50"], "measured" if own else "recorded"))
    return Tables({key: tuple(_own_first(rows)) for key, rows in entries.items()})


def _winners(folder: Path, state: tuple) -> list[tuple[dict, bool]]:
    """(record, whether it is the user's own) of those that count, as `Store.winners` has it, which checks every field
    and takes ten times as long: a first prediction would wait for it. Files with a line that is no record are left to
    the Store, which names it."""
    best: dict[tuple, tuple[tuple, dict]] = {}
    try:
        for path, *_ in state:
            own = not Path(path).is_relative_to(PACKAGE_RECORDS)
            for line in Path(path).read_text(encoding="utf-8").split("\n"):
                if not line.strip():
                    continue
                r = json.loads(line)
                key = (
                    r["bench"],
                    r["backend"],
                    tuple(sorted(r["params"].items())),
                    r["metric"],
                    r["gpu"],
                    r["gpu_count"],
                )
                rank = (own, not r["dirty"], datetime.fromisoformat(r["time"]))
                if key not in best or rank >= best[key][0]:
                    best[key] = (rank, r)
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return [(entry.record.to_dict(), entry.own) for entry in Store(folder).winners()]
    return [(r, rank[0]) for rank, r in best.values()]


def _own_first(rows: list) -> list:
    """Without the package's points of settings that the user measured too."""

    def setting(params: Mapping) -> tuple:
        return tuple(sorted((k, v) for k, v in params.items() if k != "backend"))

    own = {setting(params) for params, _, origin in rows if origin == "measured"}
    return [r for r in rows if r[2] == "measured" or setting(r[0]) not in own]


@functools.cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    """A published table as dictionaries of text, without pandas."""
    with open(published.path(name), encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))
