"""Figures in one style: light, one colour per backend and per EP everywhere, axes as "quantity [unit]".

Every function draws on axes that it is given or returns a figure of its own; none computes what it shows. matplotlib
and seaborn are imported when something is drawn, not before.
"""

from __future__ import annotations

from moelab.plots.charts import curves, grouped_lengths, spread, spread_band, stacked
from moelab.plots.compare import differences, dots, dumbbells, key_panel, lines, name_ends, winners
from moelab.plots.deployment import draw_deployment
from moelab.plots.exchange import draw_barrier, draw_regions, matrix
from moelab.plots.layer import draw_layer, draw_schedules
from moelab.plots.roofline import draw_roofs, ladders, roofline_curve, roofline_curves
from moelab.plots.style import (
    backend_color,
    category_color,
    ep_color,
    figure,
    halo,
    label,
    mark,
    roof,
    scheme_color,
    show_missing,
    show_table,
    show_text,
    verdict_style,
    wall,
)

__all__ = [
    "backend_color",
    "category_color",
    "curves",
    "differences",
    "dots",
    "draw_barrier",
    "draw_deployment",
    "draw_layer",
    "draw_regions",
    "draw_roofs",
    "draw_schedules",
    "dumbbells",
    "ep_color",
    "figure",
    "grouped_lengths",
    "halo",
    "key_panel",
    "label",
    "ladders",
    "lines",
    "mark",
    "matrix",
    "name_ends",
    "roof",
    "roofline_curve",
    "roofline_curves",
    "scheme_color",
    "show_missing",
    "show_table",
    "show_text",
    "spread",
    "spread_band",
    "stacked",
    "verdict_style",
    "wall",
    "winners",
]
