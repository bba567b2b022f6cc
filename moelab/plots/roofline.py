"""Rooflines: FLOP/s reached over FLOP per byte, under the slope of the memory and the ceiling of the tensor cores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moelab.plots.style import INK, SOFT, backend_color, decimal_ticks, halo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moelab.perf.roofline import Point, Roofs


def draw_roofs(
    ax: Axes, roofs: Sequence[Roofs], precision: str, x: tuple[float, float], bottom: float, named: bool = True
) -> None:  # fmt: skip
    """Logarithmic axes over the intensities `x`, from `bottom` TFLOP/s to above the highest ceiling, and every roof as
    a dashed line: dark if measured, grey if of a data sheet. They are named in the corner above the slope if `named`.
    A roof without that precision has its slope only."""
    peaks = {r.name: r.tflops.get(precision, math.inf) for r in roofs}
    highest = max((p for p in peaks.values() if p < math.inf), default=x[1] * max(r.gb_s for r in roofs) / 1e3)
    ax.set(xscale="log", yscale="log", xlim=x, ylim=(bottom, 2.5 * highest))
    lines = []
    for r in roofs:
        color, slope, peak = INK if "measured" in r.name else SOFT, r.gb_s / 1e3, peaks[r.name]
        bend = min(x[1], peak / slope)
        ceiling = f", {peak:,.0f} TFLOP/s" if peak < math.inf else ""
        lines += ax.plot(
            [x[0], bend, x[1]], [x[0] * slope, bend * slope, min(peak, x[1] * slope)], color=color, linestyle="--",
            linewidth=1.3, zorder=1.5, label=f"{r.name}: {slope:.2f} TB/s{ceiling}",
        )  # fmt: skip
    if named:
        key = ax.legend(handles=lines, loc="upper left", fontsize=8.5, labelcolor="linecolor", borderaxespad=0.2)
        ax.add_artist(key)  # stays when another legend comes
        key.set_in_layout(False)
    for axis in (ax.xaxis, ax.yaxis):
        decimal_ticks(axis)


def roofline_curve(
    ax: Axes, points: Sequence[Point], color: object, name: str = "", star: Point | None = None, star_name: str = "",
    line: str = "-", hollow: bool = False,
) -> None:  # fmt: skip
    """Kernels of one kind as dots joined by `line`, each with its spread from p80 to p20; `star`: one of them that
    stands out, with `star_name` below it; `hollow`: not measured by us. `name` is for a legend."""
    x, y, low, high = (np.array([getattr(p, f) for p in points]) for f in ("intensity", "tflops", "low", "high"))
    ax.errorbar(
        x, y, yerr=[y - low, high - y], color=color, label=name or None, marker="o", markersize=4.5,
        markerfacecolor="white" if hollow else color, linewidth=1.6, linestyle=line, elinewidth=1.4, capsize=2.5,
        zorder=3,
    )  # fmt: skip
    if star is not None:
        place = (star.intensity, star.tflops)
        ax.plot(*place, marker="*", markersize=14, color=color, markeredgecolor="white", markeredgewidth=0.8, zorder=5)
        halo(ax.annotate(star_name, place, (3, -8), textcoords="offset points", ha="center", va="top", fontsize=7.5,
                         color=color, weight="bold", zorder=6))  # fmt: skip


def roofline_curves(
    ax: Axes, curves: Mapping[str, Sequence[Point]], published: Mapping[str, tuple[Sequence[Point], str]]
) -> None:  # fmt: skip
    """{backend: points} in the backends' colours; `published`, {name: (points, backend)}, as hollow dots."""
    for backend, points in curves.items():
        roofline_curve(ax, points, backend_color(backend), backend)
    for name, (points, backend) in published.items():
        roofline_curve(ax, points, backend_color(backend), name, line="", hollow=True)


def ladders(
    ax: Axes, rungs: Mapping[str, Mapping[int, Point]], star: int, name: str, legend: bool = False
) -> None:  # fmt: skip
    """{backend: {batch: point}} of one intensity, upwards; `name` stands below the lowest. `legend`: with the backends'
    names."""
    for backend, at in rungs.items():
        roofline_curve(ax, list(at.values()), backend_color(backend), backend if legend else "", at.get(star))
    lowest = min((point for at in rungs.values() for point in at.values()), key=lambda point: point.tflops)
    ax.annotate(name, (lowest.intensity, lowest.tflops), (0, -8), textcoords="offset points", ha="center", va="top",
                fontsize=8.5, color=SOFT)  # fmt: skip
    if legend:
        handles, names = ax.get_legend_handles_labels()
        ours = [names.index(backend) for backend in rungs]
        ax.legend([handles[i] for i in ours], list(rungs), loc="lower right")
