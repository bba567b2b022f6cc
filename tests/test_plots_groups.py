"""Groups of unequal batches over time: work as high as its places, padding hatched, nothing over another."""

from __future__ import annotations

import matplotlib
import pytest

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402

from moelab import plots  # noqa: E402
from moelab.bench.groups import Block, Lane  # noqa: E402
from moelab.perf import padding  # noqa: E402
from moelab.plots import groups as draw  # noqa: E402
from moelab.results import Provenance, Record  # noqa: E402
from moelab.stages import MOE_LAYER  # noqa: E402
from tests.test_plots import overlapping  # noqa: E402

HERE = Provenance("cpu", 0, "", {}, "0123456", False)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def lane(group, requests, places):
    """Agreeing, laying out, and every stage of a layer for a millisecond."""
    names = ["agree", "fill", *(stage.name for stage in MOE_LAYER), "head"]
    return Lane(group, requests, places, [Block(name, 1e3 * i, 1e3 * (i + 1)) for i, name in enumerate(names)])


def bars(ax, look):
    """(left, width, foot, height) of what has this look."""
    fill = to_hex(draw.LOOKS[look]["facecolor"])
    return [
        (p.get_x(), p.get_width(), p.get_y(), p.get_height()) for p in ax.patches
        if to_hex(p.get_facecolor()) == fill and p.get_hatch() == draw.LOOKS[look].get("hatch")
    ]  # fmt: skip


def test_work_is_as_high_as_its_places():
    fig, ax = plots.figure(width=12, height=4)
    full, mostly_padding = lane(0, 16, 16), lane(1, 4, 16)
    draw.over_time(ax, [full, mostly_padding], full.end_us / 1e3)
    own, padded = bars(ax, draw.REQUESTS), bars(ax, draw.PADDING)
    of_full = [b for b in own if b[2] > 1]
    assert {round(height, 6) for *_, height in of_full} == {draw.TALL}
    of_padded = [b for b in own if b[2] < 1]
    assert {round(height, 6) for *_, height in of_padded} == {round(draw.TALL / 4, 6)}
    assert {(left, width) for left, width, *_ in padded} == {(left, width) for left, width, *_ in of_padded}
    assert {round(foot, 6) for *_, foot, _ in padded} == {round(0.1 + draw.TALL / 4, 6)}
    # Each stage's time is drawn once: own rows, experts, exchange, and what comes before.
    spent = {look: sum(w for _, w, foot, _ in bars(ax, look) if foot > 1) for look in draw.LOOKS}
    exchange = sum(stage.communicates and stage.name in draw.EXCHANGES for stage in MOE_LAYER)
    own_rows = len(MOE_LAYER) + 1 - exchange - len(draw.EXPERTS)
    assert list(spent.values()) == pytest.approx([own_rows, 0, len(draw.EXPERTS), exchange, 1, 1])
    draw.key(ax)
    assert not overlapping(fig)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["group 1\n4 of 16 places", "group 0\n16 of 16 places"]


def test_an_idle_group_has_a_lane():
    fig, ax = plots.figure(width=12, height=4)
    draw.over_time(ax, [lane(0, 0, 0), lane(1, 3, 3)], 24)
    assert all(foot < 1 for _, _, foot, _ in bars(ax, draw.REQUESTS)) and not overlapping(fig)
    draw.over_time(plots.figure()[1], [lane(0, 0, 0)], 20)


def record(us):
    samples = [0.9 * us, us, 1.3 * us]
    return Record.from_samples(samples, bench="groups", metric="step", unit="us", clock="wall", provenance=HERE)


def test_ways_share_a_colour_and_are_told_apart():
    fig, ax = plots.figure()
    ways = {"own": record(1e4), "padded, host": record(2e4), "padded, device": record(1.5e4)}
    draw.by_way(ax, {"1 and 64": ways, "16 and 128": ways})
    points = [line for line in ax.get_lines() if line.get_marker() == "o"]
    assert [p.get_xdata()[0] for p in points] == pytest.approx([10, 20, 15] * 2)
    faces = [to_hex(p.get_markerfacecolor()) for p in points[:3]]
    assert faces[0] != faces[1] and faces[2] == "#ffffff" and points[1].get_color() == points[2].get_color()
    names = [t.get_text() for t in ax.get_legend().get_texts()]
    assert names == list(ways) and not overlapping(fig)


def test_waste_marks_each_case_on_the_curve():
    fig, ax = plots.figure()
    cases = {"8 and 8": padding.places([8, 8]), "1 and 64": padding.places([1, 64]), "7 × 1 and 64":
             padding.places([1] * 7 + [64])}  # fmt: skip
    draw.waste(ax, cases)
    assert [t.get_text() for t in ax.texts] == [
        "own sizes, one for every number: none",
        "8 and 8: 0 %",
        "1 and 64: 49 %",
        "7 × 1 and 64: 86 %",
    ]
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.get_lines() if line.get_marker() == "o"]
    assert dots == [(p.common / p.requests, pytest.approx(100 * p.common_waste)) for p in cases.values()]
    assert ax.get_xlim()[1] > dots[-1][0] and not overlapping(fig)
