"""Figures of imbalance: loads of GPUs around their mean, shares that repeat, λ with what chance alone would make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moelab.plots.style import INK, LINE, PAINT, SOFT, ep_color, halo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUSIEST, OTHERS = "#d55e00", "#8fb8de"


def gpu_loads(ax: Axes, loads: np.ndarray, title: str = "") -> None:
    """Rows of each GPU over their mean, the busiest one dark, which the step waits for; λ named on it."""
    share = np.asarray(loads) / np.mean(loads)
    top = int(np.argmax(share))
    ax.bar(range(len(share)), share, color=[BUSIEST if g == top else OTHERS for g in range(len(share))], zorder=2)
    ax.axhline(1, color=INK, linestyle="--", linewidth=1.2, zorder=3)
    halo(ax.annotate(f"λ = {share[top]:.2f}", (top, share[top]), (0, 3), textcoords="offset points", ha="center",
                     va="bottom", fontsize=9.5, color=BUSIEST, weight="bold", zorder=5))  # fmt: skip
    ax.set_xticks(range(len(share)))
    ax.grid(axis="x", visible=False)
    ax.set_title(title, fontsize=10.5)


def repeats(ax: Axes, first: np.ndarray, second: np.ndarray) -> None:
    """Shares [layers, E] of experts in two sets of texts against each other: on the diagonal they repeat."""
    low, high = min(first.min(), second.min()), max(first.max(), second.max())
    ends = [low - 0.08 * (high - low), high + 0.08 * (high - low)]
    ax.plot(ends, ends, color=SOFT, linestyle="--", linewidth=1.2, zorder=1)
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        ax.scatter(x, y, s=34, color=PAINT[i % len(PAINT)], edgecolor="white", linewidth=0.6, zorder=3,
                   label=f"MoE layer {i}")  # fmt: skip
    ax.set(xlim=ends, ylim=ends)
    ax.set_aspect("equal")
    ax.legend(loc="upper left", handletextpad=0.2)


def by_tokens(
    ax: Axes, tokens: Sequence[int], measured: Mapping[int, np.ndarray], chance: Mapping[int, np.ndarray]
) -> None:  # fmt: skip
    """{EP: λ [tokens, samples]}: medians with bars from p20 to p80, and the medians of chance alone, dashed; each EP
    named at its left end."""
    ax.set_xscale("log", base=2)
    for i, (ep, samples) in enumerate(measured.items()):
        low, middle, high = (np.array([np.percentile(s, p) for s in samples]) for p in (20, 50, 80))
        color, at = ep_color(ep), np.array(tokens) * 1.04 ** (i - (len(measured) - 1) / 2)
        ax.errorbar(at, middle, yerr=[middle - low, high - middle], color=color, marker="o", markersize=5,
                    linewidth=1.8, elinewidth=1.3, capsize=3, zorder=3)  # fmt: skip
        halo(ax.annotate(f"EP{ep}", (tokens[0], middle[0]), (-9, 0), textcoords="offset points", ha="right",
                         va="center", fontsize=9, color=color, weight="bold", zorder=6))  # fmt: skip
    chances(ax, tokens, chance)
    ax.set_xlim(left=tokens[0] / 1.7)
    ax.set_ylim(bottom=1)


def chances(ax: Axes, tokens: Sequence[int], chance: Mapping[int, np.ndarray], named: bool = False) -> None:
    """{EP: λ [tokens, draws]} of even, independent routing: medians, dashed, with p20 to p80 shaded if `named`."""
    ax.set_xscale("log", base=2)
    for ep, samples in chance.items():
        low, middle, high = (np.array([np.percentile(s, p) for s in samples]) for p in (20, 50, 80))
        ax.plot(tokens, middle, color=ep_color(ep), linestyle="--", linewidth=1.5, zorder=2,
                marker="o" if named else None, markersize=4, label=f"EP{ep}")  # fmt: skip
        if named:
            ax.fill_between(tokens, low, high, color=ep_color(ep), alpha=0.15, linewidth=0, zorder=1)
    ax.set_xticks(list(tokens), [f"{t:,g}" for t in tokens])
    ax.minorticks_off()
    if named:
        ax.legend(*(x[::-1] for x in ax.get_legend_handles_labels()), loc="upper right")


def by_copies(ax: Axes, lines: Mapping[str, tuple[Mapping[float, float], object, str]], even: float = 1) -> None:
    """{name: ({redundant copies (or λ): value}, colour, line style)}, named at the right; `even`: where all is even."""
    from moelab.plots.compare import name_ends

    ends = []
    for name, (values, color, style) in lines.items():
        x, y = list(values), list(values.values())
        ax.plot(x, y, color=color, linestyle=style, marker="o", markersize=5, linewidth=1.8, zorder=3)
        ends.append((x[-1], y[-1], name, color))
    ax.axhline(even, color=LINE, linewidth=1.2, zorder=1)
    ax.set_xticks(sorted({x for values, *_ in lines.values() for x in values}))
    name_ends(ax, ends)
