"""Rooflines and charts that set numbers side by side: what is drawn is what was given, no text over another."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402

from moelab import plots  # noqa: E402
from moelab.perf.roofline import Point, Roofs  # noqa: E402
from moelab.plots.compare import apart  # noqa: E402
from moelab.results import Provenance, Record  # noqa: E402
from tests.test_plots import overlapping  # noqa: E402

HERE = Provenance("cpu", 0, "", {"torch": "0"}, "0" * 40, False)
ROOFS = [Roofs("X measured", 4000.0, {"fp8": 1400.0}), Roofs("X data sheet", 5000.0, {"fp8": 2000.0})]


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def record(*samples: float) -> Record:
    return Record.from_samples(samples, bench="b", metric="m", unit="us", clock="wall", provenance=HERE)


def test_roofs_bend_at_their_ridge():
    _, ax = plots.figure()
    plots.draw_roofs(ax, ROOFS, "fp8", (1, 1000), 2)
    for line, roof in zip(ax.lines, ROOFS, strict=True):
        x, y = line.get_data()
        assert list(y) == pytest.approx([roof.attainable(at, "fp8") for at in x])
        assert x[1] == pytest.approx(roof.ridge("fp8")) and line.get_linestyle() == "--"
    names = [text.get_text() for artist in ax.artists for text in artist.get_texts()]
    assert names == ["X measured: 4.00 TB/s, 1,400 TFLOP/s", "X data sheet: 5.00 TB/s, 2,000 TFLOP/s"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log") and ax.get_ylim()[1] > 2000


def test_a_roof_without_a_ceiling_is_a_slope():
    _, ax = plots.figure()
    plots.draw_roofs(ax, [Roofs("copy measured", 4000.0, {})], "fp8", (1, 100), 2)
    assert list(ax.lines[0].get_ydata()) == pytest.approx([4, 400, 400])
    assert [t.get_text() for t in ax.artists[0].get_texts()] == ["copy measured: 4.00 TB/s"]


def test_a_curve_shows_its_spread_and_star():
    _, ax = plots.figure()
    points = [Point(2.0, 10.0, 9.0, 12.0), Point(20.0, 100.0, 98.0, 103.0)]
    plots.roofline_curve(ax, points, "#0173b2", "ours", points[1], "EP8")
    (line, _, (bars,)) = ax.containers[0]
    assert list(line.get_xdata()) == [2, 20] and list(line.get_ydata()) == [10, 100]
    assert [tuple(s[:, 1]) for s in bars.get_segments()] == [(9, 12), (98, 103)]
    star = ax.lines[-1]
    assert (star.get_marker(), *star.get_data()) == ("*", [20.0], [100.0]) and ax.texts[0].get_text() == "EP8"
    plots.roofline_curve(ax, points, "#0173b2", line="", hollow=True)
    assert ax.containers[1].lines[0].get_markerfacecolor() == "white"


def test_names_at_the_ends_do_not_meet():
    fig, ax = plots.figure()
    curves = {f"curve {i}": ({1: 5.0, 2: 10.0 + 0.01 * i, 4: 100.0 * (1 + 0.001 * i)}, "#0173b2") for i in range(6)}
    plots.lines(ax, curves, {"curve 0": ({8: 1.0}, "#949494"), "theirs": ({8: 2.0}, "#949494")})
    assert sorted(t.get_text() for t in ax.texts) == sorted([*curves, "theirs"])
    assert not overlapping(fig)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "2", "4", "8"]


def test_lines_take_records_and_numbers():
    _, ax = plots.figure()
    plots.lines(ax, {"a": ({2: record(1.0, 2.0, 9.0), 48: 3.0}, "#0173b2")}, log=False)
    line, _, (bars,) = ax.containers[0]
    assert list(line.get_ydata()) == [2.0, 3.0] and ax.get_ylim()[0] == 0
    measured = record(1.0, 2.0, 9.0)
    assert tuple(bars.get_segments()[0][:, 1]) == pytest.approx((measured.p20, measured.p80))
    assert tuple(bars.get_segments()[1][:, 1]) == (3.0, 3.0)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["2"]  # 48 is no power of two: a point without a tick


def test_negative_values_are_inside():
    _, ax = plots.figure()
    plots.lines(ax, {"a": ({2: -4.0, 4: 3.0}, "#0173b2")}, log=False)
    assert ax.get_ylim()[0] < -4 < 3 < ax.get_ylim()[1]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_apart(count):
    places = np.sort(np.random.default_rng(count).uniform(0, 30, count))
    moved = apart(places, 10.0)
    assert np.all(np.diff(moved) >= 10.0 - 1e-9)
    assert moved.mean() == pytest.approx(places.mean()) or len({*moved - places}) > 1
    assert apart(np.array([0.0, 50.0]), 10.0).tolist() == [0.0, 50.0]
    assert apart(np.array([0.0, 2.0, 50.0]), 10.0).tolist() == [-4.0, 6.0, 50.0]


def test_shared_axes_are_labelled_outside():
    _, axes = plots.figure(2, 2, sharex=True, sharey=True)
    for ax in axes.flat:
        plots.label(ax, "time [us]", "rate [1]")
    assert [ax.get_xlabel() for ax in axes.flat] == ["", "", "time [us]", "time [us]"]
    assert [ax.get_ylabel() for ax in axes.flat] == ["rate [1]", "", "rate [1]", ""]
    _, axes = plots.figure(1, 2)
    for ax in axes:
        plots.label(ax, "time [us]", "rate [1]")
    assert [ax.get_ylabel() for ax in axes] == ["rate [1]", "rate [1]"]


def test_dots_and_their_key():
    fig, ax = plots.figure()
    plots.dots(ax, {"x": {"a": 0.1, "b": 0.2}, "y": {"b": 3.0}}, {"a": "#0173b2", "b": "#de8f05"})
    drawn = {(line.get_color(), *line.get_xdata()) for line in ax.lines if line.get_linestyle() == "None"}
    assert drawn == {("#0173b2", 0.1), ("#de8f05", 0.2), ("#de8f05", 3.0)}
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["x", "y"] and ax.yaxis_inverted()
    assert not overlapping(fig)


def test_dumbbells_say_the_difference():
    fig, ax = plots.figure()
    plots.dumbbells(ax, {"x": (10.0, 14.5), "y": (9.0, 8.0)}, "#0173b2", ("whole", "halves"), "µs")
    assert [t.get_text() for t in ax.texts] == ["+4.5 µs", "-1.0 µs"]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["whole", "halves"]
    assert ax.get_xlim()[0] == 0 and not overlapping(fig)


def test_differences_have_two_standard_errors():
    _, ax = plots.figure()
    plots.differences(
        ax, {"x": [(0.1, 0.02), (0.3, 0.01)], "y": [(0.0, 0.5), None]}, {"now": "#0173b2", "big": "#d55e00"}
    )
    first, second = ax.containers
    assert list(first.lines[0].get_xdata()) == [0.1, 0.0] and list(second.lines[0].get_xdata()) == [0.3]
    assert tuple(first.lines[2][0].get_segments()[0][:, 0]) == pytest.approx((0.06, 0.14))


def test_winners_name_the_faster():
    _, ax = plots.figure()
    ratios = np.array([[2.0, 0.5], [1.0, np.nan]])
    plots.winners(ax, ratios, ["r", "s"], ["c", "d"], ("p", "q"), ("#ff0000", "#0000ff"), {(0, 1): "÷4", (1, 0): ""})
    assert [t.get_text() for t in ax.texts] == ["2.00", "2.00\n÷4", "1.00"]
    shades = ax.images[0]
    q_faster, p_faster = (shades.cmap(shades.norm(np.log2(x))) for x in (2.0, 0.5))
    assert q_faster[2] > q_faster[0] and p_faster[0] > p_faster[2]  # blue is q's, red is p's
