"""The notebooks of the performance model, small; numbers are read in their outputs."""

from __future__ import annotations

import re

import pytest

from tests.test_notebooks import check, outputs, runner, said

SMALL = {
    "02_pareto_frontier": {"exchanges": ["deepep/ib400"], "kv_lens": [5000], "drafts": [1]},
    "08_router_and_balance": {"windows": 32, "window_tokens": 24, "copies": [0, 8], "v3_eps": [32, 128],
                              "v3_copies": [0, 64], "spreads": [0.5, 1.0]},
    "12_validation": {},
}  # fmt: skip
FIGURES = {"02_pareto_frontier": 6, "08_router_and_balance": 8, "12_validation": 6}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    of = runner(tmp_path_factory.mktemp("notebooks"), SMALL)
    return lambda name: of(name)[:2]


@pytest.mark.parametrize("name", SMALL)
def test_runs(run, name):
    executed, done = run(name)
    check(executed, done, FIGURES[name])


def test_pareto(run):
    text = said(run("02_pareto_frontier")[0])
    assert re.search(r"\d+ of 160 deployments do not fit the memory", text)
    for verdict in ("holds", "depends", "differs"):
        assert re.search(rf"<td[^>]*>{verdict}</td>", text)
    page = next(x for x in outputs(run("02_pareto_frontier")[0], "text/html") if "moelab-explorer" in x)
    assert "deepep, ib400" in page and "The sliders are a script" in page
    ratio, speed = re.search(r"\*\*(\d\.\d)×\*\* one node's throughput, at (\d+) tok/s", text).groups()
    assert 3 < float(ratio) < 8 and 40 <= int(speed) <= 80


def test_balance(run):
    text = said(run("08_router_and_balance")[0])
    chance = re.search(r"λ is (\d\.\d\d); chance alone makes (\d\.\d\d)", text).groups()
    assert all(1 < float(x) < 4 for x in chance)
    order, packed = map(float, re.search(r"in order (\d\.\d\d), packed (\d\.\d\d), with", text).groups())
    assert 1 <= packed < 1.6 and order > 1
    small, large = map(int, re.search(r"EP128 longer by (\d+) % at batch 8 and by\s+\*\*(\d+) %", text).groups())
    assert 0 < small < large
    assert re.search(r"\d\.\d\d× at spread 1 \(packed, 64 copies\)", text)


def test_validation(run):
    text = said(run("12_validation")[0])
    assert re.search(r"median \|error\| \*\*\d+\.\d%\*\* over 25 rows", text)
    assert "study claim" in text and "neither step time nor speed published" in text
    assert text.count("host-driven exchange") >= 1


def test_validation_of_another_table(tmp_path):
    """Somebody's own deployments, one of them without a cause and none of the published ones."""
    (tmp_path / "own.csv").write_text(
        "id,gpu,engine,ep,dp,tp,batch_per_gpu,kv_len,step_ms,source\n"
        "mine-1,H200,SGLang,8,8,1,32,4000,45,2026-01\nmine-2,H100,SGLang,32,32,1,32,4000,50,2026-01\n"
        "unsaid,H100,SGLang,32,32,1,,4000,50,2026-01\n"
    )
    executed, *_ = runner(tmp_path, {"12": {"points_file": str(tmp_path / "own.csv")}})("12")
    text = said(executed)
    assert re.search(r"over 2 rows", text) and "batch not stated" in text
