"""A step as lanes over time: what each micro-batch computes, and what it has on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from moelab.plots.style import INK, LINE, SOFT, category_color
from moelab.stages import CATEGORIES, DENSE, MOE_LAYER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moelab.perf.timeline import Flight, Shares, Span

STAGE = {stage.name: stage for stage in (*MOE_LAYER, *DENSE)}
PAIRS = {"dispatch_recv": "dispatch_send", "combine_recv": "combine_send"}
WAIT = "waits"
DARK = ("MLA", "GroupGEMM", "Dispatch")  # fills on which the text is white


class _Wire(NamedTuple):
    micro_batch: int
    category: str
    start_us: float
    end_us: float
    waited_us: float


def draw(
    ax: Axes, spans: Sequence[Span], flights: Sequence[Flight] | None = None, *, device: str = "GPU",
    window: tuple[float, float] | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Two lanes for each micro-batch: its stages on the `device`, in the colours of their kinds and named by their
    steps, and its rows on the wire, dark where the device stands and waits for them.

    spans: as `moelab.perf.timeline.trace` or `moelab.engine.timeline.Timeline` has them. flights: of the same trace;
    None: not known, so an exchange is drawn from its send's end to its receive's. window: what is shown, us. scale:
    from us to the axis' unit."""
    low, high = (scale * x for x in window or (spans[0].start_us, spans[-1].end_us))
    micros = sorted({s.micro_batch for s in spans})
    lane = {m: 2 * (len(micros) - 1 - i) for i, m in enumerate(micros)}
    wires = _outstanding(spans) if flights is None else [_Wire(f.micro_batch, *f[2:]) for f in flights]
    for layer in sorted({s.layer for s in spans}):
        start = scale * min(s.start_us for s in spans if s.layer == layer)
        if low <= start < high:
            ax.axvline(start, color=SOFT, linewidth=0.9, linestyle=":", zorder=1)
    waits = {(w.micro_batch, round(w.end_us, 6)): w.waited_us for w in wires} if flights is not None else {}
    for span in spans:
        _block(ax, span, lane[span.micro_batch] + 1, scale, waits)
    for (micro, _, step), group in groupby(spans, key=lambda s: (s.micro_batch, s.layer, STAGE[s.stage].step)):
        parts = list(group)
        start, end = max(low, scale * parts[0].start_us), min(high, scale * parts[-1].end_us)
        if end - start > 0.015 * (high - low):
            ax.text((start + end) / 2, lane[micro] + 1.87, f"{'AB'[micro]}{step}", ha="center", va="bottom",
                    fontsize=8.5, color=INK, zorder=6)  # fmt: skip
    for wire in wires:
        _flight(ax, wire, lane[wire.micro_batch], scale, (low, high))
    names = {
        lane[m] + y: name for m in micros for y, name in ((1.45, f"{'AB'[m]}: {device}"), (0.5, f"{'AB'[m]}: wire"))
    }
    ax.set_yticks(list(names), list(names.values()))
    ax.set(xlim=(low, high), ylim=(-0.05, 2 * len(micros) + 0.3))
    ax.grid(axis="y", visible=False)


def _block(ax: Axes, span: Span, y: float, scale: float, waits: dict[tuple[int, float], float]) -> None:
    """A stage; the part of a receive in which rows had not come yet is hatched."""
    category = STAGE[span.stage].category
    start, end = scale * span.start_us, scale * span.end_us
    if span.stage in PAIRS and waits:
        arrival = span.start_us + _waited(span, waits)
        if arrival > span.start_us:
            ax.barh(y + 0.45, scale * arrival - start, 0.8, start, color="white", edgecolor=category_color(category),
                    hatch="////", linewidth=0.8, zorder=3)  # fmt: skip
            start = scale * arrival
    if end > start:
        ax.barh(y + 0.45, end - start, 0.8, start, color=category_color(category), edgecolor="white", linewidth=0.4,
                zorder=3)  # fmt: skip


def _waited(span: Span, waits: dict[tuple[int, float], float]) -> float:
    """How long this receive stood: that of the flight of its micro-batch which ended within it."""
    return max((us for (micro, end), us in waits.items()
                if micro == span.micro_batch and span.start_us < end <= span.end_us + 1e-6), default=0.0)  # fmt: skip


def _flight(ax: Axes, wire: _Wire, y: float, scale: float, shown: tuple[float, float]) -> None:
    color = category_color(wire.category)
    start, end = scale * wire.start_us, scale * wire.end_us
    turn = max(start, end - scale * wire.waited_us)
    for left, right, alpha in ((start, turn, 0.4), (turn, end, 1.0)):
        if right > left:
            ax.barh(y + 0.5, right - left, 0.5, left, color=color, alpha=alpha, linewidth=0, zorder=2)
    left, right = max(start, shown[0]), min(end, shown[1])
    if right - left > 0.042 * (shown[1] - shown[0]):
        ax.text((left + right) / 2, y + 0.5, wire.category.lower(), ha="center", va="center", fontsize=8, color=INK,
                zorder=6)  # fmt: skip


def _outstanding(spans: Sequence[Span]) -> list[_Wire]:
    """From each send's end to its receive's end; within the receive the device has nothing else to do."""
    sent, found = {}, []
    for s in spans:
        if s.stage in PAIRS.values():
            sent[s.micro_batch, s.layer, s.stage] = s.end_us
        elif s.stage in PAIRS:
            start = sent[s.micro_batch, s.layer, PAIRS[s.stage]]
            found.append(_Wire(s.micro_batch, STAGE[s.stage].category, start, s.end_us, s.end_us - s.start_us))
    return found


def key(ax: Axes, spans: Sequence[Span], waits: bool = True) -> None:
    """The kinds of kernels among `spans`, as a legend under the axes."""
    from matplotlib.patches import Patch

    used = {STAGE[s.stage].category for s in spans if s.end_us > s.start_us}
    squares = [Patch(facecolor=category_color(c), edgecolor=LINE, label=c) for c in CATEGORIES if c in used]
    if waits:
        squares.append(Patch(facecolor="white", edgecolor=category_color("Dispatch"), hatch="////", label=WAIT))
    ax.legend(handles=squares, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=len(squares), handlelength=1.1,
              handletextpad=0.4, columnspacing=1.0)  # fmt: skip


def communication(ax: Axes, bars: Mapping[str, Shares]) -> None:
    """{name: shares} as bars of time, the first on top: what an exchange's own kernels take, what passes beside other
    work, and hatched what the GPU waits for; the hidden percentage at the end."""
    looks = {"kernels of its own": {"color": category_color("Dispatch")},
             "hidden": {"color": category_color("Combine"), "alpha": 0.45},
             WAIT: {"facecolor": "white", "edgecolor": category_color("Dispatch"), "hatch": "////"}}  # fmt: skip
    longest = max(shares.total for shares in bars.values())
    for i, shares in enumerate(bars.values()):
        start = 0.0
        for look, us in zip(looks.values(), shares, strict=True):
            if us > 0:
                ax.barh(i, us, 0.66, start, zorder=2, linewidth=0.8, **look)
            start += us
        ax.annotate(f"{shares.total:,.0f} µs, {100 * shares.hidden / shares.total:.0f} % hidden", (start, i), (5, 0),
                    textcoords="offset points", va="center", fontsize=9)  # fmt: skip
    ax.set(yticks=range(len(bars)), ylim=(len(bars) - 0.5, -0.5), xlim=(0, 1.32 * longest))
    ax.set_yticklabels(list(bars))
    ax.grid(axis="y", visible=False)
    _look_key(ax, looks)


def _look_key(ax: Axes, looks: Mapping[str, Mapping[str, object]]) -> None:
    from matplotlib.patches import Patch

    squares = [Patch(label=name, linewidth=0.8, **look) for name, look in looks.items()]
    ax.legend(handles=squares, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(looks), borderaxespad=0.2,
              handlelength=1.3, columnspacing=1.2)  # fmt: skip
