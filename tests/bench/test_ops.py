"""`moelab bench ops`: its cases, its table, what it says without a GPU; and one short run with one."""

from __future__ import annotations

import inspect
import io
import json

import pytest
import torch
from rich.console import Console

from moelab import cli
from moelab.bench import console, memory_bound, ops
from moelab.bench.case import OpCase
from moelab.bench.ops import OPS, Failure, Line, as_table, cases, time_case
from moelab.bench.timer import BenchError, Samples, _rounds, num_sets
from moelab.results import Provenance, Record, collect

WHERE = Provenance("NVIDIA H200", 1, "580.1", {"torch": "2.11.0"}, "0123456", False)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_cases_are_settings_that_a_record_can_hold(op, quick):
    cases = OPS[op](quick)
    settings = [json.dumps(dict(case.params), sort_keys=True) for case in cases]
    assert len(set(settings)) == len(cases) > 0
    for case in cases:
        assert case.op == op and case.bytes > 0 and next(iter(case.backends)) in ("moelab", "triton")
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
    roofs = {"copy": 4000.0, "bf16": 800.0, "fp8": 1600.0}
    case = OpCase("gemm", {"m": 1}, lambda device: None, {}, bytes=100e6)
    assert Line(case, record, roofs).share == pytest.approx(0.5)  # 2 TB/s of 4
    case = OpCase("gemm", {"m": 1}, lambda device: None, {}, bytes=100e6, flops=48e9, compute="fp8")
    line = Line(case, record, roofs)  # 960 TFLOP/s of 1600 are more than 2 TB/s of 4
    assert (line.roof, line.share) == ("fp8", pytest.approx(0.6))
    assert line.to_dict()["tflop_per_s"] == pytest.approx(960) and line.to_dict()["roof_value"] == 1600
    page = Console(width=160, record=True, file=io.StringIO())
    page.print(as_table([line]))
    assert "60% fp8" in page.export_text()


def test_a_replay_is_long_enough_and_no_longer():
    assert _rounds(2, 2 * 5.0) == 16  # 32 calls of 5 us
    assert _rounds(64, 64 * 5.0) == 1
    assert _rounds(2, 2 * 500.0) == 3  # 3 ms
    assert _rounds(2, 2 * 5000.0) == 1


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "ops", "--op", "quantize", "--records", str(tmp_path)])
    out, err = capsys.readouterr()
    assert end.value.code == 1 and out == "" and list(tmp_path.iterdir()) == []
    assert err.strip().splitlines()[-1].startswith("error: moelab bench ops needs a GPU")


def test_the_help_names_every_op():
    (help_text,) = [option.help for option in inspect.get_annotations(cli.bench_ops, eval_str=True)["op"].__metadata__]
    assert help_text.partition(";")[0].split(", ") == list(OPS)


def test_a_table_needs_a_gpu_too(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "ops", "--op", "linear", "--write-table", "--records", str(tmp_path)])
    out, err = capsys.readouterr()
    assert end.value.code == 1 and out == "" and list(tmp_path.iterdir()) == []
    assert err.strip().splitlines()[-1].startswith("error: --write-table needs a GPU")


def test_an_unknown_op_is_refused():
    with pytest.raises(BenchError, match="no op 'quantise'; there are: quantize, rms_norm"):
        cases(["quantise"], True)


def test_a_backend_that_raises_is_told_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    def samples_in_turns(backends):
        found = []
        for calls in backends:
            try:
                found.append(Samples([float(len([call() for call in calls])), 2.0], 3))
            except ValueError as error:
                found.append(error)
        return found

    def broken(inputs):
        raise ValueError("m = 7 is too odd")

    case = OpCase("quantize", {"m": 7}, lambda device: None, {"triton": broken, "other": lambda i: i}, bytes=8e6)
    monkeypatch.setattr(ops, "samples_in_turns", samples_in_turns)
    monkeypatch.setattr(ops, "num_sets", lambda size, device: 2)
    failure, record = time_case(case, torch.device("cpu"), WHERE)
    assert isinstance(failure, Failure) and str(failure) == "quantize m=7 triton: ValueError: m = 7 is too odd"
    assert (record.backend, record.n, record.warmup) == ("other", 2, 3)
    monkeypatch.setattr(console, "require_gpu", lambda what: None)
    monkeypatch.setattr(console, "cases", lambda names, quick: [case])
    monkeypatch.setattr(console, "run", lambda todo, store: iter([failure, Line(case, record, {"copy": 4000.0})]))
    with pytest.raises(BenchError, match="1 of 2 timings failed"):
        console.ops([], True, False, tmp_path)
    out, err = capsys.readouterr()
    assert "other" in out and "m = 7 is too odd" in err


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
    assert record.clock == "graph" and record.unit == "us" and record.n >= 15
    assert 0.5 < record.p50 < 100  # 8 MiB at some TB/s


def test_the_padded_launch_has_a_program_for_every_row(monkeypatch):
    """Its peer shares the populated rows among as many programs as fit the GPU; both see the same inputs."""
    case = next(c for c in OPS["silu_mul"](True) if c.params["layout"] == "padded")
    seen = []
    monkeypatch.setattr(
        memory_bound, "silu_mul_quantize", lambda *a, **k: seen.append(memory_bound.activation.num_programs(None, 8))
    )
    before = memory_bound.activation.num_programs
    case.backends["triton-padded"]((0, 1, 2))
    assert seen == [case.params["experts"] * case.params["room"]] and memory_bound.activation.num_programs is before
