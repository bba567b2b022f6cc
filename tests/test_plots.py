"""The figures' rules: units on axes, fixed colours, and no text over another."""

from __future__ import annotations

import itertools

import matplotlib
import numpy as np
import pytest

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402

from moelab import plots, stages  # noqa: E402
from moelab.config import ConfigError, ParallelConfig, preset  # noqa: E402
from moelab.results import Provenance, Record  # noqa: E402

V3 = preset("deepseek-v3")
HERE = Provenance("cpu", 0, "", {"torch": "0"}, "0" * 40, False)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def boxes(fig):
    """{text: its box in pixels} of what is drawn in the figure's axes."""
    fig.canvas.draw()
    found = {}
    for ax in fig.axes:
        for i, text in enumerate(ax.texts):
            if text.get_text().strip() and text.get_visible():
                found[text.get_text(), i, id(ax)] = text.get_window_extent()
    return found


def overlapping(fig) -> list[tuple[str, str]]:
    pairs = itertools.combinations(boxes(fig).items(), 2)
    return [(a[0], b[0]) for (a, x), (b, y) in pairs if x.padded(-1).overlaps(y.padded(-1))]


@pytest.mark.parametrize(
    ("dp", "tp", "per_node", "model"),
    [(32, 4, 8, "deepseek-v3"), (8, 1, 8, "deepseek-v3"), (2, 8, 8, "deepseek-v3"), (256, 1, 8, "deepseek-v3"),
     (2, 2, 4, "tinyseek"), (1, 1, 8, "tinyseek"), (4, 1, 2, "tinyseek")],
)  # fmt: skip
def test_deployment(dp, tp, per_node, model):
    parallel, config = ParallelConfig(dp, tp, per_node), preset(model)
    fig = plots.draw_deployment(parallel, config)
    texts = [key[0] for key in boxes(fig)]
    assert not overlapping(fig)
    assert any(f"EP{dp * tp} = DP{dp} × TP{tp}" in text for text in texts)
    assert texts.count("heads 0–1") + texts.count(f"heads 0–{config.num_attention_heads // tp - 1}") >= 1
    shown = [text for text in texts if text.startswith("rank ")]
    assert len(shown) == min(per_node, dp * tp)
    with pytest.raises(ConfigError, match="divide only over"):
        plots.draw_deployment(ParallelConfig(3, 1), V3)


def test_layer_shows_every_stage():
    fig = plots.draw_layer()
    texts = [key[0] for key in boxes(fig)]
    assert not overlapping(fig)
    assert {stage.name for stage in stages.MOE_LAYER} <= set(texts)


def test_schedules_show_what_is_in_flight():
    fig = plots.draw_schedules({name: make(2) for name, make in stages.SCHEDULES.items()})
    assert not overlapping(fig)
    none, dispatch, micro = fig.axes
    flights = [len(ax.lines) for ax in (none, dispatch, micro)]
    # Nothing is hidden; each layer's dispatch; of both halves every dispatch, and every combine but the last one of B.
    assert flights == [0, 2, 7]
    order = [text.get_text() for text in micro.texts]
    assert order[:10] == ["A1", "A2", "send", "shared", "B1", "A4", "B2", "A5", "send", "shared"]


@pytest.mark.parametrize("senders", [2, 4, 8])
def test_regions(senders):
    counts = np.random.default_rng(senders).integers(0, 30, (senders, 4))
    fig = plots.draw_regions(counts, 32, 1, 4)
    texts = [key[0] for key in boxes(fig)]
    assert not overlapping(fig)
    assert sorted(t for t in texts if t.endswith(" + 1")) == sorted(f"{n} + 1" for n in counts.ravel())
    assert all(str(total) in texts for total in counts.sum(0))


@pytest.mark.parametrize("value", [0.5, 3.0, 4000.0])
def test_a_roof_stays_inside(value):
    fig, ax = plots.figure()
    plots.stacked(ax, {"a": {"p": 1.0}, "b": {"p": 3.2}})
    plots.roof(ax, value, "limit")
    fig.canvas.draw()
    name = ax.texts[-1].get_window_extent()
    assert ax.bbox.y0 <= name.y0 and name.y1 <= fig.bbox.y1
    assert ax.get_ylim()[0] <= value <= ax.get_ylim()[1]


def test_barrier():
    assert not overlapping(plots.draw_barrier())


def test_labels_need_units():
    _, ax = plots.figure()
    with pytest.raises(ConfigError, match=r"'time' has no unit: write 'quantity \[unit\]'"):
        plots.label(ax, "time")
    plots.label(ax, "time [us]", "rows [1]", "Title")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time [us]", "rows [1]")


def test_colours_are_fixed():
    eps = [plots.ep_color(2**n) for n in range(2, 9)]
    assert len(set(eps)) == 7
    assert plots.backend_color("torch-gloo") != plots.backend_color("dense-padded")
    with pytest.raises(ConfigError, match="'mpi' has no colour"):
        plots.backend_color("mpi")
    assert len({plots.category_color(c) for c in stages.CATEGORIES}) == len(stages.CATEGORIES)


def test_charts_show_their_numbers():
    fig, (a, b) = plots.figure(1, 2)
    plots.stacked(a, {"x": {"p": 1.0, "q": 2.5}, "y": {"q": 4.0}})
    assert [t.get_text() for t in a.texts] == ["3.5", "4.0"]
    assert [p.get_height() for p in a.patches] == [1.0, 0.0, 2.5, 4.0]
    plots.grouped_lengths(b, {"x": {"p": 10.0, "q": 0.0}, "y": {"p": 1234.0, "q": 3.0}})
    assert sorted(t.get_text() for t in b.texts) == ["0", "1,234", "10", "3"]
    assert not overlapping(fig)


def test_spread_is_drawn():
    def record(backend, tokens, samples):
        return Record.from_samples(
            samples, bench="b", metric="m", unit="us", clock="wall", provenance=HERE, backend=backend,
            params={"tokens": tokens},
        )  # fmt: skip

    _, ax = plots.figure()
    records = [record(b, t, [1.0 * t, 2.0 * t, 9.0 * t]) for b in ("torch-gloo", "dense-padded") for t in (8, 32)]
    plots.spread(ax, records, "tokens", scale=10)
    line, bars = ax.containers[0].lines[0], ax.containers[0].lines[2][0]
    assert line.get_color() == plots.backend_color("torch-gloo")
    assert list(line.get_ydata()) == [160, 640]
    low, high = bars.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((records[0].p20 * 10, records[0].p80 * 10))
