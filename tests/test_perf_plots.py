"""Figures of the performance model: what they show is what they were given."""

from __future__ import annotations

import json
import re

import matplotlib
import numpy as np
import pandas as pd
import pytest

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402

from moelab import plots  # noqa: E402
from moelab.config import ConfigError  # noqa: E402
from moelab.perf.grid import grid_frontiers  # noqa: E402
from moelab.perf.sweeps import frontier  # noqa: E402
from moelab.perf.validate import Row  # noqa: E402
from moelab.plots import balance, pareto, validation  # noqa: E402
from moelab.plots.explorer import explorer  # noqa: E402

SWEEP = pd.DataFrame({
    "ep": [8, 8, 8, 128, 128], "tp": [1, 8, 1, 1, 1], "batch": [64.0, 1.0, 128.0, 1.0, 128.0],
    "tok_s_per_request": [25.0, 95.0, 17.0, 60.0, 14.0], "tok_s_per_node": [12800.0, 95.0, 17400.0, 480.0, 14300.0],
    "step_ms": [64.0, 17.0, 94.0, 27.0, 114.0], "step_low": [56.0, 15.0, 82.0, 24.0, 100.0],
    "step_high": [73.0, 19.0, 107.0, 31.0, 130.0], "fits": [True, True, False, True, True],
})  # fmt: skip
EDGES = {ep: frontier(part) for ep, part in SWEEP.groupby("ep")}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def texts(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def test_frontiers_are_lines_and_what_does_not_fit_is_crossed():
    _, ax = plots.figure()
    pareto.frontiers(ax, SWEEP, EDGES, bands=(8,))
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines["EP8"].get_xdata()) == [25.0, 95.0] and list(lines["EP128"].get_ydata()) == [14300.0, 480.0]
    assert to_hex(lines["EP8"].get_color()) == to_hex(plots.ep_color(8))
    crosses = [p for p in ax.collections if len(p.get_offsets()) and p.get_linewidth()[0] > 1]
    assert [tuple(p.get_offsets()[0]) for p in crosses] == [(17.0, 17400.0)]
    (area,) = ax.patches
    corners = area.get_xy()
    assert corners[0] == pytest.approx((25 * 64 / 73, 12800 * 64 / 73))  # slower in both, by the same factor
    assert ax.get_yscale() == "log"


def test_a_batch_that_does_not_fit_is_hollow():
    _, ax = plots.figure()
    pareto.by_batch(ax, SWEEP[SWEEP["tp"] == 1], "tok_s_per_node")
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in hollow] == [(128.0, 17400.0)]
    assert sorted(texts(ax)) == ["EP128", "EP8"]


def test_claims_and_spans_are_named():
    _, ax = plots.figure()
    pareto.by_batch(ax, SWEEP[SWEEP["tp"] == 1], "tok_s_per_request", named=False)
    pareto.claimed(ax, (4, 20), (-40, -5), "below")
    pareto.claimed(ax, (32, 128), (10, 35), "above", beside=True)
    pareto.span(ax, 40, 80, "range")
    pareto.configuration(ax, SWEEP.iloc[0], (8, 6))
    assert texts(ax) == ["below", "above", "range", "TP1, batch 64"]


GRID = {
    "exchanges": ["a, ib400", "b, efa"], "kv_lens": [1000, 5000], "drafts": [0, 1], "gpus": {8: "h200", 16: "h100"},
    "points": [(8, 1, 1), (8, 1, 64), (16, 1, 1), (16, 1, 64)],
    "step": [[[[10.0, 40.0, 8.0, 30.0]] * 2] * 2] * 2, "largest": [[[[100, 100, 50, 50]] * 2] * 2] * 2,
}  # fmt: skip


def test_the_explorer_carries_its_data_and_its_start():
    page = explorer(GRID, exchange=1, kv_len=5000, drafts=1, acceptance=0.5, min_speed=30).data
    (data,) = re.findall(r"grid = (\{.*?\}), eps = Object", page)
    carried = json.loads(data)
    assert carried["start"] == {"exchange": 1, "kv": 1, "draft": 1, "acceptance": 0.5, "speed": 30}
    assert carried["step"] == GRID["step"] and carried["colors"]["8"] == to_hex(plots.ep_color(8))
    assert "modelled" in page and "$" + "{p.speed.toFixed(1)}" in page  # the template is filled, the script's own stay
    assert "http" not in page  # it needs no network
    other = explorer(GRID).data
    first, second = (re.search(r'id="(explorer-\w+)"', x).group(1) for x in (page, other))
    assert first != second and f'getElementById("{first}")' in page
    with pytest.raises(ConfigError, match="kv_len is 7, the grid has 1000, 5000"):
        explorer(GRID, kv_len=7)


def test_small_frontiers():
    lines = {(0, 0): grid_frontiers(GRID, 0, 0, 0, 0.5), (0, 1): grid_frontiers(GRID, 1, 1, 1, 0.5)}
    assert lines[0, 0][8] == [(25.0, 12800.0), (100.0, 800.0)]
    assert lines[0, 0][16] == [(125.0, 1000.0)]  # 64 do not fit
    assert lines[0, 1][16] == [(187.5, 1500.0)]
    _, axes = plots.figure(1, 2, squeeze=False)
    pareto.small_multiples(axes, ["KV"], ["a", "b"], lines)
    assert [ax.get_title(loc="left") for ax in axes[0]] == ["a", "b"]


def test_the_busiest_gpu_is_named():
    _, ax = plots.figure()
    balance.gpu_loads(ax, np.array([10.0, 30, 20, 20]), "layer")
    assert texts(ax) == ["λ = 1.50"]
    colors = [to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert colors.index(balance.BUSIEST) == 1 and colors.count(balance.OTHERS) == 3


def test_imbalance_is_shown_with_chance():
    _, ax = plots.figure()
    samples = {8: [np.array([2.0, 3.0, 4.0]), np.array([1.0, 1.5, 2.0])]}
    balance.by_tokens(ax, [4, 8], samples, {8: [np.array([2.5]), np.array([1.2])]})
    dashed = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in dashed] == [[2.5, 1.2]]
    assert list(ax.containers[0].lines[0].get_ydata()) == [3.0, 1.5]
    _, ax = plots.figure()
    balance.by_copies(ax, {"plan": ({0: 1.4, 8: 1.1}, "#0173b2", "-")})
    assert texts(ax) == ["plan"] and list(ax.get_xticks()) == [0, 8]
    _, ax = plots.figure()
    balance.repeats(ax, np.ones((2, 4)), np.array([[1.0, 0.5, 1.2, 1.3], [1, 1, 1, 1]]))
    assert len(ax.collections) == 2 and ax.get_xlim() == ax.get_ylim()


ROWS = [
    Row("good", "deployment", "step", "ms", 50.0, 52.0, 45.0, 60.0),
    Row("bad", "deployment", "step", "ms", 50.0, 30.0, 26.0, 34.0, ("cause",), -0.6),
    Row("bare", "study claim", "x", "x", 5.0, 5.5),
]


def test_ranges_say_the_error_and_what_lies_outside():
    _, ax = plots.figure()
    validation.ranges(ax, ROWS, right=1.2)
    assert texts(ax) == ["+4%", "-40%", "+10%"]
    assert [t.get_color() for t in ax.texts] == [validation.MODEL, validation.OUTSIDE, validation.MODEL]
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_xdata()[0] for line in hollow] == [pytest.approx(20.0)]
    assert len(ax.get_legend().get_texts()) == 4


def test_errors_by_class():
    _, ax = plots.figure()
    validation.error_strips(ax, {"deployment": ROWS[:2], "study claim": ROWS[2:]})
    at = np.concatenate([c.get_offsets()[:, 0] for c in ax.collections])
    assert list(at) == pytest.approx([4.0, -40.0, 10.0])
    assert ax.get_yticklabels()[0].get_text() == "deployment\n2 points, median |error| 22%"


def test_layers_and_laws_and_uncertainty():
    _, ax = plots.figure()
    validation.layers(ax, {"EP8": {"MLA": 600.0, "GEMM": 140.0}}, {"EP8": {"GroupGEMM": 555.0, "rest": 245.0}})
    assert {"740\nmodelled", "800\nthe study", "600", "555"} <= set(texts(ax))
    _, ax = plots.figure()
    validation.layers(ax, {"EP8": {"MLA": 600.0, "GEMM": 140.0}}, {}, "kinds", {"EP8": 700.0})
    assert texts(ax) == ["600", "140", "layer 700\nkinds 740"] and list(ax.lines[0].get_ydata()) == [700, 700]
    _, ax = plots.figure()
    validation.laws(ax, {"law": ([16, 32], [100.0, 150.0], [0.1, 0.2], "#000000")},
                    {"source": ([16], [110.0], "#2f6db3", "o")})  # fmt: skip
    assert ax.get_ylim()[1] >= 180
    _, ax = plots.figure()
    validation.uncertainty(ax, {"MLA": (0.02, "published"), "host": (0.05, "extrapolated")})
    assert [t.get_text() for t in ax.get_yticklabels()] == ["host", "MLA"] and texts(ax) == ["5.0", "2.0"]
    _, ax = plots.figure()
    validation.coverage(ax, [0.2, 0.8], {"deployment": [0.3, 0.9]}, [(0.1, 0.3), (0.7, 0.9)])
    assert texts(ax) == ["deployment"]
