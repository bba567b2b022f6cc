"""Interpolation, precedence of records, and what happens at a table's edge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.config import ConfigError
from moelab.perf import tables
from moelab.perf.tables import Curve, Grid, load
from moelab.results import Provenance, Record, Store
from moelab.results import store as store_module

times = st.dictionaries(st.integers(1, 4096), st.floats(1, 1e4), min_size=2, max_size=8)


def record(us: float, metric: str = "linear", backend: str = "triton", gpu: str = "NVIDIA H200", **params) -> Record:
    where = Provenance(gpu, 1, "580", {"torch": "2.11.0"}, "a" * 40, False)
    return Record.from_samples(
        [us], bench="ops", metric=metric, unit="us", clock="graph", provenance=where, backend=backend, params=params
    )


@given(times, st.floats(0, 5000), st.floats(0, 5000))
def test_a_curve_rises_and_stays_between_its_points(points, a, b):
    curve = Curve.of(points, "x", "published")
    low, high = sorted((a, b))
    assert curve.at(low) <= curve.at(high) + 1e-9
    assert min(points.values()) <= curve.at(a) <= max(points.values())
    assert curve.inside(a) == (min(points) <= a <= max(points))
    assert curve.at(curve.nearest(a)) == curve.at(a)


def test_a_curve_by_hand():
    curve = Curve.of({16: 20.0, 64: 10.0, 128: 12.0}, "x", "published")
    assert [curve.at(x) for x in (1, 16, 64, 96, 128, 999)] == [10, 10, 10, 11, 12, 12]


def test_a_grid_by_hand():
    grid = Grid.of({(1, 10): 1.0, (1, 20): 3.0, (3, 10): 5.0, (3, 20): 9.0}, "x", "published")
    assert grid.at(2, 15) == pytest.approx((1 + 3 + 5 + 9) / 4)
    assert grid.at(1, 20) == 3 and grid.at(0, 99) == 3 and grid.at(9, 0) == 5
    assert grid.inside(2, 15) and not grid.inside(2, 21) and grid.nearest(0, 15) == (1, 15)


def test_a_grid_leaves_out_lines_with_holes():
    points = {(x, y): float(x + y) for x in (1, 2, 4) for y in (10, 20, 40)} | {(3, 20): 23.0, (2, 30): 32.0}
    grid = Grid.of(points, "x", "published")
    assert grid.x.tolist() == [1, 2, 4] and grid.y.tolist() == [10, 20, 40]
    assert np.isfinite(grid.us).all()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """(the user's store, the package's), both empty."""
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(store_module, "PACKAGE_RECORDS", package)
    monkeypatch.setattr("moelab.perf.tables.PACKAGE_RECORDS", package)
    own = tmp_path / "own"
    own.mkdir()
    return Store(own), Store(package)


def test_own_records_precede_the_packages_point_by_point(folders):
    own, package = folders
    for m, us in ((16, 9.0), (64, 10.0)):
        package.append(record(us, m=m, n=4, k=8))
    points, origin = load(own.directory).points("linear", "H200", ("m",), n=4, k=8)
    assert points == {(16.0,): 9.0, (64.0,): 10.0} and origin == "recorded"
    own.append(record(12.0, m=64, n=4, k=8))  # slower, and all the same the user's own
    points, origin = load(own.directory).points("linear", "H200", ("m",), n=4, k=8)
    assert points == {(16.0,): 9.0, (64.0,): 12.0} and origin == "measured"


def test_the_fastest_backend_counts_and_peers_do_not(folders):
    own, _ = folders
    for backend, us in (("triton", 8.0), ("deep_gemm", 6.0), ("torch.compile", 1.0), ("cublas per tensor", 2.0)):
        own.append(record(us, backend=backend, m=16, n=4, k=8))
    own.append(record(3.0, gpu="NVIDIA A100-SXM4-80GB", m=16, n=4, k=8))  # no peaks are known of it
    points, _ = load(own.directory).points("linear", "H200", ("m",), n=4, k=8)
    assert points == {(16.0,): 6.0}
    assert load(own.directory).points("linear", "H200", ("m",), n=5, k=8)[0] == {}
    assert load(own.directory).points("linear", "H100", ("m",), n=4, k=8)[0] == {}


def test_the_quick_reading_is_the_stores(folders, caplog):
    """Same winners as `Store.winners`: own before the package's, clean before dirty, newer before older."""
    own, package = folders
    base = record(5.0, m=16, n=4, k=8).to_dict()
    for store, changes in (
        (package, {}), (package, {"p50": 5.0, "time": "2099-01-01T00:00:00Z", "min": 1.0}), (own, {"dirty": True}),
        (own, {"time": "2020-01-01T00:00:00Z", "min": 2.0}), (package, {"params": {"m": 64}}),
    ):  # fmt: skip
        store.append(Record(**base | changes))

    def told() -> list:
        found = tables._winners(own.directory, tables_state(own, package))
        return sorted((r["min"], r["params"]["m"], is_own) for r, is_own in found)

    entries = Store(own.directory).winners()
    expected = sorted((e.record.min, e.record.params["m"], e.own) for e in entries)
    assert told() == expected == [(2.0, 16, True), (5.0, 64, False)]
    with open(own.directory / "h200x1" / "ops.jsonl", "a") as file:
        file.write("{torn")
    assert told() == expected and "damaged record passed over" in caplog.text


def tables_state(*stores) -> tuple:
    return tuple((str(p), 0, 0) for s in stores for p in sorted(s.directory.glob("**/*.jsonl")))


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no folder .*/nope"):
        load(tmp_path / "nope")
