"""Drafts and the second token: what is drawn is what was given, no text over another."""

from __future__ import annotations

import matplotlib
import pytest

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402

from moelab import plots  # noqa: E402
from moelab.perf.roofline import Point  # noqa: E402
from moelab.plots import attention, drafts  # noqa: E402
from tests.test_plots import overlapping  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def labels(ax):
    return [t.get_text() for t in ax.get_legend().get_texts()]


def test_acceptance_by_depth():
    fig, ax = plots.figure(width=9)
    drafts.acceptance(ax, {"greedy": ([0.9, 0.4], [0.01, 0.05], "#0173b2"), "drawn": ([0.8], [0.02], "#e8743b")},
                      {"elsewhere": 0.95})  # fmt: skip
    assert sorted(bar.get_height() for bar in ax.patches) == pytest.approx([40, 80, 90])
    assert [t.get_text() for t in ax.texts] == ["90", "40", "80"] and not overlapping(fig)
    assert sorted(labels(ax)) == ["drawn", "elsewhere", "greedy"]
    (diamond,) = [line for line in ax.lines if line.get_marker() == "D"]
    assert list(diamond.get_ydata()) == [95]


def test_balance_is_tokens_over_time():
    fig, ax = plots.figure()
    drafts.balance(ax, [1, 1.9, 2.4], [10, 12, 20], [(0.9, 1.1), (1.1, 1.3), (1.8, 2.2)])
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines if not line.get_label().startswith("_")}
    assert drawn["tokens of a step"] == [1, 1.9, 2.4] and drawn["time of a step"] == [1, 1.2, 2]
    assert drawn["speed of a request"] == pytest.approx([1, 1.9 / 1.2, 1.2])
    assert [t.get_text() for t in ax.texts] == ["1.58", "1.20"] and not overlapping(fig)
    _, quiet = plots.figure()
    drafts.balance(quiet, [1, 1.9], [1, 1.1], named=False)
    assert quiet.get_legend() is None


def test_one_and_two_tokens_are_joined():
    fig, ax = plots.figure()
    ax.set(xscale="log", yscale="log", xlim=(10, 1000), ylim=(1, 1000))
    one, two = Point(30, 20, 19, 21), Point(60, 39, 38, 40)
    other = [Point(240, 300, 290, 310), Point(440, 400, 390, 410)]
    attention.second_token(ax, {"flashinfer": {(16, 8): [one, two], (128, 8): other}, "triton": {(16, 8): [two, one]}})
    joined = [tuple(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) == 2]
    assert joined == [(30, 60), (240, 440), (60, 30)]
    names = [t.get_text() for t in ax.texts]
    assert names.count("8") == 2 and {"16 heads", "128 heads"} <= set(names) and not overlapping(fig)
    assert labels(ax) == ["flashinfer", "triton", "one new token", "two"]
