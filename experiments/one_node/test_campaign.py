"""The recipe's own tests: `python -m pytest experiments/one_node` (CPU, under a minute)."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import campaign  # noqa: E402
import comparison  # noqa: E402
import pytest  # noqa: E402
import runs  # noqa: E402
from points import GPU, SIZES, TOKENS, Point, points  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from moelab.bench.decode_memory import RESERVE, foreseen  # noqa: E402
from moelab.bench.decode_setting import Setting  # noqa: E402
from moelab.config import ConfigError  # noqa: E402
from moelab.hardware import gpu  # noqa: E402
from moelab.results import Provenance, Record, Store  # noqa: E402

H200 = Provenance("NVIDIA H200", 8, "580", {"torch": "2.11.0"}, "0" * 40, False)


def command(*arguments: str):
    result = CliRunner().invoke(campaign.app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def put(folder: Path, bench: str, metric: str, value: float, params: dict, backend="nvshmem", gpus=8) -> None:
    where = dataclasses.replace(H200, gpu_count=gpus)
    unit, clock = ("1", "none") if metric in ("rows", "active") else ("us", "graph")
    record = Record.from_samples(
        [value], bench=bench, metric=metric, unit=unit, clock=clock, provenance=where, backend=backend, params=params
    )
    Store(folder).append(record)


def sleeper(seconds: float) -> Point:
    """A point that starts a process which outlives it unless its whole group is killed."""
    code = (
        "import os, subprocess, sys, time; "
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({seconds})']); "
        "print('child', child.pid, flush=True); print('asleep', flush=True); time.sleep(99)"
    )
    return dataclasses.replace(
        points(0)[0], name="sleeper", parts={"1": [("tests", None, "never", {})]}, options=(code,)
    )


# ---- the list


@pytest.mark.parametrize("n", [4, 8])
def test_the_list_asks_for_all_of_it(n):
    found = points(n)
    assert len({point.name for point in found}) == len(found)
    deployments = {(n // tp, tp) for tp in (1, 2, 4, 8) if tp <= n}
    exchanges = {(p.dp, p.tp, p.params["routing"]) for p in found if p.verb == "alltoall"}
    assert exchanges == {(*d, routing) for d in deployments for routing in ("uniform", "group-limited", "zipf")}
    decodes = [p for p in found if p.shadow]
    asked = {(p.dp, p.tp, p.params["q_len"], p.params["overlap"]) for p in decodes if len(p.parts) > 1}
    assert asked == {(*d, q, o) for d in deployments for q in (1, 2) for o in ("none", "dispatch", "microbatch")}
    bars = [p for p in decodes if list(p.parts) == ["128"]]
    assert len(bars) == 3 and {(p.dp, p.params["q_len"]) for p in bars} == {(n, 2)}
    for point in decodes:  # the twin is in the list, and differs by what stands in alone
        assert point.shadow in found and point.shadow.gpus == 1 and point.gpus == n
        assert point.shadow.params.items() >= (point.params | {"shadow": True, "fabric": "nvlink"}).items()
        assert point.shadow.options[: len(point.options)] == point.options
    for path in (p.params["paths"] for p in found if p.verb == "pytest"):
        assert (runs.ROOT / path).exists()
    tests = [p for p in found if p.verb == "pytest"][0].arguments(["tests/x"], "/records")
    assert tests == ["-m", "pytest", "-m", "gpu", "tests/x", "--record", "/records"]


@pytest.mark.parametrize("name, all_fit", [("decode dp8 tp1 q2 none", True), ("decode dp8 tp1 q2 bar none", False)])
def test_layers_are_as_many_as_fit(name, all_fit):
    (point,) = (p for p in points(8) if p.name == name)
    layers, batch = point.params["layers"], max(map(int, point.parts))
    assert (layers == point.all_layers == 61) == all_fit

    def room(layers: int) -> float:
        setting = Setting(
            "deepseek-v3", 8, 1, (batch,), 1, 0.6, 5000, "bf16", "none", True, layers, "uniform", "nvlink", "cuda", True
        )
        need = foreseen(setting, batch)
        return gpu(GPU).memory_bytes * 0.98 * (1 - RESERVE) - need.total - 2 * need.activations

    assert room(layers) >= 0 and (all_fit or room(layers + 1) < 0)


def test_another_number_of_gpus_is_refused():
    with pytest.raises(ConfigError, match="gpus is 3: legal are 8, 4, 0"):
        points(3)
    assert set(SIZES) == {8, 4, 0}


def test_commands_are_ones_that_moelab_takes(monkeypatch, tmp_path):
    """Every option of every command is known: with what they lack here, GPUs, they end before they start."""
    from moelab import cli
    from moelab.bench import alltoall_console, alltoall_setting, decode_console

    taken = []
    monkeypatch.setattr(alltoall_setting.Setting, "ids", lambda setting: [])  # they take long to draw
    monkeypatch.setattr(alltoall_console, "on_gpus", lambda settings, *rest: taken.append(settings))
    monkeypatch.setattr(decode_console, "decode_bench", lambda batch, **asked: taken.append(asked))
    found = [p for n in (4, 8) for p in points(n) if p.verb != "pytest"]
    for point in found:
        arguments = point.arguments(list(point.parts), str(tmp_path))
        assert arguments[:2] == ["-m", "moelab"]
        with pytest.raises(SystemExit) as end:
            cli.main(arguments[2:])
        assert not end.value.code, arguments
        if point.verb == "decode":
            asked = taken[-1]
            assert (asked["layers"], asked["shadow"]) == (point.params["layers"], point.params["shadow"])
            del asked["as_json"], asked["records"], asked["graph"]
            batches = tuple(map(int, point.parts))
            params = Setting(batches=batches, graph=True, **asked).params(batches[0], 0)
            assert point.params.items() <= params.items()
        else:
            assert [s.tokens for s in taken[-1]] == list(TOKENS)
            assert all(point.params.items() <= s.params().items() for s in taken[-1])
    assert len(taken) == len(found)


def test_plan_says_what_cannot_be_run_here(monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "visible_gpus", lambda: [campaign.SmiGPU(0, "NVIDIA H100", 85 * 10**9, "580")])
    text = command("plan", "--only", "dp8 tp1 q2 bar none", "--records", str(tmp_path)).output
    real, shadow = (line for line in text.splitlines() if "bar none" in line)
    assert "it takes 8 GPUs, here: 1" in real and "a rank takes 142 GB, a GPU here has 85" in shadow
    ended = command("run", "--minutes", "99", "--only", "dp8 tp1 q2 bar none", "--records", str(tmp_path))
    assert ended.exit_code == 0 and ended.output.count("not started") == 2 and not (tmp_path / runs.JOURNAL).exists()


# ---- running


def test_a_small_campaign_and_what_is_left_of_it(tmp_path):
    """For real: two processes over gloo and a shadow rank; then records of one batch are lost."""
    records = ["--gpus", "0", "--only", "dp2", "--records", str(tmp_path)]
    ended = command("run", "--minutes", "0.5", *records)  # too short for any of them
    assert ended.output.count("not started, it may take") == 3 and ended.exit_code == 0
    names = [point.name for point in points(0) if point.verb != "pytest"]
    ended = command("run", "--minutes", "15", *records)
    assert ended.exit_code == 0, ended.output
    assert [line.split(", ")[0] for line in ended.output.splitlines()] == [f"{name}: done" for name in names]
    assert command("run", "--minutes", "15", *records).output == ""  # nothing is left

    shown = command("compare", *records).output
    (row,) = comparison.decode_rows(points(0), Store(tmp_path, package=False))
    assert {"step", "MoE layer", "dense layer", "GroupGEMM", "Dispatch", "rows"} <= row.terms.keys()
    assert all(shadow is not None for _, shadow in row.terms.values())
    assert f"{row.terms['step'][0]:.1f}" in shown and f"{row.error('GroupGEMM'):+.0%}" in shown

    (file,) = tmp_path.glob("cpu/decode.jsonl")
    kept = [line for line in file.read_text().splitlines() if not json.loads(line)["params"]["shadow"]]
    file.write_text("\n".join(kept) + "\n")
    (row,) = comparison.decode_rows(points(0), Store(tmp_path, package=False))
    assert row.terms["step"][1] is None and row.error("step") is None
    assert campaign._error(row, "step") == comparison.NOT_RUN
    lines = {name: line for line in command("plan", *records).output.splitlines() for name in names if name in line}
    assert ["done" in lines[name] for name in names] == [True, True, False]
    ended = command("run", "--minutes", "15", *records)
    assert ended.output.startswith("shadow dp2 tp1 q1 none: done") and ended.exit_code == 0
    assert len((tmp_path / runs.JOURNAL).read_text().splitlines()) == len(names) + 1


def test_over_its_limit_all_of_it_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "GONE_S", 0.0)
    monkeypatch.setattr(Point, "arguments", lambda self, parts, records: ["-c", *self.options])
    start = time.monotonic()
    ended = runs.run(sleeper(77), tmp_path, limit_s=1.5)
    assert ended.status == "limit" and ended.left == ["1"] and not ended.well and time.monotonic() - start < 12
    assert ended.said.endswith("asleep") and "killed at its limit" in campaign._line(ended)
    child = int(ended.said.split()[1])
    for _ in range(50):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        if Path(f"/proc/{child}/stat").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            break  # dead; nobody has asked for it
        time.sleep(0.1)
    else:
        pytest.fail("the process that it started is still there")


def test_one_that_fails_is_told_and_comes_last(monkeypatch, tmp_path):
    bad = dataclasses.replace(sleeper(0), name="bad", options=("print('before'); raise SystemExit('it broke')",))
    monkeypatch.setattr(Point, "arguments", lambda self, parts, records: ["-c", *self.options])
    fine = dataclasses.replace(bad, name="fine")
    ended = runs.run(bad, tmp_path)
    assert (ended.status, ended.said) == (1, "before | it broke")
    assert campaign._line(ended).startswith("bad: exit status 1,") and "no records of 1; last words" in campaign._line(
        ended
    )
    with (tmp_path / runs.JOURNAL).open("a") as journal:
        journal.write('{"name": "fi')  # the machine was lost
    assert [p.name for p in runs.in_order([bad, fine], tmp_path)] == ["fine", "bad"]


# ---- reading


def test_exchange_beside_aims(tmp_path):
    (point,) = (p for p in points(8) if p.name == "alltoall dp8 tp1 uniform")
    ours = point.params | {"ep": 8, "tokens": 128, "blocks": 0}
    for returns, dispatch, combine, pair in (("bf16", 19.0, 42.0, 58.0), ("rows", 15.0, 60.0, 72.0)):
        for metric, us in (("dispatch", dispatch), ("combine", combine), ("pair_fused", pair)):
            put(tmp_path, "alltoall", metric, us, ours | {"returns": returns})
    put(tmp_path, "alltoall", "pair_fused", 99.0, point.params | {"ep": 8, "tokens": 128}, "nccl-padded")
    put(tmp_path, "alltoall", "pair_fused", 1.0, ours | {"returns": "bf16", "dp": 2, "ep": 2}, gpus=2)
    found = comparison.exchange(point, Store(tmp_path, package=False))
    assert list(found) == list(TOKENS) and found[1] == [comparison.Halves("ours", None, None)]
    assert [(x.dispatch, x.combine, x.pair) for x in found[128]] == [(19.0, 42.0, 58.0), (None, None, 99.0)]
    said = comparison.verdict(point, found[128][0])
    assert said == "dispatch ≤ 20: 19.0, reached; combine ≤ 35: 42.0, missed by 20%"
    assert comparison.verdict(point, found[1][0]) == "dispatch ≤ 20: not run; combine ≤ 35: not run"
    left = runs.Seen(tmp_path).left(point)
    assert left == [str(t) for t in TOKENS if t != 128]
    asked = point.arguments(left, "records")
    assert asked[asked.index("--tokens") + 1] == ",".join(left)  # what is there is not run again
    text = command("compare", "--only", "dp8 tp1 uniform", "--records", str(tmp_path)).output
    assert "missed by 20%" in text and "pplx-garden docs/fabric-lib.md" in text.replace("\n", " ")


def test_published_figures_of_ep8():
    found = {(x.dispatch, x.combine) for x in comparison.others_published(8)}
    assert {(42.6, 72.0), (49.7, 64.2)} <= found and all(x.source for x in comparison.others_published(8))
    assert comparison.others_published(3) == []


def test_errors_by_term():
    rows = [
        comparison.Row("a", 1, {"step": (100.0, 90.0), "rows": (0.0, 0.0)}),
        comparison.Row("a", 2, {"step": (100.0, 104.0), "GEMM": (5.0, None)}), comparison.Row("a", 4, {}),
    ]  # fmt: skip
    count, middle, low, high = comparison.errors(rows)["step"]
    assert (count, low, high) == (2, pytest.approx(-0.1), pytest.approx(0.04)) and middle == pytest.approx(0.07)
    assert comparison.errors(rows).keys() == {"step"}
