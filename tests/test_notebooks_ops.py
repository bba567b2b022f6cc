"""The notebooks on kernels: from records of a GPU, without any, and from those that the package ships.

The records here are made up, for the settings of the benchmark itself, and of a GPU that the package has none of.
"""

from __future__ import annotations

import re

import nbformat
import pytest

from moelab import notebook
from moelab.bench import linear, quality
from moelab.bench.ops import OPS
from moelab.results import Provenance, Record, Store
from tests.test_notebooks import errors, outputs, said

GPU = "NVIDIA H100 80GB HBM3"
WHERE = Provenance(GPU, 1, "580.1", {"torch": "2.11.0"}, "0123456789abcdef", False)
OTHERS = {"linear": ("deep_gemm",), "grouped_gemm": ("deep_gemm",), "mla": ("flashinfer",), "silu_mul": ()}
SMALL = {"windows": 2, "window_tokens": 40, "scored": 20}


def model_us(case, backend: str) -> float:
    """A kernel that reaches 3 TB/s or 700 TFLOP/s after 2 µs, DeepGEMM after 6."""
    start = {"deep_gemm": 6.0, "two launches": 9.0, "triton-padded": 40.0}.get(backend, 2.0)
    return start + max(case.bytes / 3e6, case.flops / 7e8)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    store = Store(folder, package=False)

    def put(bench, backend, params, metric, unit, value):
        store.append(
            Record.from_samples(
                [value * 0.99, value, value * 1.01],
                bench=bench,
                backend=backend,
                params=params,
                metric=metric,
                unit=unit,
                clock="graph",
                provenance=WHERE,
            )  # fmt: skip
        )

    for metric, unit, value in (("copy", "GB/s", 3000.0), ("fp8", "TFLOP/s", 1400.0), ("bf16", "TFLOP/s", 700.0)):
        put("roofs", "torch", {}, metric, unit, value)
    for op, others in OTHERS.items():
        for case in OPS[op](False):
            for backend in {*case.backends, *others}:
                put("ops", backend, case.params, op, "us", model_us(case, backend))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def execute(name: str, **given):
        folder = tmp_path_factory.mktemp("run")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            done = notebook.run(name, given, folder / "out", progress=False)
        executed = nbformat.read(str(done.ipynb), as_version=4)
        assert not errors(executed)
        assert "commit " in executed.cells[-1].outputs[-1]["data"]["text/html"]
        stray = [x for x in outputs(executed, "text/plain") if re.match(r"None|\(|<matplotlib|\[|Text|Axes", x)]
        assert not stray
        return executed, folder

    return execute


def test_roofline(run, made_up):
    executed, _ = run("05_roofline", gpu=GPU, records=str(made_up))
    text = said(executed)
    assert len(outputs(executed, "image/png")) == 8 and "Nothing recorded" not in text
    assert "Rows of an expert at EP8 and EP128: 64, 1024; in the study's text 128, 2048" in text
    assert "**m decides**" in text
    # Halving costs its start once more and the weights' bytes once more, by hand from the model above.
    shapes = [(2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048)]
    cases = {(c.params["n"], c.params["k"], c.params["m"]): c for c in linear.linear_cases(False)}
    us = [2 * model_us(cases[*at, 128], "moelab") - model_us(cases[*at, 256], "moelab") for at in shapes]
    assert f"{sum(us):.0f} µs (moelab)" in text and "in the study 95 µs" in text
    one, two = (
        next(model_us(c, "flashinfer") for c in OPS["mla"](False)
             if dict(c.params) == {"batch": 128, "q_len": q, "kv_len": 5000, "heads": 128, "kv": "bf16"})
        for q in (1, 2)
    )  # fmt: skip
    assert f"MLA by flashinfer at batch 128: a second token makes it {two / one:.2f} times as long" in text


@pytest.mark.parametrize("name", ["05_roofline", "06_quantization"])
def test_without_records_it_says_so(run, tmp_path, name):
    executed, _ = run(name, gpu="NVIDIA H100", records=str(tmp_path), **(SMALL if name.startswith("06") else {}))
    text = said(executed)
    missing = {"05_roofline": ("linear", "grouped_gemm", "mla"), "06_quantization": ("linear", "silu_mul")}[name]
    for op in missing:
        assert f"Nothing recorded of <code>{op}</code>" in text or f"Nothing recorded of `{op}` on NVIDIA H100" in text
    # What needs no record is there, and nothing is drawn empty.
    assert len(outputs(executed, "image/png")) == {"05_roofline": 3, "06_quantization": 4}[name]


def test_quantization(run, made_up):
    executed, _ = run("06_quantization", gpu=GPU, records=str(made_up), **SMALL)
    text = said(executed)
    assert len(outputs(executed, "image/png")) == 7 and "Nothing recorded" not in text
    store = Store(made_up, package=False)
    found = store.records(quality.BENCH, metric="heldout_bits_per_byte")
    assert len(found) == len(quality.VARIANTS) and all(0.5 < r.p50 < 8 for r in found)
    assert {r.params["scored_bytes"] for r in found} == {40} and {r.params["window_tokens"] for r in found} == {40}
    assert re.search(
        r"qkv_a at m = 128: \d+\.\d µs as two launches, \*\*\d+\.\d µs\*\* merged \(the study: 30\.2 and 16\.7\)", text
    )
    faster, settings = map(int, re.search(r"beats DeepGEMM in (\d+) of (\d+) settings", text).groups())
    assert faster == settings == 7 * 8  # every projection, m = 1 … 64
    low, high = map(float, re.search(r"costs these activations ([\d.]+) to ([\d.]+) %", text).groups())
    assert 1 < low < high < 3


def test_from_the_packages_records(run):
    """As a reader without a GPU sees them."""
    executed, _ = run("05_roofline")
    assert len(outputs(executed, "image/png")) >= 3
