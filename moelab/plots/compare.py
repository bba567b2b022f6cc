"""Charts that set numbers beside each other: dots in rows, dumbbells, differences with their error, who wins where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moelab.plots.style import INK, LINE, SOFT, decimal_ticks, halo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moelab.results import Record


Curves = Mapping[str, tuple[Mapping[float, "Record | float"], object]]


def lines(ax: Axes, curves: Curves, hollow: Curves | None = None, log: bool = True, named: bool = True) -> None:
    """{name: ({x: Record or number}, colour)} over powers of two, y logarithmic or (`log` False) with 0: medians of
    Records with bars from p20 to p80, each curve named at its right end if `named`. `hollow`: the same, not measured by
    us: dotted, with hollow dots, named only where no other curve has the name."""
    ax.set_xscale("log", base=2)
    both = [(name, *curve, "-") for name, curve in curves.items()]
    both += [("" if name in curves else name, *curve, ":") for name, curve in (hollow or {}).items()]
    places = sorted({x for _, found, _, _ in both for x in found})
    for name, found, color, style in both:
        x, values = np.array(list(found), dtype=float), found.values()
        middle, low, high = (np.array([getattr(v, f, v) for v in values], dtype=float) for f in ("p50", "p20", "p80"))
        ax.errorbar(x, middle, yerr=[middle - low, high - middle], color=color, marker="o", markersize=4.5,
                    label=name or None, linewidth=1.8, elinewidth=1.4, capsize=2.5, linestyle=style, zorder=3,
                    markerfacecolor="white" if style == ":" else color)  # fmt: skip
    if log:
        ax.set_yscale("log")
        decimal_ticks(ax.yaxis)
    else:
        lowest = min((getattr(v, "p50", v) for _, found, _, _ in both for v in found.values()), default=0)
        ax.set_ylim(bottom=min(0, 1.15 * lowest))
    ticks = [p for p in places if p == 2 ** round(math.log2(p))]
    huge = max(ticks, default=0) > 1e5
    ax.set_xticks(ticks, [f"$2^{{{math.log2(p):.0f}}}$" if huge else f"{p:,g}" for p in ticks])
    ax.xaxis.minorticks_off()
    if named:
        ends = [(max(found), found[max(found)], name, color) for name, found, color, _ in both if found and name]
        name_ends(ax, [(x, getattr(y, "p50", y), name, color) for x, y, name, color in ends])


def name_ends(ax: Axes, ends: Sequence[tuple[float, float, str, object]], fontsize: float = 9) -> None:
    """(x, y, text, colour): text to the right of each end of a curve, moved up and down where texts would overlap. Call
    it when limits and scales are final."""
    from matplotlib.transforms import offset_copy

    figure = ax.figure
    figure.draw_without_rendering()
    ends = sorted(ends, key=lambda end: end[1])
    wanted = np.array([ax.transData.transform(end[:2])[1] for end in ends]) * 72 / figure.dpi
    for (x, y, text, color), offset in zip(ends, apart(wanted, fontsize * 1.3) - wanted, strict=True):
        where = offset_copy(ax.transData, figure, x=8, y=offset, units="points")
        halo(ax.text(x, y, text, transform=where, va="center", fontsize=fontsize, color=color, zorder=6))


def apart(places: np.ndarray, least: float) -> np.ndarray:
    """Rising places, moved as little as need be so that neighbours are `least` apart: those that would overlap are
    spread around their middle."""
    groups = [[place] for place in places]
    while True:
        middles = [float(np.mean(group)) for group in groups]
        for i in range(len(groups) - 1):
            if middles[i + 1] - middles[i] < least * (len(groups[i]) + len(groups[i + 1])) / 2:
                groups[i : i + 2] = [groups[i] + groups[i + 1]]
                break
        else:
            steps = [(np.arange(len(group)) - (len(group) - 1) / 2) * least for group in groups]
            return np.concatenate([m + s for m, s in zip(middles, steps, strict=True)] or [np.array([])])


def key_panel(ax: Axes, source: Axes, title: str = "") -> None:
    """An empty panel of a grid as the legend of another."""
    ax.axis("off")
    ax.legend(*source.get_legend_handles_labels(), loc="center left", title=title, title_fontsize=10.5, fontsize=10,
              alignment="left", labelspacing=0.9)  # fmt: skip


def dots(ax: Axes, rows: Mapping[str, Mapping[str, float]], colors: Mapping[str, object], log: bool = True) -> None:
    """{row: {series: value}} as dots, on a logarithmic axis unless `log` is False, the first row on top; a series has
    the same marker and colour in every row. Equal values stand side by side in height."""
    names = list(rows)
    shapes = dict(zip(colors, "osD^vPX*", strict=False))
    lift = dict(zip(colors, np.linspace(-0.24, 0.24, len(colors)), strict=True))
    for i, name in enumerate(names):
        ax.axhline(i, color=LINE, linewidth=0.8, zorder=1)
        for series, value in rows[name].items():
            ax.plot(value, i + lift[series], marker=shapes[series], color=colors[series], markersize=7, zorder=3,
                    markeredgecolor="white", markeredgewidth=0.7, linestyle="none",
                    label=series if series not in ax.get_legend_handles_labels()[1] else None)  # fmt: skip
    ax.set(yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5))
    ax.set_yticklabels(names)
    if log:
        ax.set_xscale("log")
        decimal_ticks(ax.xaxis)
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def dumbbells(
    ax: Axes, rows: Mapping[str, tuple[float, float]], color: object, ends: tuple[str, str], unit: str
) -> None:
    """{row: (from, to)}: a hollow and a full dot joined by a bar, with the difference at its end; `ends` says what the
    two are. The first row on top."""
    for i, (start, end) in enumerate(rows.values()):
        ax.plot([start, end], [i, i], color=color, linewidth=3, alpha=0.45, zorder=2, solid_capstyle="butt")
        ax.plot(start, i, marker="o", markersize=8, markerfacecolor="white", markeredgewidth=1.8, color=color, zorder=3,
                linestyle="none", label=ends[0] if i == 0 else None)  # fmt: skip
        ax.plot(end, i, marker="o", markersize=8, color=color, zorder=3, linestyle="none",
                label=ends[1] if i == 0 else None)  # fmt: skip
        ax.annotate(f"{end - start:+.1f} {unit}", (max(start, end), i), (9, 0), textcoords="offset points", va="center",
                    fontsize=9.5, color=INK)  # fmt: skip
    top = max(max(pair) for pair in rows.values())
    ax.set(yticks=range(len(rows)), ylim=(len(rows) - 0.5, -0.5), xlim=(0, top * 1.18))
    ax.set_yticklabels(list(rows))
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right")


def differences(
    ax: Axes, rows: Mapping[str, Sequence[tuple[float, float] | None]], kinds: Mapping[str, object]
) -> None:  # fmt: skip
    """{row: [(mean, standard error) or None for each of `kinds`]}: means with bars of two standard errors beside the
    line of no difference, in the kinds' colours; the first row on top."""
    names = list(rows)
    ax.axvline(0, color=INK, linestyle="--", linewidth=1.3, zorder=1)
    for j, (kind, color) in enumerate(kinds.items()):
        lift = 0.3 * (j - (len(kinds) - 1) / 2)
        if not (found := [(i, rows[name][j]) for i, name in enumerate(names) if rows[name][j] is not None]):
            continue
        at, mean, error = ([i + lift for i, _ in found], [m for _, (m, _) in found], [2 * e for _, (_, e) in found])
        ax.errorbar(mean, at, xerr=error, color=color, marker="o", markersize=6, linestyle="none", elinewidth=1.8,
                    capsize=4, label=kind, zorder=3)  # fmt: skip
    ax.set(yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5))
    ax.set_yticklabels(names)
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def winners(ax: Axes, ratios: np.ndarray, rows: Sequence[str], columns: Sequence[str], names: tuple[str, str],
            colors: tuple[str, str], notes: Mapping[tuple[int, int], str] | None = None) -> None:  # fmt: skip
    """time of names[0] / time of names[1] for each cell, in the colour of the faster, the stronger the farther from 1,
    with the factor by which it is faster and below it the cell's note; NaN stays blank."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb
    from matplotlib.patches import Patch

    pale = [tuple(0.75 * c + 0.25 for c in to_rgb(color)) for color in colors]
    shades = LinearSegmentedColormap.from_list("winners", [pale[0], "white", pale[1]])
    ax.imshow(np.clip(np.log2(ratios), -1, 1), cmap=shades, vmin=-1, vmax=1, aspect="auto")
    for i, j in np.ndindex(*ratios.shape):
        if ratios[i, j] == ratios[i, j]:
            faster = max(ratios[i, j], 1 / ratios[i, j])
            text = "\n".join(x for x in (f"{faster:.2f}", (notes or {}).get((i, j))) if x)
            ax.text(j, i, text, ha="center", va="center", fontsize=8.5, color=INK if faster > 1.03 else SOFT)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.grid(False)
    squares = [Patch(facecolor=p, edgecolor=LINE, label=f"{n} is faster, by") for n, p in zip(names, pale, strict=True)]
    ax.legend(handles=squares, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.3)
