"""The exchange: private regions, the barrier, and who sends how much to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moelab.plots.style import INK, LINE, PAINT, PANEL, SOFT, arrow, box, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_regions(counts: np.ndarray, max_tokens: int, rank: int, first_expert: int) -> Figure:
    """What rank `rank` receives in one dispatch: its symmetric buffer, with a region of `max_tokens` slots for every
    (sender, local expert), and the rows as the grouped GEMM wants them. `counts` [senders, local experts]."""
    senders, local = counts.shape
    fig, ax = canvas(10, 0.62 * senders + 2.15, (0, 10), (-1.25, senders * 0.8 + 0.65))
    top = senders * 0.8
    ax.text(0, top + 0.42, "senders", weight="bold", fontsize=10.5, va="center")
    ax.text(1.75, top + 0.42, f"symmetric buffer of rank {rank}: a region per (sender, expert)", weight="bold",
            fontsize=10.5, va="center")  # fmt: skip
    ax.text(7.2, top + 0.42, "rows for the grouped GEMM", weight="bold", fontsize=10.5, va="center")
    width = 4.7 / local
    for s in range(senders):
        y = top - (s + 1) * 0.8
        box(ax, 0, y + 0.12, 0.95, 0.56, PAINT[s % len(PAINT)], LINE, radius=0.05)
        ax.text(0.47, y + 0.4, f"rank {s}", ha="center", va="center", fontsize=9.5, zorder=4)
        arrow(ax, (1.0, y + 0.4), (1.7, y + 0.4))
        for e in range(local):
            x = 1.75 + e * width
            box(ax, x, y + 0.12, width - 0.12, 0.56, "white", LINE)
            filled = counts[s, e] / max_tokens * (width - 0.12)
            if counts[s, e]:
                box(ax, x, y + 0.12, filled, 0.56, PAINT[s % len(PAINT)], LINE, 0.5)
            ax.text(x + width - 0.18, y + 0.4, f"{counts[s, e]} + 1", ha="right", va="center", fontsize=8.5, zorder=4)
    for e in range(local):
        ax.text(1.75 + e * width + (width - 0.12) / 2, top + 0.05, f"expert {first_expert + e}", ha="center",
                va="center", fontsize=8.5, color=SOFT)  # fmt: skip
    arrow(ax, (6.5, top / 2), (7.1, top / 2))
    total, height = counts.sum(0), (top - 0.1) / local
    scale = 1.7 / max(1, total.max())
    for e in range(local):
        y, x = top - (e + 1) * height, 8.0
        ax.text(7.9, y + 0.45 * height, f"expert {first_expert + e}", va="center", ha="right", fontsize=8.5, color=SOFT)
        for s in range(senders):
            box(ax, x, y + 0.12 * height, counts[s, e] * scale, 0.66 * height, PAINT[s % len(PAINT)], LINE, 0.5)
            x += counts[s, e] * scale
        ax.text(x + 0.06, y + 0.45 * height, f"{total[e]}", va="center", fontsize=8.5, color=SOFT)
    notes = (
        f"Each region holds max_tokens = {max_tokens} rows, so a sender knows its addresses without asking anybody.",
        "The number in a region is the signal beside it, count + 1: zero rows then differ from nothing sent yet.",
    )
    for i, note in enumerate(notes):
        ax.text(0, -0.45 - 0.42 * i, note, fontsize=9.5, color=SOFT, va="center")
    return fig


def draw_barrier() -> Figure:
    """An exchange on three ranks, and why the next must not begin too early. Schematic, not to scale."""
    parts = (("dispatch\nsend", 1.15), ("shared\nexpert", 1.0), ("dispatch\nrecv", 1.15), ("experts", 1.4),
             ("combine\nsend", 1.15), ("combine\nrecv", 1.1))  # fmt: skip
    fills = ("#f4b183", "#dfe5ec", "#f4b183", "#8fb8de", "#f7d3ae", "#f7d3ae")
    late = (0.0, 0.1, 1.1)
    entered = max(late) + sum(width for _, width in parts[:4])  # the last rank enters combine_send
    ranks = len(late)
    fig, ax = canvas(10, 3.75, (-0.9, 10.2), (-1.3, ranks + 0.4))
    for rank, x in enumerate(late):
        y = ranks - 1 - rank
        ax.text(-0.85, y + 0.45, f"rank {rank}", fontsize=10, va="center")
        for i, (name, width) in enumerate(parts):
            end = x + width if i < len(parts) - 1 else max(x + width, entered + 0.85 + 0.2 * rank)
            box(ax, x, y + 0.12, end - x - 0.05, 0.66, fills[i], LINE, radius=0.04)
            ax.text((x + end - 0.05) / 2, y + 0.45, name, ha="center", va="center", fontsize=8.5, zorder=6)
            x = end
        box(ax, x, y + 0.12, 1.1, 0.66, fills[0], INK, 1.4, radius=0.04)
        ax.text(x + 0.55, y + 0.45, "next\nsend", ha="center", va="center", fontsize=8.5, zorder=6)
    ax.plot([entered - 0.025] * 2, [0, ranks + 0.1], color=INK, linestyle="--", linewidth=1.5, zorder=5)
    ax.text(entered, ranks + 0.25, "the barrier: every rank has entered combine_send", ha="center", va="center",
            fontsize=10, weight="bold")  # fmt: skip
    notes = (
        "Kernels write into fixed regions. Who has entered combine_send has read all that it was dispatched,",
        "so combine_recv returns only when it has seen that flag of every peer: the next send then overwrites nothing.",
        "Sends never wait, and the barrier costs little: combine_recv waits for the same peers' data anyway.",
    )
    for i, note in enumerate(notes):
        ax.text(-0.85, -0.28 - 0.38 * i, note, fontsize=9.5, color=SOFT, va="center")
    return fig


def matrix(ax: Axes, values: np.ndarray, title: str = "", unit: str = "rows", top: float | None = None,
           x: str = "to", y: str = "from", ticks: tuple[list[str], list[str]] | None = None) -> None:  # fmt: skip
    """A matrix [from, to] as shades with its numbers; `top`: the value of the darkest shade, to share it between
    several matrices."""
    import matplotlib

    top = float(values.max()) if top is None else top
    shades = matplotlib.colormaps["Blues"]
    ax.imshow(values, cmap=shades, vmin=0, vmax=top * 1.15, aspect="auto")
    rows, columns = values.shape
    for i in range(rows):
        for j in range(columns):
            ink = "white" if values[i, j] > 0.55 * top else INK
            size = 9.5 if columns < 9 else 7.5
            ax.text(j, i, f"{values[i, j]:,.0f}", ha="center", va="center", fontsize=size, color=ink)
    across, down = ticks or ([str(j) for j in range(columns)], [str(i) for i in range(rows)])
    ax.set_xticks(range(columns), across)
    ax.set_yticks(range(rows), down)
    ax.grid(False)
    ax.set_facecolor(PANEL)
    ax.set(xlabel=x, ylabel=y)
    ax.set_title(f"{title} [{unit}]" if title else f"[{unit}]", fontsize=10.5)
