"""A deployment: nodes, the GPUs in them, DP groups, TP ranks, experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moelab.config import ModelConfig, ParallelConfig
from moelab.plots.style import INK, LINE, PAINT, PANEL, SOFT, box, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4  # GPUs side by side in a node


def draw_deployment(parallel: ParallelConfig, model: ModelConfig) -> Figure:
    """One node in detail, and to its left, where there are several, all of them. GPUs of one colour are one DP
    group: they share its requests and cut its attention by heads; every GPU has experts of its own."""
    parallel.check(model)
    nodes = math.ceil(parallel.ep / parallel.gpus_per_node)
    wide = nodes > 1
    per_row = math.ceil(math.sqrt(nodes))
    rows = math.ceil(min(parallel.ep, parallel.gpus_per_node) / COLUMNS)
    left = 4.6 if wide else 0.0
    height = 1.15 * rows + (1.5 if wide else 1.15)
    fig, ax = canvas(10.0 if wide else 6.6, height, (0, left + 6.4), (0, height))
    title = f"EP{parallel.ep} = DP{parallel.dp} × TP{parallel.tp}: {nodes} node{'s' * (nodes > 1)}"
    ax.text(0.05, height - 0.28, title, fontsize=12.5, weight="bold", va="center")
    if wide:
        _all_nodes(ax, parallel, nodes, per_row, (0.05, 0.35, left - 0.45, height - 1.0))
        ax.text(left + 0.1, height - 0.28, "node 0", fontsize=11, va="center", color=SOFT)
    _one_node(ax, parallel, model, left + 0.1, height - 0.55, rows)
    return fig


def _paint(parallel: ParallelConfig, rank: int) -> str:
    return PAINT[parallel.dp_group(rank) % 8]


def _all_nodes(ax: Axes, parallel: ParallelConfig, nodes: int, per_row: int, frame: tuple) -> None:
    x0, y0, width, height = frame
    across, down = per_row, math.ceil(nodes / per_row)
    cell, tall = width / across, height / down
    for node in range(nodes):
        x, top = x0 + node % across * cell, y0 + height - node // across * tall
        edge = INK if node == 0 else LINE
        box(ax, x, top - tall + 0.08, cell - 0.08, tall - 0.08, PANEL, edge, 1.4 if node == 0 else 0.8, radius=0.04)
        ranks = range(node * parallel.gpus_per_node, min((node + 1) * parallel.gpus_per_node, parallel.ep))
        rows = math.ceil(len(ranks) / COLUMNS)
        w, h = (cell - 0.16) / COLUMNS, (tall - 0.36) / rows
        for i, rank in enumerate(ranks):
            column, row = i % COLUMNS, i // COLUMNS
            box(ax, x + 0.04 + column * w + 0.015, top - 0.24 - (row + 1) * h + 0.015, w - 0.03, h - 0.03,
                _paint(parallel, rank), "white", 0.5)  # fmt: skip
        ax.text(x + 0.06, top - 0.13, f"node {node}", fontsize=7, va="center", color=SOFT)
    ax.text(x0, 0.17, "a colour is a DP group (they repeat)", fontsize=9, color=SOFT, va="center")


def _one_node(ax: Axes, parallel: ParallelConfig, model: ModelConfig, x0: float, top: float, rows: int) -> None:
    gpus = min(parallel.gpus_per_node, parallel.ep)
    w, h = 1.5, 1.15
    columns = min(COLUMNS, gpus)
    box(ax, x0, top - rows * h - 0.14, columns * w + 0.14, rows * h + 0.14, PANEL, INK, 1.4, radius=0.06)
    heads = model.num_attention_heads // parallel.tp
    for rank in range(gpus):
        x, y = x0 + 0.1 + rank % COLUMNS * w, top - 0.1 - (rank // COLUMNS + 1) * h
        box(ax, x, y + 0.06, w - 0.06, h - 0.06, "white", LINE, radius=0.04)
        box(ax, x, y + h - 0.28, w - 0.06, 0.28, _paint(parallel, rank), LINE, z=3)
        first = parallel.tp_rank(rank) * heads
        mine = parallel.experts(rank, model.n_routed_experts)
        span = f"{mine[0]}" if len(mine) == 1 else f"{mine[0]}–{mine[-1]}"
        ax.text(x + 0.07, y + h - 0.14, f"rank {rank}", fontsize=9, weight="bold", va="center", zorder=4)
        lines = (f"DP {parallel.dp_group(rank)} · TP {parallel.tp_rank(rank)}", f"heads {first}–{first + heads - 1}",
                 f"expert{'s' * (len(mine) > 1)} {span}")  # fmt: skip
        for i, line in enumerate(lines):
            ax.text(x + 0.07, y + h - 0.43 - 0.21 * i, line, fontsize=8.5, va="center", zorder=4)
    note = "attention: by DP group, cut by heads inside · experts: spread over all GPUs"
    ax.text(x0, top - rows * h - 0.38, note, fontsize=9, color=SOFT, va="center")
