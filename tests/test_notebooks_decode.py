"""The notebooks on overlap, MLA and drafts, small; numbers are read in their outputs."""

from __future__ import annotations

import re

import nbformat
import pytest

from moelab import notebook
from moelab.results import Store
from tests.bench.test_decode_study import put
from tests.test_notebooks import check, errors, outputs, runner, said

SMALL = {
    "04_overlap": {"batches": [4, 32, 128], "requests": 2, "prompt_tokens": 12, "steps": 3, "records": "own"},
    "07_mla_and_mtp": {"text_tokens": 96, "q_lens": [1, 8, 64], "repeats": 1, "requests": 3, "prompt_tokens": 24,
                       "max_tokens": 20, "drafts": [0, 1, 2], "batches": [1, 16, 128], "records": "own"},
}  # fmt: skip
FIGURES = {"04_overlap": 10, "07_mla_and_mtp": 9}
OTHER = "NVIDIA H100 80GB HBM3"  # of which nothing is recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runner(tmp_path_factory.mktemp("notebooks"), SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_runs(run, name):
    executed, done, _ = run(name)
    check(executed, done, FIGURES[name])


def test_overlap(run):
    executed, _, folder = run("04_overlap")
    text = said(executed)
    layer = re.search(r"MicroBatch layer takes ([\d,]+) µs; modelled ([\d,]+) \(([+-][\d.]+) %\)", text)
    study, ours, miss = layer.groups()
    assert study == "1,896" and abs(float(miss)) < 2 and ours
    assert "EP128 GroupGEMM takes 206 µs; by published kernels 197" in text
    assert "saves the study 16 µs; hiding the whole shared expert would save 41" in text
    batch = int(re.search(r"EP128, pplx-2025, H100, modelled: \*\*pays from batch (\d+) on", text)[1])
    assert 4 < batch < 128  # between the batches of this run
    assert all(f"{ep}, modelled: **loses at every batch" in text for ep in ("EP2", "EP8"))
    hidden = re.search(
        r"EP128 hides of its exchange 0 % \(NoOverlap\), (\d) % \(Disp\w+\), (\d+) % \(MicroBatch\)", text
    )
    assert int(hidden[1]) < 10 < 60 < int(hidden[2])
    assert "Not measured yet" not in text
    assert 4 < int(re.search(r"EP128, ib400, recorded on H200: \*\*pays from batch (\d+) on", text)[1]) < 64
    ratio, study = map(
        float, re.search(r"NoOverlap's [\d,]+: \*\*([\d.]+)\*\*; in the study ([\d.]+)\.", text).groups()
    )
    assert 0.6 < ratio < 0.8 and study == 0.71
    assert "eager" not in text and "layers 61" not in text
    records = Store(folder / "own", package=False).records("schedules")
    assert {r.params["overlap"] for r in records} == {"none", "dispatch", "microbatch"} and records[0].clock == "wall"


def overlap_on_another_gpu(folder) -> tuple[str, int]:
    """(what is said, figures) of a run whose records of decode are those in `folder`."""
    given = SMALL["04_overlap"] | {"gpu": OTHER}
    executed = nbformat.read(str(notebook.run("04", given, folder / "out", progress=False).ipynb), as_version=4)
    assert not errors(executed)
    return said(executed), len(outputs(executed, "image/png"))


def test_overlap_without_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, figures = overlap_on_another_gpu(tmp_path)
    assert figures == FIGURES["04_overlap"] - 2 and "recorded:" not in text
    assert f"**Not measured yet**: there are no records of `decode` on {OTHER}" in text
    assert f"**Nothing recorded of `MoE layers` on {OTHER}**" in text


def test_overlap_draws_records_of_decode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "own", package=False)
    for overlap, us in (("none", 1900.0), ("dispatch", 1880.0), ("microbatch", 1330.0)):
        put(store, overlap, 128, us, gpu=OTHER)
        put(store, overlap, 128, us, dp=2, fabric=None, gpu=OTHER)
    put(store, "dispatch", 16, 500.0, gpu=OTHER)
    put(store, "microbatch", 16, 600.0, gpu=OTHER)
    put(store, "none", 128, 2500.0, kv_dtype="fp8", gpu=OTHER)
    text, figures = overlap_on_another_gpu(tmp_path)
    assert figures == FIGURES["04_overlap"] and "Not measured yet" not in text
    assert "EP128, ib400, batch 128, NoOverlap: kv_dtype fp8" in text
    assert "MicroBatch takes 1,330 µs of NoOverlap's 1,900: **0.70**; in the study 0.71" in text
    assert re.search(r"EP128, ib400, recorded on H100: \*\*pays from batch 37 on, up to 29 %", text)
    assert "EP2, recorded on H100: **saves 29 %** (batch 128)" in text


def test_mla_and_mtp(run):
    executed, _, folder = run("07_mla_and_mtp")
    text = said(executed)
    assert "fewer FLOP up to 165 new tokens" in text  # 2·kv·256·512 over the difference, at 5,000 rows
    assert re.search(r"hidden states equal to \de-0[5-9] of their largest value", text)
    two, one = map(float, re.search(r"in the study ([\d.]+) become ([\d.]+\d)", text).groups())
    assert (two, one) == (30.2, 16.7)
    ratios = {int(h): float(x) for h, x in re.findall(r"(\d+) heads: a second token makes flashinfer ([\d.]+)×", text)}
    assert 1.5 < ratios[128] < 2.1 and 0.9 < ratios[16] < 1.3
    greedy = [int(x) for x in re.search(r"by depth, greedy: (\d+) %, (\d+) %", text).groups()]
    assert greedy[0] > 70 and greedy[0] > greedy[1]
    assert len(re.findall(r"drafts? on this CPU: [\d.]+ tok/s per request against", text)) == 2
    assert re.search(r"EP128: one draft pays from an acceptance of 0\.\d\d \(batch 1\)", text)
    assert re.search(r"Of a layer recorded on NVIDIA H200 MLA takes \d+ to \d+ %", text)
    assert "A pass of the MTP layer takes, of the step, recorded on NVIDIA H200" in text
    store = Store(folder / "own", package=False)
    assert len(store.records("attention_ways")) == 2 * 3 and store.records("drafts", metric="acceptance")


def test_mla_and_mtp_without_records_of_the_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = SMALL["07_mla_and_mtp"] | {"gpu": OTHER}
    executed = nbformat.read(str(notebook.run("07", given, tmp_path / "out", progress=False).ipynb), as_version=4)
    text = said(executed)
    assert not errors(executed) and len(outputs(executed, "image/png")) == FIGURES["07_mla_and_mtp"] - 4
    assert text.count("Nothing recorded of <code>mla</code>") + text.count("Nothing recorded of `mla`") == 2
