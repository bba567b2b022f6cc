from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.config import MoelabError
from moelab.results import Provenance, Record, RecordError
from moelab.results.record import now, percentile

finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | finite | st.text()
somewhere = Provenance(gpu="cpu", gpu_count=0, driver="", versions={"python": "3.11"}, commit="0123abc", dirty=True)


@given(
    samples=st.lists(finite, min_size=1, max_size=40),
    params=st.dictionaries(st.text(min_size=1), scalars, max_size=6),
    seed=st.none() | st.integers(),
)
def test_round_trip_through_json(samples, params, seed):
    record = Record.from_samples(
        samples, bench="b", metric="m", unit="1", clock="none", provenance=somewhere, params=params, seed=seed
    )
    line = record.to_json()
    assert "\n" not in line and line.isascii()
    again = Record.from_json(line)
    assert again == record and again.key() == record.key() and again.to_json() == line
    assert list(again.params) == sorted(params)


@given(st.lists(finite, min_size=1, max_size=200), st.integers(0, 100))
def test_percentile_is_numpys_and_in_order(values, percent):
    values = sorted(values)
    got = percentile(values, percent)
    assert values[0] <= got <= values[-1]
    if max(abs(values[0]), abs(values[-1])) < 1e300:  # numpy's own form overflows beyond
        assert got == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9 * (values[-1] - values[0]))


def test_from_samples_computes_the_statistics(make):
    samples = np.random.default_rng().permutation(np.arange(101.0)).tolist()
    record = make(samples=samples)
    assert (record.n, record.min, record.p20, record.p50, record.p80, record.p99) == (101, 0, 20, 50, 80, 99)


def test_key_ignores_when_and_by_which_commit_but_not_what_and_where(make):
    base = make()
    for same in (
        {"time": "2027-01-01T00:00:00Z"},
        {"commit": "b" * 40},
        {"dirty": True},
        {"versions": {}},
        {"seed": 1},
    ):
        assert make(**same).key() == base.key()
    for other in (
        {"bench": "x"},
        {"backend": "x"},
        {"metric": "x"},
        {"gpu": "NVIDIA H100"},
        {"gpu_count": 4},
        {"params": {"tokens": 1}},
    ):
        assert make(**other).key() != base.key()
    assert make(params={"a": 1, "b": 2}).key() == make(params={"b": 2, "a": 1}).key()
    assert make(params={"a": 1}).key() != make(params={"a": True}).key()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bench", ""),
        ("bench", "../escape"),
        ("bench", "a/b"),
        ("backend", " x"),
        ("metric", None),
        ("unit", ""),
        ("params", {"a": [1]}),
        ("params", {"a": math.nan}),
        ("params", {"": 1}),
        ("params", [1]),
        ("params", {1: 2}),
        ("params", {"a": np.int64(3)}),
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("min", math.nan),
        ("p99", math.inf),
        ("p50", "3"),
        ("p50", True),
        ("p99", 10**400),
        ("warmup", -1),
        ("clock", "cpu"),
        ("clock", "none"),
        ("kind", "guess"),
        ("gpu", ""),
        ("gpu_count", 0),
        ("gpu", "cpu"),
        ("driver", None),
        ("versions", {"torch": 2}),
        ("commit", "main"),
        ("commit", "unknown"),
        ("dirty", 0),
        ("seed", 1.5),
        ("time", "yesterday"),
        ("time", "2026-01-01"),
        ("time", "2026-01-01T00:00:00"),
        ("time", "2026-01-01T00:00:00+02:00"),
        ("min", -1.0),
    ],
)
def test_an_illegal_field_is_refused_by_name(make, field, value):
    with pytest.raises(RecordError, match=field):
        make(**{field: value})


def test_statistics_out_of_order_are_refused(make):
    with pytest.raises(RecordError, match="rising order"):
        make(p20=9.0)


def test_a_value_that_is_no_time_has_no_clock(make):
    record = make(samples=[1.37], metric="bits_per_byte", unit="bit/B", clock="none", gpu="cpu", gpu_count=0, driver="")
    assert (record.n, record.min, record.p99) == (1, 1.37, 1.37)


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf], [-math.inf, 1.0]])
def test_bad_samples_are_refused(make, samples):
    with pytest.raises(RecordError, match="sample"):
        make(samples=samples)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("{}", "missing fields: bench"),
        (b"\xff\xfe\x00", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_line_that_is_no_record_says_why(line, reason):
    with pytest.raises(RecordError, match=reason):
        Record.from_json(line)


def test_nan_extra_and_missing_fields_in_json_are_refused(make):
    data = json.loads(make().to_json())
    for bad in ("NaN", "Infinity", "-Infinity", "1e999"):
        line = json.dumps(data | {"p99": "@"}).replace('"@"', bad)
        with pytest.raises(RecordError):
            Record.from_json(line)
    with pytest.raises(RecordError, match="unknown field: colour"):
        Record.from_json(json.dumps(data | {"colour": 1}))
    del data["n"], data["gpu"]
    with pytest.raises(RecordError, match="missing fields: n, gpu"):
        Record.from_json(json.dumps(data))


def test_errors_are_meant_for_people():
    assert issubclass(RecordError, MoelabError) and issubclass(RecordError, ValueError)


def test_now_is_a_legal_time(make):
    assert make(time=now()).when.utcoffset().total_seconds() == 0
