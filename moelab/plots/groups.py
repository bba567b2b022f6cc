"""DP groups with different batches: their steps over time, side by side by the way they ran, and what is padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moelab.plots.compare import name_ends
from moelab.plots.style import INK, LINE, SOFT, backend_color, category_color, halo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moelab.bench.groups import Block, Lane
    from moelab.perf.padding import Places
    from moelab.results import Record

EXCHANGES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
EXPERTS = ("gate_up", "silu_mul_quant", "down")
OTHERS = ("agree", "fill", *EXCHANGES, *EXPERTS)  # what is no work on a group's own rows
LOOKS = {
    "own rows: requests": {"facecolor": category_color("MLA"), "edgecolor": "none"},
    "own rows: padding": {"facecolor": "white", "edgecolor": category_color("MLA"), "hatch": "/////"},
    "experts, rows of all groups": {"facecolor": category_color("GroupGEMM"), "edgecolor": "none"},
    "exchange, waiting for others included": {"facecolor": category_color("Combine"), "edgecolor": "none"},
    "agreeing on the largest, waiting included": {"facecolor": category_color("router"), "edgecolor": "none"},
    "laying out": {"facecolor": category_color("other"), "edgecolor": "none"},
}
REQUESTS, PADDING, EXPERT, EXCHANGE, AGREE, FILL = LOOKS
KIND = {"agree": AGREE, "fill": FILL} | dict.fromkeys(EXCHANGES, EXCHANGE) | dict.fromkeys(EXPERTS, EXPERT)
WAY = {"own": "nvshmem", "padded": "dense-padded"}  # by which backend's colour
TALL, FLAT = 0.78, 0.16  # heights of a full step's work, and of what is no work


def over_time(ax: Axes, lanes: Sequence[Lane], longest_ms: float) -> None:
    """A lane for each group, the first on top, over `longest_ms`. Work on its own rows is as high as it has places, the
    part of its requests full and that of padding hatched; what is none stands at the foot."""
    widest = max(lane.places for lane in lanes) or 1
    names = {}
    for row, lane in enumerate(reversed(lanes)):
        foot = row + 0.1
        names[foot + TALL / 2] = f"group {lane.group}\n{lane.requests} of {lane.places} places"
        ax.axhline(foot, color=LINE, linewidth=0.8, zorder=1)
        for kind, start, end in _runs(lane.blocks):
            if kind != REQUESTS:
                _bar(ax, start, end, foot, FLAT, kind)
                continue
            own = TALL * lane.requests / widest
            _bar(ax, start, end, foot, own, REQUESTS)
            _bar(ax, start, end, foot + own, TALL * lane.places / widest - own, PADDING)
        end = lane.end_us / 1e3
        ax.plot([end, end], [foot, foot + TALL], color=INK, linewidth=1.4, zorder=5)
        halo(ax.annotate(f"{end:,.0f} ms", (end, foot + TALL), (4, -2), textcoords="offset points", va="top",
                         fontsize=9, zorder=6))  # fmt: skip
    ax.set_yticks(list(names), list(names.values()))
    ax.set(xlim=(0, 1.09 * longest_ms), ylim=(0, len(lanes)))
    ax.grid(axis="y", visible=False)


def key(ax: Axes, inches: float = 0.6) -> None:
    """What the looks of `over_time` mean, so far under the axes."""
    from matplotlib.patches import Patch

    squares = [Patch(label=name, linewidth=0.8, **look) for name, look in LOOKS.items()]
    height = ax.get_position().height * ax.figure.get_figheight()
    ax.legend(handles=squares, loc="upper left", bbox_to_anchor=(-0.1, -inches / height), ncols=3, handlelength=1.5,
              columnspacing=1.6)  # fmt: skip


def by_way(ax: Axes, rows: Mapping[str, Mapping[str, Record]], scale: float = 1e-3) -> None:
    """{row: {way: Record}} as medians with bars from p20 to p80, the first row on top, from 0. Ways that begin alike
    have one colour: "padded", and whatever "padded, …" says of it with a hollow dot."""
    seen: dict[str, int] = {}
    for i, records in enumerate(rows.values()):
        ax.axhline(i, color=LINE, linewidth=0.8, zorder=1)
        for j, (way, record) in enumerate(records.items()):
            at = i + 0.2 * (j - (len(records) - 1) / 2)
            low, middle, high = (scale * x for x in (record.p20, record.p50, record.p80))
            color = backend_color(WAY[way.split(",")[0]])
            ax.errorbar(middle, at, xerr=[[middle - low], [high - middle]], color=color, marker="o", markersize=6.5,
                        elinewidth=1.8, capsize=3.5, linestyle="none", zorder=3,
                        markerfacecolor=color if seen.setdefault(way.split(",")[0], j) == j else "white",
                        label=None if way in ax.get_legend_handles_labels()[1] else way)  # fmt: skip
    ax.set(yticks=range(len(rows)), ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticklabels(list(rows))
    ax.set_xlim(left=0)
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def waste(ax: Axes, cases: Mapping[str, Places]) -> None:
    """Share of padding at a common size, over the largest batch by the mean; `cases`, {batches: places}, as dots on the
    curve."""
    most = 2.5 * max(2.0, *(place.common / place.requests for place in cases.values()))
    ratios = [most ** (i / 200) for i in range(201)]
    ax.plot(ratios, [100 * (1 - 1 / x) for x in ratios], color=backend_color(WAY["padded"]), linewidth=1.8, zorder=2)
    ax.axhline(0, color=backend_color(WAY["own"]), linewidth=1.8, zorder=2)
    ax.annotate(
        "own sizes, one for every number: none",
        (most, 0),
        (-4, 5),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=SOFT,
    )
    ax.set_xscale("log", base=2)
    ticks = [2**i for i in range(10) if 2**i <= most]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.xaxis.minorticks_off()
    ax.set(xlim=(0.93, most), ylim=(-10, 100))
    ends = [(place.common / place.requests, 100 * place.common_waste, name) for name, place in cases.items()]
    for x, y, _ in ends:
        ax.plot(x, y, marker="o", markersize=7, color=backend_color(WAY["padded"]), zorder=3)
    # To the lower right, clear of the curve, and where nothing is padded of the line of own sizes.
    name_ends(ax, [(1.04 * x, y - 5, f"{name}: {y:.0f} %", INK) for x, y, name in ends])


def _runs(blocks: Sequence[Block]) -> list[tuple[str, float, float]]:
    """(kind, start, end) in ms; blocks of one kind that follow one another are one."""
    found: list[tuple[str, float, float]] = []
    for what, start, end in blocks:
        kind = KIND.get(what, REQUESTS)
        if found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1], end / 1e3
        else:
            found.append((kind, start / 1e3, end / 1e3))
    return found


def _bar(ax: Axes, start: float, end: float, foot: float, height: float, look: str) -> None:
    if end > start and height > 0:
        ax.bar(start, height, end - start, foot, align="edge", linewidth=0.5, zorder=2, **LOOKS[look])
