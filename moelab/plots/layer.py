"""A layer as stages, and the order in which the schedules run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moelab.plots.style import INK, LINE, arrow, box, canvas, category_color, figure
from moelab.stages import CATEGORIES, MOE_LAYER, Launch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = {1: "S1 project", 2: "S2 attend, route", 3: "S3 send", 4: "S4 experts", 5: "S5 gather"}


def draw_layer() -> Figure:
    """The stages of an MoE layer in their five steps, as `moelab.stages` lists them; dashed: it communicates."""
    from matplotlib.patches import Patch

    columns = {step: [s for s in MOE_LAYER if s.step == step] for step in STEPS}
    tallest = max(map(len, columns.values()))
    fig, ax = canvas(10, 4.3, (0, 10.2), (-0.75, tallest + 0.75))
    for i, (step, stages) in enumerate(columns.items()):
        x = i * 2.06
        ax.text(x + 0.88, tallest + 0.4, STEPS[step], ha="center", va="center", weight="bold", fontsize=11)
        for row, stage in enumerate(stages):
            y = tallest - 1 - row
            box(ax, x, y + 0.1, 1.76, 0.76, category_color(stage.category), INK if stage.communicates else LINE,
                1.5 if stage.communicates else 0.8, dashed=stage.communicates, radius=0.06)  # fmt: skip
            ink = "white" if stage.category in DARK else INK
            ax.text(x + 0.88, y + 0.48, stage.name, ha="center", va="center", fontsize=9.5, color=ink, zorder=4)
        if step < 5:
            arrow(ax, (x + 1.79, tallest - 0.52), (x + 2.03, tallest - 0.52))
    used = [c for c in CATEGORIES if c in {s.category for s in MOE_LAYER}]
    squares = [Patch(facecolor=category_color(c), edgecolor=LINE, label=c) for c in used]
    ax.legend(handles=squares, loc="lower left", ncols=len(used), handlelength=1, handleheight=1, handletextpad=0.5,
              columnspacing=1.3, borderpad=0, bbox_to_anchor=(0, 0))  # fmt: skip
    return fig


DARK = ("MLA", "GroupGEMM", "Dispatch")  # fills on which the text is white


FILL = {1: "#8fb8de", 2: "#2e9e6b", "send": "#f4b183", "shared": "#d5dae1", 4: "#2f6db3", 5: "#f4b183"}
FLIGHT = "#e8743b"


def draw_schedules(schedules: Mapping[str, Iterable[Launch]]) -> Figure:
    """{title: launches}: the order in which each schedule runs the steps, one row for each micro-batch. Every step is
    as wide as another: this is order, not time. A line below a row: an exchange is in flight while others compute."""
    chips = [_chips(launches) for launches in schedules.values()]
    heights = [1 + max(chip.micro for chip in row) for row in chips]
    fig, axes = figure(
        len(chips), 1, width=10, height=0.52 * sum(heights) + 0.5 * len(chips), squeeze=False,
        height_ratios=heights,
    )  # fmt: skip
    widest = max(row[-1].end for row in chips)
    for ax, title, row in zip(axes[:, 0], schedules, chips, strict=True):
        micros = 1 + max(chip.micro for chip in row)
        for chip in row:
            y = micros - 1 - chip.micro
            width = chip.end - chip.start - 0.04
            fill = FILL.get(chip.text) or FILL[chip.step]
            box(ax, chip.start + 0.02, y + 0.22, width, 0.66, fill, LINE, 0.7, radius=0.05)
            ink = "white" if chip.step in (2, 4) else INK
            ax.text((chip.start + chip.end) / 2, y + 0.55, chip.text, ha="center", va="center", color=ink,
                    fontsize=9 if len(chip.text) < 4 else 7.5, zorder=4)  # fmt: skip
        for start, end, micro in _flights(row):
            y = micros - 1 - micro + 0.1
            ax.plot([start, end], [y, y], color=FLIGHT, linewidth=3, solid_capstyle="butt", zorder=5)
        ax.set(xlim=(0, widest), ylim=(-0.02, micros))
        ax.set_title(title, fontsize=10.5)
        ax.axis("off")
    return fig


@dataclass
class _Chip:
    """What runs from `start` to `end`: a step, or one half of step 3."""

    micro: int
    layer: int
    step: int
    text: str
    start: float
    end: float


def _chips(launches: Iterable[Launch]) -> list[_Chip]:
    row: list[_Chip] = []
    halves = {"dispatch_send": "send", "shared_expert": "shared"}
    for launch in launches:
        name, step = launch.stage.name, launch.stage.step
        text = halves.get(name, str(step))
        last = row[-1] if row else None
        if last and (last.micro, last.layer, last.text[-len(text) :]) == (launch.micro_batch, launch.layer, text):
            continue
        start = last.end if last else 0.0
        micro = "AB"[launch.micro_batch]
        label = text if name in halves else f"{micro}{text}"
        row.append(_Chip(launch.micro_batch, launch.layer, step, label, start, start + 1))
    return row


def _flights(row: list[_Chip]) -> Iterator[tuple[float, float, int]]:
    """(from, to, micro-batch): between a send and its receive, where anything stands between."""
    for chip in row:
        wanted = {"send": 4}.get(chip.text, 5 if chip.step == 4 else None)
        if wanted is None:
            continue
        ends = [c.start for c in row if (c.micro, c.layer, c.step) == (chip.micro, chip.layer, wanted)]
        if ends and ends[0] > chip.end:
            yield chip.end, ends[0], chip.micro
