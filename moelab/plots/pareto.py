"""Pareto frontiers of deployments, and what batch, speed and overlap do along them. All of it is modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moelab.plots.style import INK, LINE, SOFT, ep_color, halo

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

X, Y = "tok_s_per_request", "tok_s_per_node"


def frontiers(
    ax: Axes, frame: pd.DataFrame, edges: Mapping[int, pd.DataFrame], bands: Sequence[int] = (), legend: bool = True
) -> None:  # fmt: skip
    """Every deployment of `frame` as a dot, those that do not fit as crosses, and {EP: its frontier} as lines. `bands`:
    EPs whose 80 % is shaded; both axes scale with speed, so it lies along the diagonal."""
    from matplotlib.lines import Line2D

    ax.set_yscale("log")
    for ep, edge in edges.items():
        color, mine = ep_color(ep), frame[frame["ep"] == ep]
        fits, not_fit = mine[mine["fits"]], mine[~mine["fits"]]
        ax.scatter(fits[X], fits[Y], s=11, color=color, alpha=0.35, linewidth=0, zorder=2)
        ax.scatter(not_fit[X], not_fit[Y], s=26, color=color, marker="x", linewidth=1.1, alpha=0.8, zorder=2)
        ax.plot(edge[X], edge[Y], color=color, linewidth=2.2, marker="o", markersize=4.5, zorder=4, label=f"EP{ep}")
        if ep in bands:
            low, high = edge["step_ms"] / edge["step_high"], edge["step_ms"] / edge["step_low"]
            outline = [*zip(edge[X] * low, edge[Y] * low, strict=True),
                       *reversed([*zip(edge[X] * high, edge[Y] * high, strict=True)])]  # fmt: skip
            ax.fill(*zip(*outline, strict=True), color=color, alpha=0.13, linewidth=0, zorder=1)
    ax.set_xlim(left=0)
    ax.yaxis.set_major_formatter("{x:,g}")
    if legend:
        handles = ax.get_legend_handles_labels()[0]
        marks = [Line2D([], [], color=SOFT, marker="o", markersize=4, alpha=0.5, linestyle="none", label="fits"),
                 Line2D([], [], color=SOFT, marker="x", markersize=6, linestyle="none",
                        label="does not fit the memory")]  # fmt: skip
        ax.legend(handles=[*handles[::-1], *marks], loc="upper right")


def configuration(ax: Axes, row: pd.Series, offset: tuple[float, float], color: object = INK) -> None:
    """Names one deployment beside its point."""
    text = f"TP{row['tp']}, batch {row['batch']:g}"
    halo(ax.annotate(text, (row[X], row[Y]), offset, textcoords="offset points", fontsize=8.5, color=color, zorder=6,
                     ha="left" if offset[0] >= 0 else "right", va="center"))  # fmt: skip


def span(ax: Axes, start: float, end: float, text: str) -> None:
    """A stretch of the x axis that a statement is about, named at its top."""
    ax.axvspan(start, end, color=LINE, alpha=0.35, linewidth=0, zorder=0)
    ax.annotate(text, ((start + end) / 2, 1), (0, -4), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="center", va="top", fontsize=8.5, color=SOFT)  # fmt: skip


def claimed(ax: Axes, x: tuple[float, float], y: tuple[float, float], text: str, beside: bool = False) -> None:
    """A field in which the study says that values lie, named in its upper left corner or left of it."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x[0], y[0]), x[1] - x[0], y[1] - y[0], facecolor="#f2b179", alpha=0.28, edgecolor="#c98236",
                           linewidth=0.8, linestyle="--", zorder=1))  # fmt: skip
    ax.annotate(text, (x[0], y[1]), (-5 if beside else 4, -4), textcoords="offset points", va="top",
                ha="right" if beside else "left", fontsize=8.5, color="#8a5317", zorder=5)  # fmt: skip


def by_batch(ax: Axes, frame: pd.DataFrame, y: str, scale: float = 1.0, named: bool = True) -> None:
    """One line per EP over the batch of a DP group; hollow where it does not fit the memory."""
    from moelab.plots.compare import name_ends

    ends = []
    for ep, part in frame.groupby("ep"):
        part = part.sort_values("batch")
        values, color = part[y] * scale, ep_color(ep)
        ax.plot(part["batch"], values, color=color, linewidth=1.8, zorder=3, label=f"EP{ep}")
        fits = part["fits"] if "fits" in part else np.ones(len(part), dtype=bool)
        for chosen, fill in ((fits, color), (~fits, "white")):
            ax.plot(part["batch"][chosen], values[chosen], linestyle="none", marker="o", markersize=5, color=color,
                    markerfacecolor=fill, zorder=4)  # fmt: skip
        ends.append((part["batch"].iloc[-1], values.iloc[-1], f"EP{ep}", color))
    ax.set_xscale("log", base=2)
    places = sorted(frame["batch"].unique())
    ax.set_xticks(places, [f"{p:g}" for p in places])
    ax.minorticks_off()
    if named:
        name_ends(ax, ends)


def outline(ax: Axes, edges: Mapping[int, pd.DataFrame]) -> None:
    """Other frontiers of the same EPs, dotted behind."""
    for ep, edge in edges.items():
        ax.plot(edge[X], edge[Y], color=ep_color(ep), linewidth=1.4, linestyle=":", zorder=3)


def over(ax: Axes, lines: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> None:
    """{EP: (speeds, values)} as lines named at their highest point; the line of 1 is drawn."""
    ax.axhline(1, color=INK, linewidth=1, zorder=2)
    for ep, (speeds, values) in lines.items():
        ax.plot(speeds, values, color=ep_color(ep), linewidth=1.9, zorder=3)
        top = int(np.argmax(values))
        halo(ax.annotate(f"EP{ep}", (speeds[top], values[top]), (0, 5), textcoords="offset points", ha="center",
                         va="bottom", fontsize=9, color=ep_color(ep), weight="bold", zorder=6))  # fmt: skip
    ax.set_ylim(bottom=0)


def small_multiples(
    axes: np.ndarray, rows: Sequence[str], columns: Sequence[str], edges: Mapping[tuple[int, int], Mapping[int, list]]
) -> None:  # fmt: skip
    """{(row, column): {EP: [(speed, throughput), …]}}: frontiers in a grid with names along its sides."""
    for (i, j), found in edges.items():
        ax = axes[i, j]
        for ep, edge in found.items():
            ax.plot(*zip(*edge, strict=True), color=ep_color(ep), linewidth=1.7, marker="o", markersize=2.5,
                    label=f"EP{ep}")  # fmt: skip
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:,g}")
        if i == 0:
            ax.set_title(columns[j], fontsize=10)
        if j == 0:
            ax.set_ylabel(f"{rows[i]}\nper node [tok/s]", fontsize=9.5)
    axes[0, 0].set_xlim(left=0)
    axes[0, -1].legend(*(x[::-1] for x in axes[0, 0].get_legend_handles_labels()), loc="upper right", fontsize=8.5)
