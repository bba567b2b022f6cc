"""`moelab bench groups`: unequal DP groups over gloo, in their own sizes and padded; what is counted, by hand."""

from __future__ import annotations

import json

import pytest
import torch

from moelab import cli
from moelab.bench import groups
from moelab.bench.groups import Block
from moelab.bench.timer import BenchError
from moelab.config import ConfigError
from moelab.launch import LaunchError
from moelab.results import Provenance, Store

HERE = Provenance("NVIDIA H200", 2, "580.1", {"torch": "2.11.0"}, "0123456", False)
K, MOE_LAYERS = 4, 4  # of tinyseek


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs the command; (exit status, what it printed, what it said on standard error, its records)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: str):
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", "groups", *arguments, "--records", str(tmp_path / "records")])
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err, Store(tmp_path / "records", package=False).records("groups")

    return run


def test_two_groups_over_gloo(command):
    """One of them idle in one case. What is computed and what is routed are exact."""
    status, out, err, records = command(
        "--model", "tinyseek", "--batch-by-group", "1,5", "--batch-by-group", "3,0", "--kv-len", "40",
        "--draft-tokens", "1", "--overlap", "microbatch",
    )  # fmt: skip
    assert status == 0, err
    assert "1,5" in out and "3,0" in out and "padded" in out and "torch-gloo" in out
    found = groups.by_case(records)
    assert set(found) == {(c, *way) for c in ("1,5", "3,0") for way in (("own", "none"), ("padded", "host"))}
    for case, own, common in (("1,5", 6, 10), ("3,0", 3, 6)):
        mine, padded = found[case, "own", "none"], found[case, "padded", "host"]
        assert mine["tokens"].p50 == 2 * own and padded["tokens"].p50 == 2 * common
        assert mine["rows"].p50 == padded["rows"].p50 == 2 * own * K * MOE_LAYERS  # padding is routed nowhere
        assert "agree" not in mine and padded["agree"].p50 > 0
        for numbers in (mine, padded):
            assert numbers["step"].p50 >= max(numbers[part].p50 for part in ("fill", "run"))
            assert numbers["launches"].p50 > 100
    for record in records:
        at = record.params
        assert record.backend == "torch-gloo" and record.kind == "measured" and record.gpu == "cpu"
        assert record.clock == ("none" if record.unit == "1" else "wall")
        assert (at["dp"], at["tp"], at["ep"], at["q_len"], at["kv_len"]) == (2, 1, 2, 2, 40)
        assert (at["overlap"], at["mode"], at["arithmetic"], at["kv_dtype"]) == (
            "microbatch",
            "eager",
            "float32",
            "f32",
        )
        assert "batch" not in at and "shadow" not in at
    assert len({record.key() for record in records}) == len(records)


def test_json_and_tensor_parallel_ranks(command):
    """The ranks of a group compute the same tokens, which count once; rows count where they arrive."""
    status, out, err, records = command(
        "--model", "tinyseek", "--batch-by-group", "1,2", "--tp", "2", "--kv-len", "40", "--json"
    )
    assert status == 0, err
    assert len(json.loads(out)["records"]) == len(records)
    found = groups.by_case(records)
    assert found["1,2", "own", "none"]["tokens"].p50 == 3 and found["1,2", "padded", "host"]["tokens"].p50 == 4
    assert {numbers["rows"].p50 for numbers in found.values()} == {3 * K * MOE_LAYERS}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-by-group", "4"], "batch-by-group is '4': give the requests of each DP group, as 1,64"),
        (["--batch-by-group", "1,x"], "batch-by-group is '1,x': give the requests"),
        (["--batch-by-group", "0,0"], "batch-by-group is '0,0': give the requests"),
        (["--batch-by-group", "1,2", "--batch-by-group", "1,2,3"], "1,2 and 1,2,3: give as many groups each time"),
        (["--batch-by-group", "1,2", "--graph"], "a CPU has no CUDA graphs"),
        (["--batch-by-group", "1,2,3", "--model", "tinyseek"], "16 experts divide only over"),
        (["--batch-by-group", "1,2"], "takes a GPU: on a CPU give --model tinyseek"),
        (["--batch-by-group", "1,2", "--device", "cuda"], "each rank takes a GPU, ranks are 2 and GPUs here 0"),
    ],
)
def test_what_cannot_be_is_one_line(command, arguments, message):
    status, out, err, records = command(*arguments)
    assert status == 1 and out == "" and not records
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_records_of_a_run_that_ends_early_are_kept(command, monkeypatch):
    """Of what all ranks had measured, and of nothing else."""
    said = {"backend": "torch-gloo", "max_tokens": 2}

    def fails(setting, cases, events):
        events += [(0, said), (0, event("step", [1.0])), (1, event("step", [2.0])), (0, event("run", [1.0]))]
        raise LaunchError("the lights went out")

    monkeypatch.setattr(groups, "run", fails)
    status, out, err, records = command("--batch-by-group", "1,2", "--model", "tinyseek")
    assert status == 1 and out == "" and "error: the lights went out" in err
    assert [(r.metric, r.p50) for r in records] == [("step", 2.0)]


def event(metric, samples, way="own", agree="none", unit="us", batches=(1, 2)):
    return {
        "batches": list(batches), "way": way, "agree": agree, "metric": metric, "unit": unit,
        "clock": "wall" if unit == "us" else "none", "samples": samples, "warmup": 2,
    }  # fmt: skip


def test_what_ranks_report_becomes_records():
    """Times are the slowest rank's of each repetition, counts are sums or the most."""
    setting = groups.setting([(1, 2)], model="deepseek-v3", layers=5, device="cuda", graph=True)
    of_ranks = [
        [event("step", [10.0, 40.0, 30.0]), event("rows", [7], unit="1"), event("launches", [300], unit="1")],
        [event("step", [20.0, 20.0, 50.0]), event("rows", [5], unit="1"), event("launches", [310], unit="1")],
    ]
    events = [(0, {"backend": "nvshmem", "max_tokens": 128})]
    events += [(rank, e) for rank, mine in enumerate(of_ranks) for e in mine]
    step, rows, counted = groups.records(events, setting, HERE)
    assert (step.min, step.p50, step.n, step.clock, step.warmup) == (20.0, 40.0, 3, "wall", 2)
    assert (rows.p50, counted.p50) == (12, 310)
    assert step.params["arithmetic"] == "block-fp8" and step.params["kv_dtype"] == "bf16"
    assert (step.params["batches"], step.params["mode"], step.params["layers"]) == ("1,2", "graph", 5)


def test_recorded_is_one_setting_with_graphs_in_order(tmp_path):
    said = (0, {"backend": "nvshmem", "max_tokens": 128})
    store = Store(tmp_path, package=False)

    def put(layers, graph, us, batches=(1, 2), way="own", agree="none", **asked):
        setting = groups.setting(
            [(1, 2), (16, 3)], model="deepseek-v3", layers=layers, device="cuda", graph=graph, **asked
        )
        events = [said, *((rank, event("step", [us], way, agree, batches=batches)) for rank in (0, 1))]
        for record in groups.records(events, setting, HERE):
            store.append(record)

    put(4, True, 1.0)
    put(9, False, 3.0)
    put(8, True, 9.0, overlap="microbatch")  # fewer records than the next
    put(8, True, 5.0, (16, 3))
    for way, agree, us in (("padded", "device", 4.0), ("padded", "host", 3.0), ("own", "none", 2.0)):
        put(8, True, us, (1, 2), way, agree)
    found = groups.recorded(store, "NVIDIA H200", 2)
    assert [(key, at["step"].p50) for key, at in found.items()] == [
        (("1,2", "own", "none"), 2.0), (("1,2", "padded", "host"), 3.0), (("1,2", "padded", "device"), 4.0),
        (("16,3", "own", "none"), 5.0),
    ]  # fmt: skip
    assert groups.recorded(store, "NVIDIA H200", 4) == {}


def lane(repeat, group, start, end, way="own"):
    blocks = [["fill", start, start + 1], ["q_b", start + 1, start + 5], ["dispatch_recv", start + 5, end]]
    return {"batches": [1, 2], "way": way, "group": group, "requests": group + 1, "places": 2, "repeat": repeat,
            "lane": blocks}  # fmt: skip


def test_the_step_that_is_drawn_is_the_shortest():
    ends = {0: 140.0, 1: 130.0, 2: 190.0}
    events = [(g, lane(repeat, g, 100.0 + g, end - g)) for repeat, end in ends.items() for g in (1, 0)]
    events.append((0, lane(0, 0, 0.0, 5.0, "padded")))
    first, second = groups.lanes(events, (1, 2), "own")
    assert (first.group, first.requests, first.end_us) == (0, 1, 30.0) and second.end_us == 29.0
    assert first.blocks[0] == Block("fill", 0.0, 1.0) and second.blocks[0].start_us == 1.0  # by one clock
    assert first.spent(lambda what: what == "dispatch_recv") == 25.0
    assert groups.lanes(events, (2, 2), "own") == []


def test_lessons_name_the_most_padding_and_the_control():
    setting = groups.setting([(1, 2), (2, 2)], model="tinyseek")
    said = (0, {"backend": "torch-gloo", "max_tokens": 2})
    events = [said]
    for case, tokens, us in (((1, 2), {"own": 3, "padded": 4}, {"own": 1e4, "padded": 1.5e4}),
                             ((2, 2), {"own": 4, "padded": 4}, {"own": 2e4, "padded": 2.1e4})):  # fmt: skip
        for way, (agree, *_) in groups.WAYS.items():
            for rank in (0, 1):
                events += [(rank, event("step", [us[way]], way, agree, batches=case)),
                           (rank, event("agree", [700.0], way, agree, batches=case)),
                           (rank, event("rows", [24], way, agree, "1", case)),
                           (rank, event("tokens", [tokens[way] / 2], way, agree, "1", case))]  # fmt: skip
    found = groups.by_case(groups.records(events, setting, HERE))
    first, control = groups.lessons(found)
    assert first.startswith("1 and 2 requests: padded, the groups compute 4 rows a step instead of 3, and the experts")
    assert "receive 48 either way" in first and "**1.50×** as long (15 for 10 ms)" in first and "0.7 ms" in first
    assert control.startswith("2 and 2 requests: nothing is padded") and "takes 1.05× as long" in control
    assert groups.lessons({}) == []


def test_names_and_cases():
    assert groups.cases(["1,64", "1, 64", "0,3"]) == ((1, 64), (0, 3))
    assert [groups.names(x) for x in ("1,16", "1,1,1,64", "8,8", "1,2,3")] == [
        "1 and 16", "3 × 1 and 64", "8 and 8", "1, 2 and 3",
    ]  # fmt: skip
    with pytest.raises(BenchError, match="as many groups"):
        groups.cases(["1,2", "1,2,3"])
    with pytest.raises(ConfigError, match="overlap is 'x'"):
        groups.setting([(1, 2)], overlap="x")
    assert groups.setting([(0, 3), (64, 1)]).batches == (1, 3, 64)
