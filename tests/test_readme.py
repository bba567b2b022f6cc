"""The README is true to the letter: its programs run, its commands exist, its tree and numbers are real."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
PROGRAMS = [text for language, text in FENCED if language == "python"]
BLOCKS = [text for language, text in FENCED if not language]


def run(*command: str, cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", [p for p in PROGRAMS if "torch.distributed" not in p])
def test_programs_run(program, tmp_path):
    (tmp_path / "program.py").write_text(program)
    output = run(sys.executable, "program.py", cwd=tmp_path)
    assert output.strip()
    if "memory.fit" in program:
        assert output.splitlines() == [
            "16.6 GB of weights, 164 requests of 5,000 tokens per DP group",
            "2.00 active experts per GPU and layer",
        ]


def test_the_exchange_program_is_thirty_lines_and_right(tmp_path):
    (program,) = [p for p in PROGRAMS if "torch.distributed" in p]
    assert len(program.splitlines()) <= 33
    (tmp_path / "exchange.py").write_text(program)
    output = run(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "exchange.py",
        cwd=tmp_path,
    )
    sent = re.findall(r"rank (\d): sent (\d+) tokens, computed (\d+) rows, largest error ([\d.]+)", output)
    assert sorted((int(r), int(t)) for r, t, _, _ in sent) == [(0, 0), (1, 3), (2, 6), (3, 9)]
    assert sum(int(rows) for _, _, rows, _ in sent) == 18 * 4
    assert all(float(error) < 0.05 for *_, error in sent)


def test_commands_exist():
    commands = [line for block in BLOCKS for line in block.splitlines() if "moelab " in line or line.startswith("make")]
    assert len(commands) >= 6
    for line in commands:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
            continue
        verbs = [word for word in words[1:3] if word.isalpha()]
        help_text = run(sys.executable, "-m", "moelab", *verbs, "--help", cwd=ROOT)
        assert all(word.split("=")[0] in help_text for word in words if word.startswith("--")), line


def test_the_tree_is_the_tree():
    (tree,) = [block for block in BLOCKS if block.startswith("moelab/\n")]
    lines = [line.split()[0] for line in tree.splitlines()]
    inside = [name for name, line in zip(lines, tree.splitlines(), strict=True) if line.startswith("  ")]
    for name in inside:
        assert (ROOT / "moelab" / name).exists(), name
    for name in set(lines) - set(inside):
        assert (ROOT / name).exists(), name
    there = {p.name for p in (ROOT / "moelab").iterdir() if not p.name.startswith(("_", "."))}
    assert there - {"py.typed", "share.py"} == {name.rstrip("/") for name in inside}


def test_figures_are_there_and_small():
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT):
        assert (ROOT / path).stat().st_size < 200_000


def test_tinyseeks_numbers_are_the_records():
    lines = (ROOT / "moelab/data/records/h200x1/tinyseek.jsonl").read_text().splitlines()
    values = {}
    for record in map(json.loads, lines):
        values.setdefault(record["metric"], []).append(record["p50"])
    assert f"**{values['heldout_bits_per_byte'][0]:.3f} bits per byte**" in TEXT
    assert f"`xz -9`: {values['xz_bits_per_byte'][0]:.3f}" in TEXT
    assert f"accepted at {max(values['mtp_acceptance']):.3f}" in TEXT


def test_the_kernels_numbers_are_the_records():
    folder = ROOT / "moelab/data/records/h200x1"
    records = [json.loads(line) for name in ("ops", "roofs") for line in (folder / f"{name}.jsonl").open()]

    def p50(metric, backend, **params):
        found = [r for r in records if (r["metric"], r["backend"]) == (metric, backend)]
        (one,) = [r["p50"] for r in found if params.items() <= r["params"].items()]
        return one

    def of_copy(size, us):
        return f"{100 * size / us / 1e3 / p50('copy', 'torch'):.0f} %"

    def times(metric, backend, settings, digits=1, join=" / "):
        return join.join(f"{p50(metric, backend, **setting):.{digits}f}" for setting in settings)

    wide, of_silu = 8192 * (3 * 7168 + 4 * 56), 16384 * (5 * 2048 + 4 * 16) + 4 * 32
    norm = {"m": 8192, "h": 7168, "form": "quantize"}
    quantize = p50("quantize", "triton", m=8192, k=7168, scales="row")
    silu = [{"populated": n} for n in (256, 2048, 16384)]
    qkv_a, q_b = ([{"m": m, "n": n, "k": k} for m in (16, 64, 256)] for n, k in ((2112, 7168), (24576, 1536)))
    absorbed = [{"projection": name, "tokens": 256, "heads": 128} for name in ("k_b", "v_b")]
    experts = [{"layout": "padded", "projection": "gate_up", "groups": g, "m": m} for g, m in ((32, 8), (2, 256))]
    mla = [{"batch": 128, "q_len": 2, "kv_len": 5000, "heads": heads, "kv": "bf16"} for heads in (128, 16)]
    routed = [{"tokens": 256, "gather": gather} for gather in (0, 1)]
    expected = {
        "quantise 1×128": (f"{quantize:.1f}", of_copy(wide, quantize)),
        "RMSNorm + quantise": (
            times("rms_norm", "triton", [norm]), of_copy(wide + 2 * 7168, p50("rms_norm", "triton", **norm))
        ),
        "SiLU·mul + quantise": (
            times("silu_mul", "triton", silu), of_copy(of_silu, p50("silu_mul", "triton", **silu[-1]))
        ),
        "router, 256 tokens": (
            times("router", "triton", routed, join="; "), times("router", "flashinfer", routed[:1])
        ),
        "linear 7168 → 2112": (times("linear", "moelab", qkv_a), times("linear", "deep_gemm", qkv_a)),
        "linear 1536 → 24576": (times("linear", "moelab", q_b), times("linear", "deep_gemm", q_b)),
        "k_b; v_b": (times("bmm", "triton", absorbed, join="; "), times("bmm", "cublas", absorbed, join="; ")),
        "grouped GEMM": tuple(
            f"{p50('grouped_gemm', b, **experts[0]):.0f} / {p50('grouped_gemm', b, **experts[1]):.1f}"
            for b in ("moelab", "deep_gemm")
        ),
        "MLA decode": (times("mla", "triton", mla, 0), times("mla", "flashinfer", mla, 0)),
    }  # fmt: skip
    rows = TEXT.partition("| op | ours [µs]")[2].partition("\n\n")[0].splitlines()
    table = [line.split(" | ") for line in rows if " | " in line]
    assert len(table) - 1 == len(expected)  # the first is what is left of the head
    for (name, (ours, beside)), (op, is_ours, is_beside) in zip(expected.items(), table[1:], strict=True):
        assert op.startswith(f"| {name}") and is_ours == ours and beside in is_beside, (op, ours, beside)


def test_the_exchanges_numbers_are_the_records():
    from moelab.bench import alltoall_study as study
    from moelab.results import Store

    found, floor = study.recorded(Store(ROOT / "moelab/data/records", package=False), "NVIDIA H200", 2)
    ours = {m: study.over(found, "nvshmem", m, returns="bf16", blocks=0) for m in ("pair_fused", "dispatch", "combine")}
    pair, dispatch, combine = ours.values()
    (flag,) = [r.p50 for r in floor if r.metric == "flag"]
    bound = {line.setting.tokens: line.bound.pair for line in found}
    peers = {tokens: study.best_peer(found, tokens) for tokens in pair}
    rows = [
        f"| {t} | {pair[t].p50:.1f} | {peers[t].pair:.1f}, {peers[t].backend} | {2 * flag:.1f} | {bound[t]:.1f} |"
        for t in (1, 8, 32, 128, 4096)
    ]
    assert TEXT.partition("| tokens of a rank | ours [µs]")[2].splitlines()[2:7] == rows
    said, late = " ".join(TEXT.split()), [pair[t].p50 - aim for t, aim in ((8, 11), (32, 14), (128, 24))]
    assert "by {:.1f}, {:.1f} and {:.1f} µs (11, 14 and 24)".format(*late) in said
    assert f"dispatch {dispatch[4096].p50:.0f} against 130, combine {combine[4096].p50:.0f} against 240" in said
    cost = study.split_cost(found)
    assert f"cost {' / '.join(f'{us:.1f}' for us in cost.values())} µs more" in said
    assert min(t for t, us in cost.items() if us > 3) == 32


def test_the_decode_steps_numbers_are_the_records():
    from moelab.bench.decode import LATER
    from moelab.results import Store

    found = Store(ROOT / "moelab/data/records", package=False).records("decode", gpu="NVIDIA H200", model="deepseek-v3")
    usual = {"mode": "graph", "routing": "equal", "kv_dtype": "bf16", "tp": 1, "comm_sms": 0, "compute_sms": 0}

    def us(metric: str, **given) -> float:
        wanted = (usual | given).items()
        (value,) = [r.p50 for r in found if r.metric == metric and wanted <= (LATER | r.params).items()]
        return value

    def kinds(**given) -> dict[str, float]:
        wanted = (usual | given | {"of": "moe"}).items()
        mine = [r for r in found if r.metric == "category" and wanted <= (LATER | r.params).items()]
        assert len(mine) == 10 == len({r.params["category"] for r in mine})
        return {r.params["category"]: r.p50 for r in mine}

    def kernels(**given) -> float:
        return sum(us for kind, us in kinds(**given).items() if kind not in ("Dispatch", "Combine"))

    rows = []
    for ep, layers in ((128, 61), (8, 40)):
        for batch in (1, 16, 64, 128):
            k = dict(ep=ep, layers=layers, fabric="none", overlap="none", batch=batch)
            step, moe, ratio = us("step", **k), us("layer", of="moe", **k), us("step_over_stages", **k)
            numbers = f"{step / 1e3:.1f} | {moe:,.0f} | {kernels(**k):,.0f} | {ratio:.2f}"
            rows.append(f"| EP{ep}, {layers} layers | {batch} | {numbers} |")
    assert TEXT.partition("| rank of | batch |")[2].splitlines()[2:10] == rows

    orders, far = ("none", "dispatch", "microbatch"), dict(of="moe", ep=128, layers=61, fabric="ib400")
    rows = [
        f"| {b} | " + " | ".join(f"{us('layer', overlap=o, batch=b, **far):,.0f}" for o in orders) + " |"
        for b in (4, 8, 16, 32, 64, 128)
    ]
    assert TEXT.partition("| batch | NoOverlap [µs a MoE layer]")[2].splitlines()[2:8] == rows
    held = [r for r in found if r.metric == "held" and r.params["asked_us"]]
    assert len(held) > 40 and all(abs(r.p50 / r.params["asked_us"] - 1) < 1.1e-3 for r in held)

    said = " ".join(TEXT.split())
    ratio = us("layer", overlap="microbatch", batch=128, **far) / us("layer", overlap="none", batch=128, **far)
    assert f"MicroBatch takes {ratio:.2f} of NoOverlap's time, in the study on H100 {1896 / 2667:.2f}" in said
    near = dict(of="moe", ep=8, layers=40, fabric="nvlink", batch=128)
    micro, dispatch = (us("layer", overlap=o, **near) for o in ("microbatch", "dispatch"))
    assert f"MicroBatch takes {micro:,.0f} µs where DispatchOverlap takes {dispatch:,.0f}" in said
    eight, many, few = (
        dict(ep=ep, layers=layers, fabric=fabric, overlap="none", batch=128)
        for ep, layers, fabric in ((8, 40, "none"), (128, 61, "none"), (128, 8, "ib400"))
    )
    assert f"the kernels of EP8 take {kernels(**eight):,.0f} µs" in said
    assert f"those of EP128 {kernels(**many):,.0f} (990)" in said
    assert f"{kinds(**many)['MLA']:.0f} µs of it where 589" in said
    assert f"it takes {kinds(**few)['MLA']:.0f} and the kernels {kernels(**few):.0f}:" in said


def test_the_verdicts_are_the_models():
    from moelab.perf.claims import claims, overlap_gains
    from moelab.perf.sweeps import study_sweep

    verdicts = [claim.verdict for claim in claims(study_sweep(), overlap_gains())]
    counts = [verdicts.count(v) for v in ("holds", "depends", "differs")]
    said = "Of the study's {} statements {} hold, {} hold in part, {} differ".format(len(verdicts), *counts)
    assert said in " ".join(TEXT.split())
