"""Drafts: how many are accepted, and what is left of them when the step has been paid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moelab.plots.style import INK, halo

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def acceptance(
    ax: Axes, series: Mapping[str, tuple[Sequence[float], Sequence[float], object]],
    known: Mapping[str, float] | None = None,
) -> None:  # fmt: skip
    """{name: (share accepted by depth, standard errors, colour)} as bars side by side, with two standard errors and the
    percentage on top. `known`: {name: share} of the first draft from elsewhere, as diamonds left of it."""
    width = 0.8 / len(series)
    for j, (name, (shares, errors, color)) in enumerate(series.items()):
        at = np.arange(1, len(shares) + 1) + (j - (len(series) - 1) / 2) * width
        values, spread = 100 * np.array(shares), 200 * np.array(errors)
        ax.bar(at, values, 0.92 * width, color=color, label=name, zorder=2)
        ax.errorbar(at, values, yerr=spread, color=INK, linestyle="none", elinewidth=1.3, capsize=3, zorder=3)
        for x, y, e in zip(at, values, spread, strict=True):
            ax.annotate(
                f"{y:.0f}", (x, y + e), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=9
            )
    for (name, share), fill in zip((known or {}).items(), (INK, "white"), strict=False):
        ax.plot(0.54, 100 * share, marker="D", markersize=7, color=INK, markerfacecolor=fill, linestyle="none",
                label=name, zorder=4)  # fmt: skip
    deepest = max(len(shares) for shares, *_ in series.values())
    ax.set(xlim=(0.5, deepest + 0.5), ylim=(0, 112), xticks=range(1, deepest + 1), yticks=range(0, 101, 20))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper right")


def balance(
    ax: Axes, tokens: Sequence[float], step: Sequence[float], spread: Sequence[tuple[float, float]] = (),
    named: bool = True,
) -> None:  # fmt: skip
    """By number of drafts from 0: tokens of a step and time of a step, both over those without drafts, and the speed
    that is their quotient, with its values. `spread`: of the time, over its middle without drafts (p20, p80)."""
    n = np.arange(len(tokens))
    tokens, step = np.array(tokens) / tokens[0], np.array(step) / step[0]
    drawn = ((tokens, "tokens of a step", "#029e73"), (step, "time of a step", "#d55e00"),
             (tokens / step, "speed of a request", "#0173b2"))  # fmt: skip
    for values, name, color in drawn:
        bold = name.startswith("speed")
        ax.plot(n, values, color=color, marker="o", markersize=7 if bold else 5,
                linewidth=2.6 if bold else 1.6, label=name, zorder=4 if bold else 3)  # fmt: skip
    if spread:
        low, high = (np.array(side) for side in zip(*spread, strict=True))
        ax.errorbar(
            n, step, yerr=[step - low, high - step], color="#d55e00", linestyle="none", elinewidth=1.4, capsize=3
        )
    for x, y, below in zip(n[1:], (tokens / step)[1:], step[1:], strict=True):
        up = 0 < y - below < 0.2  # beneath the dot stands the time's
        halo(ax.annotate(f"{y:.2f}", (x, y), (0, 9 if up else -9), textcoords="offset points", ha="center", fontsize=9,
                         va="bottom" if up else "top", color="#0173b2", weight="bold", zorder=6))  # fmt: skip
    ax.axhline(1, color=INK, linewidth=1, zorder=1)
    ax.set(xticks=n, xlim=(-0.15, n[-1] + 0.25))
    if named:
        ax.legend(loc="upper left")
