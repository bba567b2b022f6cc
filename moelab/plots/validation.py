"""Figures of a model's error: predicted ranges beside what was measured, errors by class, coverage, and what the
uncertainty consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moelab.plots.style import INK, LINE, PANEL, SOFT, category_color, halo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moelab.perf.validate import Row

MODEL, OUTSIDE, BEFORE = "#0173b2", "#d55e00", "#949494"
ORIGIN_COLORS = {"measured": "#029e73", "recorded": "#2f6db3", "published": "#8fb8de", "extrapolated": "#e8743b"}


def ranges(ax: Axes, rows: Sequence[Row], right: float = 1.0) -> None:
    """One line per row, the first on top: the prediction with its 80 % as a dot with a bar (orange where the measured
    value lies outside), what was measured as a diamond, the error at the right; a hollow dot is the prediction without
    the causes of its class. `right`: room for the text, as a factor on the axis' end."""
    for i, row in enumerate(rows):
        color = MODEL if row.inside in (True, None) else OUTSIDE
        ax.axhline(i, color=LINE, linewidth=0.7, zorder=1)
        if row.low is not None:
            ax.plot([row.low, row.high], [i, i], color=color, linewidth=6, alpha=0.28, solid_capstyle="butt", zorder=2)
        ax.plot(row.predicted, i, marker="o", color=color, markersize=6, zorder=4, linestyle="none")
        if row.before is not None:
            ax.plot(row.measured * (1 + row.before), i, marker="o", markersize=5, markerfacecolor="white",
                    color=BEFORE, zorder=3, linestyle="none")  # fmt: skip
        ax.plot(row.measured, i, marker="D", color=INK, markersize=5.5, zorder=5, linestyle="none")
        halo(
            ax.annotate(
                f"{row.error:+.0%}", (1, i), (-4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                ha="right", va="center", fontsize=9, color=color, zorder=6,
            )
        )  # fmt: skip
    ax.set_xscale("log")
    ends = ax.get_xlim()
    ax.set(yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlim=(ends[0], ends[1] * right))
    ax.set_yticklabels([row.id for row in rows], fontsize=9)
    ax.grid(axis="y", visible=False)
    _plain_log(ax)
    _key(ax, any(row.before is not None for row in rows), any(row.inside is False for row in rows))


def _plain_log(ax: Axes) -> None:
    """1, 2, 5, 10, … as numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.xaxis.set_minor_formatter(NullFormatter())


def _key(ax: Axes, before: bool, outside: bool) -> None:
    from matplotlib.lines import Line2D

    def mark(color: str, name: str, **style: object) -> Line2D:
        return Line2D([], [], color=color, label=name, linestyle="none", **style)

    handles = [mark(INK, "measured by others", marker="D", markersize=6),
               mark(MODEL, "modelled, 80 %", marker="o", markersize=6)]  # fmt: skip
    if outside:
        handles.append(mark(OUTSIDE, "modelled, measured lies outside", marker="o", markersize=6))
    if before:
        handles.append(mark(BEFORE, "without the class's causes", marker="o", markersize=5, markerfacecolor="white"))
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(handles), handletextpad=0.1,
              columnspacing=1.2, borderaxespad=0.2)  # fmt: skip


def error_strips(ax: Axes, classes: Mapping[str, Sequence[Row]]) -> None:
    """{class: rows} as dots along their error, orange outside their interval, with the median of |error| at the left
    and lines at ±10 and ±25 %."""
    for limit, style in ((10, ":"), (25, "--")):
        for at in (-limit, limit):
            ax.axvline(at, color=SOFT, linewidth=1, linestyle=style, zorder=1)
    ax.axvline(0, color=INK, linewidth=1.2, zorder=1)
    for i, (_, rows) in enumerate(classes.items()):
        errors = np.array([100 * row.error for row in rows])
        at = i + np.linspace(-0.26, 0.26, len(rows))[np.argsort(np.argsort(errors))] if len(rows) > 1 else [i]
        colors = [MODEL if row.inside in (True, None) else OUTSIDE for row in rows]
        ax.scatter(errors, at, s=30, c=colors, alpha=0.85, edgecolor="white", linewidth=0.6, zorder=3)
    ax.set(yticks=range(len(classes)), ylim=(len(classes) - 0.5, -0.5))
    ax.set_yticklabels([f"{name}\n{len(rows)} points, median |error| {_median(rows):.0%}"
                        for name, rows in classes.items()])  # fmt: skip
    ax.grid(axis="y", visible=False)


def _median(rows: Sequence[Row]) -> float:
    return float(np.median([abs(row.error) for row in rows]))


def coverage(
    ax: Axes, levels: Sequence[float], curves: Mapping[str, Sequence[float]], band: Sequence[tuple[float, float]]
) -> None:  # fmt: skip
    """{class: share inside, by level} against the level promised, with the diagonal and the `band` around it."""
    from moelab.plots.compare import name_ends
    from moelab.plots.style import PAINT

    x = 100 * np.array(levels)
    low, high = (100 * np.array(side) for side in zip(*band, strict=True))
    ax.fill_between(x, low, high, color=PANEL, zorder=0)
    ax.plot([0, 100], [0, 100], color=INK, linestyle="--", linewidth=1.2, zorder=1)
    ends = []
    for i, (name, shares) in enumerate(curves.items()):
        color, y = (MODEL, "#e8743b", "#029e73", *PAINT)[i], 100 * np.array(shares)
        ax.plot(x, y, color=color, linewidth=2 if i == 0 else 1.5, drawstyle="default", zorder=3)
        ends.append((x[-1], y[-1], name, color))
    ax.set(xlim=(0, 100), ylim=(0, 103))
    name_ends(ax, ends)


def layers(
    ax: Axes, ours: Mapping[str, Mapping[str, float]], theirs: Mapping[str, Mapping[str, float]],
    what: str = "modelled", whole: Mapping[str, float] | None = None,
) -> None:  # fmt: skip
    """{name: {category: us}} of two kinds as stacked bars side by side: `ours`, which is `what`, and hatched what the
    study published, whose unnamed rest is grey. Totals on top. `whole`: {name: us} of layers whose kinds were timed
    alone, so that they need not add up to it: a line across, and both numbers on top."""
    from matplotlib.patches import Patch

    used: dict[str, None] = {}
    for i, name in enumerate(ours):
        for offset, parts, hatch in ((-0.21, ours[name], None), (0.21, theirs.get(name, {}), "///")):
            base = 0.0
            for category, us in parts.items():
                if us <= 0:
                    continue
                color = LINE if category == "rest" else category_color(category)
                used[category] = None
                ax.bar(i + offset, us, 0.38, base, color=color, edgecolor="white", linewidth=0.6, hatch=hatch, zorder=2)
                if us > 90:
                    halo(ax.text(i + offset, base + us / 2, f"{us:,.0f}", ha="center", va="center", fontsize=8.5,
                                 zorder=4))  # fmt: skip
                base += us
            text = f"{base:,.0f}\n{'the study' if hatch else what}"
            if whole and not hatch:
                text = f"layer {whole[name]:,.0f}\n{what} {base:,.0f}"
            if base:
                ax.annotate(text, (i + offset, base), (0, 3), ha="center",
                            textcoords="offset points", va="bottom", fontsize=8.5)  # fmt: skip
        if whole:
            ax.plot([i - 0.43, i + 0.01], [whole[name]] * 2, color=INK, linewidth=2.4, zorder=3, solid_capstyle="butt")
    ax.set_xticks(range(len(ours)), list(ours))
    ax.grid(axis="x", visible=False)
    ax.set_ylim(0, ax.get_ylim()[1] * 1.08)
    squares = [Patch(facecolor=LINE if c == "rest" else category_color(c), label="not named" if c == "rest" else c)
               for c in used]  # fmt: skip
    line = [ax.plot([], [], color=INK, linewidth=2.4, label="the layer itself")[0]] if whole else []
    ax.legend(handles=line + squares[::-1], loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def laws(
    ax: Axes, lines: Mapping[str, tuple[Sequence[float], Sequence[float], float, object]],
    points: Mapping[str, tuple[Sequence[float], Sequence[float], object, str]],
) -> None:  # fmt: skip
    """{law: (EP, us, error, colour)} as lines with their 80 % shaded; {source: (EP, us, colour, marker)}: what was
    published."""
    for name, (ep, us, error, color) in lines.items():
        us = np.array(us)
        ax.plot(ep, us, color=color, linewidth=1.8, zorder=2, label=name)
        ax.fill_between(ep, us / (1 + np.array(error)), us * (1 + np.array(error)), color=color, alpha=0.15,
                        linewidth=0, zorder=1)  # fmt: skip
    for name, (ep, us, color, marker) in points.items():
        ax.plot(ep, us, marker=marker, color=color, markersize=7, markeredgecolor="white", linestyle="none", zorder=4,
                label=name)  # fmt: skip
    ax.set_xscale("log", base=2)
    ticks = sorted({e for ep, *_ in lines.values() for e in ep})
    ax.set_xticks(ticks, [f"{e:g}" for e in ticks])
    ax.minorticks_off()
    highest = max(float(np.max(np.array(us) * (1 + np.array(error)))) for _, us, error, _ in lines.values())
    ax.set_ylim(0, max(1.08 * highest, ax.get_ylim()[1]))


def uncertainty(ax: Axes, parts: Mapping[str, tuple[float, str]]) -> None:
    """{term: (share of the step that it may move, origin)} as bars, the longest on top, in the origin's colour."""
    from matplotlib.patches import Patch

    ordered = dict(sorted(parts.items(), key=lambda item: -item[1][0]))
    for i, (share, origin) in enumerate(ordered.values()):
        ax.barh(i, 100 * share, color=ORIGIN_COLORS[origin], height=0.66, zorder=2)
        ax.annotate(f"{100 * share:.1f}", (100 * share, i), (4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set(yticks=range(len(ordered)), ylim=(len(ordered) - 0.4, -0.6))
    ax.set_yticklabels(list(ordered))
    ax.set_xlim(0, 112 * max(share for share, _ in parts.values()))
    ax.grid(axis="y", visible=False)
    used = dict.fromkeys(origin for _, origin in ordered.values())
    ax.legend(handles=[Patch(color=ORIGIN_COLORS[o], label=o) for o in ORIGIN_COLORS if o in used], loc="lower right")
