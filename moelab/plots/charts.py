"""Charts of numbers: stacked bars, curves, bars on a logarithmic axis, medians with their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moelab.plots.style import PAINT, SOFT, backend_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moelab.results import Record


BAR = {"edgecolor": "white", "linewidth": 0.6, "zorder": 2}


def stacked(ax: Axes, bars: Mapping[str, Mapping[str, float]], totals: str = "{:.1f}") -> None:
    """{bar: {part: value}} as stacked bars with their totals on top; the parts' colours follow their order, parts
    that a bar lacks are 0."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    names, base = list(bars), np.zeros(len(bars))
    for part, color in zip(parts, PAINT, strict=False):
        values = np.array([bars[name].get(part, 0.0) for name in names])
        ax.bar(names, values, bottom=base, label=part, color=color, **BAR)
        base += values
    for i, total in enumerate(base):
        ax.annotate(totals.format(total), (i, total), (0, 3), textcoords="offset points", ha="center", fontsize=9.5,
                    zorder=5)  # fmt: skip
    ax.set_ylim(0, max(base) * 1.08)
    ax.grid(axis="x", visible=False)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def curves(
    ax: Axes, x: Sequence[float], lines: Mapping[str, tuple[Sequence[float], object]], log: bool = False
) -> None:
    """{name: (values, colour)} over `x`, powers of two; `log`: values on a logarithmic axis."""
    for name, (values, color) in lines.items():
        ax.plot(x, values, color=color, marker="o", markersize=4.5, linewidth=1.8, label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(x), [f"{value:g}" for value in x])
    ax.minorticks_off()
    if log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:,g}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def grouped_lengths(ax: Axes, bars: Mapping[str, Mapping[str, float]], unit: str = "") -> None:
    """{group: {part: value}} as horizontal bars side by side on a logarithmic axis, the first group on top, values at
    their ends; a part that is 0 says so."""
    groups = list(bars)
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    top = max(value for bar in bars.values() for value in bar.values())
    bottom = min(value for bar in bars.values() for value in bar.values() if value > 0) / 2
    height = 0.8 / len(parts)
    for i, (part, color) in enumerate(zip(parts, PAINT, strict=False)):
        values = np.array([bars[group].get(part, 0.0) for group in groups])
        at = np.arange(len(groups)) + (i - (len(parts) - 1) / 2) * height
        ax.barh(at, np.maximum(values, 0), label=part, color=color, height=height, **BAR)
        for y, value in zip(at, values, strict=True):
            text = f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
            ax.annotate(f"{text} {unit}".strip() if value else "0", (max(value, bottom), y), (3, 0),
                        textcoords="offset points", va="center", fontsize=8, color=SOFT)  # fmt: skip
    ax.set_yticks(range(len(groups)), groups)
    ax.set_xscale("log")
    ax.set_xlim(bottom, top * 3)
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def spread_band(ax: Axes, x: Sequence[float], records: Sequence[Record], name: str, color: str) -> None:
    """Medians of records over `x`, each with a bar from p20 to p80, beside curves that are drawn already."""
    middle, low, high = (np.array([getattr(r, p) for r in records]) for p in ("p50", "p20", "p80"))
    ax.errorbar(x, middle, yerr=[middle - low, high - middle], color=color, label=name, marker="s", markersize=5,
                linestyle="none", elinewidth=1.6, capsize=3.5, zorder=4)  # fmt: skip
    ax.legend(loc="lower right")


def spread(ax: Axes, records: Sequence[Record], x: str, scale: float = 1.0) -> None:
    """Medians of records over the parameter `x`, one line per backend in its colour; bars from p20 to p80."""
    backends = list(dict.fromkeys(r.backend for r in records))
    places = sorted({r.params[x] for r in records})
    for i, backend in enumerate(backends):
        mine = sorted((r for r in records if r.backend == backend), key=lambda r: r.params[x])
        at = np.array([places.index(r.params[x]) for r in mine]) + 0.06 * (i - (len(backends) - 1) / 2)
        middle, low, high = (np.array([getattr(r, p) for r in mine]) * scale for p in ("p50", "p20", "p80"))
        ax.errorbar(at, middle, yerr=[middle - low, high - middle], color=backend_color(backend), label=backend,
                    marker="o", markersize=5, linewidth=1.6, elinewidth=1.6, capsize=3.5)  # fmt: skip
    ax.set_xticks(range(len(places)), [f"{p:g}" for p in places])
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left", title="median, p20–p80", title_fontsize=9, alignment="left", labelcolor=SOFT)
