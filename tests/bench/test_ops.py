"""`moelab bench ops`: its cases, its table, what it says without a GPU; and one short run with one."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from moelab import cli
from moelab.bench.case import OpCase
from moelab.bench.ops import OPS, Line, as_table, run, time_case
from moelab.bench.timer import BenchError, num_sets
from moelab.results import Provenance, Record, Store, collect

WHERE = Provenance("NVIDIA H200", 1, "580.1", {"torch": "2.11.0"}, "0123456", False)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_cases_are_settings_that_a_record_can_hold(op, quick):
    cases = OPS[op](quick)
    settings = [json.dumps(dict(case.params), sort_keys=True) for case in cases]
    assert len(set(settings)) == len(cases) > 0
    for case in cases:
        assert case.op == op and case.bytes > 0 and next(iter(case.backends)) == "triton"
        for backend in case.backends:
            Record.from_samples(
                [1.0], bench="ops", backend=backend, metric=op, unit="us", clock="graph", params=case.params,
                provenance=WHERE,
            )  # fmt: skip


def test_bytes_are_those_of_inputs_and_outputs():
    """Counted by hand for bfloat16 in, FP8 and float32 scales out."""
    sizes = {json.dumps(dict(c.params)): c.bytes for op in OPS for c in OPS[op](True)}
    assert sizes['{"m": 8192, "k": 7168, "scales": "row"}'] == 8192 * (7168 * 3 + 56 * 4)
    assert sizes['{"m": 8192, "h": 7168, "form": "quantize"}'] == 8192 * (7168 * 3 + 56 * 4) + 7168 * 2
    masked = [size for key, size in sizes.items() if '"populated": 256' in key]
    assert masked == [256 * (4096 * 2 + 2048 + 16 * 4) + 32 * 4]


def test_shares_are_of_the_roof_that_binds():
    record = Record.from_samples(
        [50.0], bench="ops", metric="gemm", unit="us", clock="graph", params={"m": 1}, provenance=WHERE
    )
    case = OpCase("gemm", {"m": 1}, lambda device: None, {}, bytes=100e6, flops=40e9)
    assert Line(case, record, 4000.0).share == pytest.approx(0.5)  # 2 TB/s of 4
    bound = OpCase("gemm", {"m": 1}, lambda device: None, {}, bytes=100e6, flops=40e9, roof="fp8")
    line = Line(bound, record, 1600.0)
    assert line.share == pytest.approx(0.5) and line.to_dict()["tflop_per_s"] == pytest.approx(800)  # of 1600
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(as_table([line]))
    assert "50% fp8" in console.export_text()


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "ops", "--op", "quantize", "--records", str(tmp_path)])
    out, err = capsys.readouterr()
    assert end.value.code == 1 and out == "" and list(tmp_path.iterdir()) == []
    assert err.strip().splitlines()[-1].startswith("error: moelab bench ops needs a GPU")


def test_an_unknown_op_is_refused(tmp_path):
    with pytest.raises(BenchError, match="no op 'quantise'; there are: quantize, rms_norm"):
        list(run(["quantise"], True, Store(tmp_path)))


@pytest.mark.gpu
def test_a_case_is_timed_on_rotated_inputs():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; none here")
    gpu, made = torch.device("cuda"), []

    def make(device):
        made.append(torch.randn(1 << 20, device=device))
        return made[-1], torch.empty_like(made[-1])

    case = OpCase("copy", {"n": 1 << 20}, make, {"torch": lambda i: i[1].copy_(i[0])}, bytes=2 * 4 << 20)
    record = next(time_case(case, gpu, collect("cuda", gpu_count=1)))
    l2 = torch.cuda.get_device_properties(gpu).L2_cache_size
    assert len(made) == num_sets(case.bytes, gpu) and len(made) * case.bytes > 2 * l2
    assert record.clock == "graph" and record.unit == "us" and record.n >= 20
    assert 0.5 < record.p50 < 100  # 8 MiB at some TB/s
