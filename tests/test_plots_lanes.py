"""Timelines: a block for every stage at its time, flights with what was waited, no text over another."""

from __future__ import annotations

import matplotlib
import pytest

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402

from moelab import plots  # noqa: E402
from moelab.perf import timeline  # noqa: E402
from moelab.perf.overlap import MicroBatch  # noqa: E402
from moelab.perf.timeline import Shares  # noqa: E402
from moelab.plots import lanes  # noqa: E402
from moelab.stages import MOE_LAYER  # noqa: E402
from tests.test_plots import overlapping  # noqa: E402

US = {s.name: 10.0 for s in MOE_LAYER} | {"dispatch_recv": 4.0, "combine_recv": 0.0, "tp_reduce": 0.0}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def blocks(ax):
    """(left, width, bottom, colour, hatch) of what is drawn, without lines."""
    return [(p.get_x(), p.get_width(), p.get_y(), to_hex(p.get_facecolor()), p.get_hatch()) for p in ax.patches]


@pytest.mark.parametrize("schedule", ["none", "dispatch", "microbatch"])
def test_every_span_is_drawn_where_it_was(schedule):
    parts = [MicroBatch(US, 60, 90)] * (2 if schedule == "microbatch" else 1)
    spans, flights = timeline.trace(schedule, 2, parts)
    fig, ax = plots.figure(width=12, height=4)
    lanes.draw(ax, spans, flights, scale=1e-3)
    drawn = blocks(ax)
    assert [t.get_text() for t in ax.get_yticklabels()][:2] == ["A: GPU", "A: wire"]
    for span in spans:
        color = to_hex(plots.category_color(lanes.STAGE[span.stage].category))
        if span.stage not in lanes.PAIRS and span.end_us > span.start_us:
            at = [b for b in drawn if b[0] == pytest.approx(span.start_us / 1e3) and b[3] == color]
            assert any(width == pytest.approx((span.end_us - span.start_us) / 1e3) for _, width, *_ in at), span
    waited = sorted(f.waited_us / 1e3 for f in flights if f.waited_us)
    assert sorted(width for _, width, *_, hatch in drawn if hatch) == pytest.approx(waited)
    # What a flight's bar shows dark is what was waited for it.
    for f in flights:
        of_wire = [b for b in drawn if b[0] + b[1] == pytest.approx(f.end_us / 1e3) and not b[4]
                   and b[3] == to_hex(plots.category_color(f.category))]  # fmt: skip
        assert any(width == pytest.approx((f.waited_us or f.end_us - f.start_us) / 1e3) for _, width, *_ in of_wire)
    assert not overlapping(fig)
    assert ax.get_xlim() == pytest.approx((0, spans[-1].end_us / 1e3))


def test_unknown_flights_last_until_the_receive_is_over():
    spans, _ = timeline.trace("dispatch", 1, [MicroBatch(US, 60, 90)])
    at = {s.stage: s for s in spans}
    _, ax = plots.figure()
    lanes.draw(ax, spans, device="CPU")
    assert not [b for b in blocks(ax) if b[4]]
    wire = [(left, width) for left, width, bottom, *_ in blocks(ax) if bottom < 1]
    hidden = at["shared_expert"]
    assert (hidden.start_us, 10) in [(pytest.approx(x), pytest.approx(w)) for x, w in wire]
    receive = at["dispatch_recv"]
    assert (receive.start_us, receive.end_us - receive.start_us) in [
        (pytest.approx(x), pytest.approx(w)) for x, w in wire
    ]


def test_shares_are_stacked_and_said():
    fig, ax = plots.figure()
    lanes.communication(ax, {"EP8": Shares(100, 0, 0), "EP128": Shares(10, 60, 30)})
    assert [t.get_text() for t in ax.texts] == ["100 µs, 0 % hidden", "100 µs, 60 % hidden"]
    assert sorted(p.get_width() for p in ax.patches) == [10, 30, 60, 100] and not overlapping(fig)
