"""Every notebook runs, small, in a kernel of its own, and shows what it promises; numbers are read in its outputs."""

from __future__ import annotations

import re

import nbformat
import pytest

from moelab import notebook
from moelab.results import Store
from moelab.results.store import PACKAGE_RECORDS

SMALL = {
    "00_start_here": {"max_tokens": 6, "windows": 16, "window_tokens": 24},
    "01_parallelism": {},
    "03_all_to_all": {"tokens": [2, 8], "hidden": 256, "repeats": 3, "records": "own"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runner(tmp_path_factory.mktemp("notebooks"), SMALL)


def runner(folder, small: dict[str, dict]):
    """name -> (executed notebook, run, folder); one execution per notebook, with the parameters of `small`."""
    done = {}

    def of(name: str):
        if name not in done:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                found = notebook.run(name, small[name], folder / "out", progress=False)
            done[name] = nbformat.read(str(found.ipynb), as_version=4), found
        return (*done[name], folder)

    return of


def outputs(executed, kind: str) -> list[str]:
    return [
        data
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if (data := output.get("data", {}).get(kind)) is not None
    ]


def said(executed) -> str:
    """All that cells have said, as text."""
    printed = [o["text"] for cell in executed.cells for o in cell.get("outputs", []) if o["output_type"] == "stream"]
    return "\n".join([*printed, *outputs(executed, "text/html"), *outputs(executed, "text/markdown")])


def check(executed, done, figures: int) -> None:
    """That a notebook ran without a word on stderr, drew its figures, left a page, and closes with its provenance."""
    assert not errors(executed)
    assert len(outputs(executed, "image/png")) == figures
    assert done.html.stat().st_size > 100_000
    footer = executed.cells[-1].outputs[-1]["data"]["text/html"]
    assert "moelab " in footer and "commit " in footer
    # A forgotten semicolon shows an axes' repr or limits under the figure.
    stray = [
        x for x in outputs(executed, "text/plain") if re.match(r"None|\(|<?(np\.float|matplotlib|Text|Axes|\[)", x)
    ]
    assert not stray


def errors(executed) -> list[str]:
    streams = [o for cell in executed.cells for o in cell.get("outputs", [])]
    return [o.get("text", "error") for o in streams if o["output_type"] == "error" or o.get("name") == "stderr"]


@pytest.mark.parametrize("name", SMALL)
def test_runs(run, name):
    executed, done, _ = run(name)
    check(executed, done, figures={"00_start_here": 4, "01_parallelism": 8, "03_all_to_all": 11}[name])


def test_every_notebook_is_here():
    assert set(SMALL) <= set(notebook.names())


def test_start_here(run):
    text = said(run("00_start_here")[0])
    assert re.search(r"12 tokens from 4 processes with 4\s+experts each equal those of one process: \*\*yes\*\*", text)
    assert text.count("<pre") == 2 and "prompt 1, DP group 1" in text
    assert "torch-gloo" in text


def test_parallelism(run):
    text = said(run("01_parallelism")[0])
    assert "70,272 bytes of KV per token = 61 layers × 576 values × 2 bytes" in text
    assert "**81 requests**" in text and "109 without" in text
    assert "102.6 to **24.6 GB**" in text
    for verdict in ("holds", "depends", "differs", "open"):
        assert re.search(rf"<td[^>]*>{verdict}</td>", text)


def test_parallelism_takes_another_deployment(tmp_path):
    """As in a sweep: another model, and an illegal deployment is named with the legal ones."""
    given = {"model_preset": "tinyseek", "dp": 4, "tp": 1, "eps": [1, 2, 4, 8, 16], "batches": [1, 4]}
    executed = nbformat.read(str(notebook.run("01", given, tmp_path, progress=False).ipynb), as_version=4)
    assert "5,760 bytes of KV per token = 5 layers × 576 values × 2 bytes" in said(executed)
    with pytest.raises(notebook.NotebookError, match="ep = dp·tp is 3: 256 experts divide only over"):
        notebook.run("01", {"dp": 3, "tp": 1}, tmp_path, progress=False)


def test_all_to_all(run):
    executed, _, folder = run("03_all_to_all")
    text = said(executed)
    assert re.search(r"largest difference between the exchange and the direct sum: \d\.\de-0[5-9]", text)
    store = Store(folder / "own", package=False)
    records = store.records("alltoall")
    assert not store.damage and len(records) == 2 * 3 * 3  # tokens, backends, metrics
    assert {r.clock for r in records if r.unit == "us"} == {"wall"} and {r.gpu for r in records} == {"cpu"}
    sent = {r.backend: r.p50 for r in records if r.metric == "sent" and r.params["tokens"] == 8}
    assert sent["torch-gloo"] == sent["dense-split"] < sent["dense-padded"]
    assert f"**{sent['dense-padded'] / sent['torch-gloo']:.1f}×**" in text
    # The second half is drawn from the package's records, and says which they are.
    packaged = Store(PACKAGE_RECORDS, package=False).records("alltoall", gpu="NVIDIA H200", gpu_count=2)
    assert {r.commit[:9] for r in packaged} == set(re.search(r"2 × NVIDIA H200, .*commit (.*)", text)[1].split(" and "))
    (pair,) = [r.p50 for r in packaged if r.metric == "pair_fused" and r.backend == "nvshmem"
               and (r.params["tokens"], r.params["returns"], r.params["blocks"]) == (4096, "bf16", 0)]  # fmt: skip
    assert f"4,096 tokens: a fused pair takes **{pair:.1f} µs**" in text
    assert "Published over modelled, 128 tokens" in text


def test_all_to_all_without_records_of_the_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = SMALL["03_all_to_all"] | {"gpu": "NVIDIA H100 80GB HBM3"}
    executed = nbformat.read(str(notebook.run("03", given, tmp_path / "out", progress=False).ipynb), as_version=4)
    assert not errors(executed) and len(outputs(executed, "image/png")) == 7
    assert "Nothing recorded of `the exchange` on NVIDIA H100 80GB HBM3" in said(executed)
