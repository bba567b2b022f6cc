"""The notebook on CUDA graphs, small: numbers are read in its outputs; and drawn from records of GPUs, made up."""

from __future__ import annotations

import re

import nbformat
import pytest

from moelab import notebook
from moelab.bench import groups
from moelab.results import Provenance, Store
from tests.bench.test_groups import event
from tests.bench.test_step_host import put
from tests.test_notebooks import check, errors, outputs, runner, said

NAME = "09_cuda_graphs"
SMALL = {"batches_by_group": ["1,3", "2,2"], "kv_len": 40, "host_batches": [1, 3], "repeats": 2, "records": "own"}
GPU = "NVIDIA H100 80GB HBM3"  # of which nothing is recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runner(tmp_path_factory.mktemp("notebooks"), {NAME: SMALL})


def test_runs(run):
    executed, done, folder = run(NAME)
    check(executed, done, figures=5)
    store = Store(folder / "own", package=False)
    assert {r.clock for r in store.records("groups") if r.unit == "us"} == {"wall"}
    assert len(store.records("step_host")) == 2 * (3 + 4 + 2 * 2)


def test_what_it_says(run):
    text = said(run(NAME)[0])
    assert "A step of DeepSeek-V3 walks **1,141 stages**" in text
    # Four tokens, four experts each, in four layers; three requests padded to six places.
    assert (
        "On this CPU, which the ranks share, 1 and 3 requests: padded, the groups compute 6 rows a step instead of 4"
        in text
    )
    assert "the experts receive 64 either way" in text
    assert "On this CPU, which the ranks share, 2 and 2 requests: nothing is padded" in text
    assert "86 % of the places are padding for 7 × 1 and 64 requests" in text
    assert re.search(r"a replayed step takes \*\*[\d,]+ µs\*\* at batch 1, an eager one [\d,]+ \(p20–p80", text)
    assert "**Not measured yet** on NVIDIA H200: unequal batches." in text
    own, padded = map(
        float, re.search(r"own rows for ([\d.]+) ms in its own size and for\s+([\d.]+) ms", text).groups()
    )
    assert own > 0 and padded > 0


def test_without_records_it_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = SMALL | {"gpu": GPU, "batches_by_group": ["1,2"], "host_batches": [1]}
    executed = nbformat.read(str(notebook.run(NAME, given, tmp_path / "out", progress=False).ipynb), as_version=4)
    text = said(executed)
    assert not errors(executed) and len(outputs(executed, "image/png")) == 4
    assert text.count("**Nothing recorded of") == 2 and "`moelab bench groups`" in text
    assert f"**Not measured yet** on {GPU}: eager against graph and unequal batches." in text


def test_records_of_gpus_are_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "own", package=False)
    for batch, eager, graph in ((1, 9000.0, 900.0), (64, 9500.0, 3000.0)):
        put(store, "eager", batch, eager, gpu=GPU)
        put(store, "graph", batch, graph, gpu=GPU)
    setting = groups.setting([(1, 64)], model="deepseek-v3", layers=61, device="cuda", graph=True)
    events = [(0, {"backend": "nvshmem", "max_tokens": 128})]
    for way, agree, us in (("own", "none", 3e3), ("padded", "host", 3.6e3), ("padded", "device", 3.3e3)):
        for rank in (0, 1):
            numbers = {"step": (us, "us"), "agree": (us / 10, "us"), "rows": (99, "1"),
                       "tokens": (32.5 if way == "own" else 64, "1")}  # fmt: skip
            events += [(rank, event(m, [x], way, agree, unit, (1, 64))) for m, (x, unit) in numbers.items()]
    for record in groups.records(events, setting, Provenance(GPU, 2, "1", {"torch": "2.11.0"}, "0123456", False)):
        store.append(record)
    executed = nbformat.read(
        str(notebook.run(NAME, SMALL | {"gpu": GPU}, tmp_path / "out", progress=False).ipynb), as_version=4
    )
    text = said(executed)
    assert not errors(executed) and len(outputs(executed, "image/png")) == 6
    assert "Nothing recorded" not in text and "Not measured yet" not in text
    assert (
        "a replayed step takes **900 µs** at batch 1, an eager one 9,000 (p20" in text
        and ": **10.0×**; at batch 64" in text
    )
    assert "On 2 GPUs, 1 and 64 requests: padded, agreed by the device, the groups compute 128 rows" in text
    assert "**1.20×** as long (3.6 for 3 ms), the agreement in it 0.36 ms" in text
