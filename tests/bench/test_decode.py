"""`moelab bench decode` on the CPU: the command on tinyseek by every schedule, its records, its errors."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from moelab import cli
from moelab.bench import decode, decode_console, decode_memory, decode_rank, decode_timer
from moelab.bench.decode_setting import Setting, batches
from moelab.bench.timer import BenchError
from moelab.config import ConfigError
from moelab.engine.memory import OutOfMemory
from moelab.ops import multiprocessors
from moelab.perf import tables
from moelab.results import Provenance, Record, Store
from moelab.stages import CATEGORIES, DENSE_LAYER, MOE_LAYER

HERE = Provenance("NVIDIA H200", 1, "580.1", {"torch": "2.11.0"}, "0123456", False)
SETTING = Setting(
    model="tinyseek", dp=1, tp=1, batches=(1, 3), draft_tokens=1, acceptance=0.6, kv_len=70, kv_dtype="bf16",
    overlap="none", shadow=False, layers=None, routing=None, fabric=None, device="cpu", graph=False,
)  # fmt: skip
SHADOW = replace(SETTING, model="deepseek-v3", dp=8, shadow=True, device="cuda", graph=True, kv_len=5000)


def halves_together(stages) -> set[str]:
    return {stage.name.removesuffix("_send").removesuffix("_recv") for stage in stages}


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs the command; (exit status, what it printed, what it said on standard error, its records)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(decode_rank, "TIMELINES", 2)
    monkeypatch.setitem(decode_timer.CALLS, "cpu", (3, 3))  # odd: a median is then a sample's

    def run(*arguments: str):
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", "decode", *arguments, "--records", str(tmp_path / "records")])
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err, Store(tmp_path / "records", package=False).records("decode")

    return run


@pytest.mark.parametrize("draft_tokens", [0, 1])
@pytest.mark.parametrize("overlap", ["none", "dispatch", "microbatch"])
def test_every_schedule_on_tinyseek(command, overlap, draft_tokens):
    status, out, _, records = command(
        "--model", "tinyseek", "--batch", "3", "--kv-len", "70", "--draft-tokens", str(draft_tokens),
        "--acceptance", "0.6", "--overlap", overlap, "--json",
    )  # fmt: skip
    assert status == 0
    shown = json.loads(out)
    (one,) = shown["batches"]
    assert one["batch"] == 3 and shown["backend"] == "virtual"
    assert sorted((Record(**record) for record in one["records"]), key=Record.key) == sorted(records, key=Record.key)

    # The layer is told stage by stage, none missing, and categories are the sums of their stages.
    found = decode.Found(SETTING, 3, records)
    for of, stages in (("moe", MOE_LAYER), ("dense", DENSE_LAYER)):
        named = found.stages(of)
        assert {stage for kind in named.values() for stage in kind} == halves_together(stages)
        assert set(named) == {stage.category for stage in stages} <= set(CATEGORIES)
        for category, kind in named.items():
            whole = found.get("category", category=category, of=of)
            assert whole.min >= sum(found.get("stage", stage=stage, of=of).min for stage in kind) * (1 - 1e-9)
            assert whole.p99 <= sum(found.get("stage", stage=stage, of=of).p99 for stage in kind) * (1 + 1e-9) + 1e3
        assert found.p50("layer", of=of) > 0
    assert one["step_over_stages"] == pytest.approx(one["step_us"] / one["stages_us"], rel=1e-6)

    # Tokens a second follow from the step, the drafts and their acceptance.
    step_us = one["step_us"] + (one["draft_us"]["first"] if draft_tokens else 0)
    assert (one["draft_us"]["first"] is None) == (draft_tokens == 0) and one["draft_us"]["next"] is None
    assert one["tok_s_request"] == pytest.approx((1.6 if draft_tokens else 1) * 1e6 / step_us, rel=1e-6)
    assert one["tok_s_gpu"] == pytest.approx(3 * one["tok_s_request"])
    assert one["rows"] == 3 * (1 + draft_tokens) * 4  # four experts of a token, all of them here
    assert one["memory_bytes"]["weights"]["measured"] == one["memory_bytes"]["weights"]["foreseen"]
    assert one["memory_bytes"]["KV cache"]["measured"] == one["memory_bytes"]["KV cache"]["foreseen"]

    for record in records:
        assert record.bench == "decode" and record.kind == "measured" and record.gpu == "cpu"
        assert record.clock == ("none" if record.unit in ("1", "B") else "wall")
        assert record.params["overlap"] == overlap and record.params["q_len"] == 1 + draft_tokens
        assert record.params["mode"] == "eager" and record.params["fabric"] == "real"
        assert record.params["comm_sms"] == record.params["compute_sms"] == 0
    assert len({record.key() for record in records}) == len(records)


def test_tables_and_an_fp8_cache(command):
    status, out, err, records = command("--model", "tinyseek", "--batch", "2,1", "--kv-len", "65", "--kv-dtype", "fp8")
    assert status == 0 and "Traceback" not in err
    for part in ("batch 1", "batch 2", "MoE layer", "dense layer", "silu_mul_quant", "GroupGEMM", "KV cache", "tok/s"):
        assert part in out
    assert {record.params["batch"] for record in records} == {1, 2}
    assert {record.params["kv_dtype"] for record in records} == {"fp8"}
    (cache,) = (r for r in records if r.params.get("part") == "KV cache" and r.params["from"] == "measured")
    assert cache.p50 == 2 * 2 * 64 * 6 * 656 and cache.params["batch"] == 2  # two pages each, MTP's layer too


def test_a_shadow_rank(command):
    """One of eight, by the law of a fabric: its records say what stood in for what, and are no measurements."""
    status, out, _, records = command(
        "--model", "tinyseek", "--shadow", "--dp", "4", "--tp", "2", "--layers", "3", "--batch", "2", "--kv-len", "66",
        "--fabric", "nvlink", "--routing", "uniform",
    )  # fmt: skip
    assert status == 0 and "one rank, the others and the exchange with them stood in for: routing uniform" in out
    assert {(r.backend, r.kind, r.params["shadow"]) for r in records} == {("stand-in", "stand-in", True)}
    assert {(r.params["ep"], r.params["layers"], r.params["moe_layers"]) for r in records} == {(8, 3, 2)}
    assert {(r.params["routing"], r.params["fabric"], r.params["weights"]) for r in records} == {
        ("uniform", "nvlink", "random")
    }
    found = decode.Found(SETTING, 2, records)
    for half in ("dispatch", "combine", "tp_reduce"):
        assert found.p50("sent", half=half) > 0 and found.p50("received", half=half) > 0
        assert found.p50("exposed", half=half) >= 0 and found.p50("sms", half=half) >= 1
    for held in found.of("held"):  # as long as asked, or longer where this machine was slow
        assert held.params["asked_us"] > 0 and held.min >= held.params["asked_us"] and held.unit == "us"
    assert found.p50("tok_s_gpu") == pytest.approx(2 / 2 * found.p50("tok_s_request"))
    assert {"tp_reduce"} < set(found.stages("moe")["other"])


def test_two_ranks(command):
    """Processes over gloo; a sample is the slower one's."""
    status, out, err, records = command("--model", "tinyseek", "--dp", "2", "--batch", "1", "--kv-len", "64", "--json")
    assert status == 0, err
    assert {(record.backend, record.params["ep"]) for record in records} == {("torch-gloo", 2)}
    (one,) = json.loads(out)["batches"]
    assert one["rows"] >= 2 * 4 / 2  # of the rank that gets more
    assert one["stage_us"]["moe"]["Dispatch"]["dispatch"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nope"], "model is 'nope': give deepseek-v3, tinyseek, or a checkpoint's folder"),
        (["--batch", "4,x"], "batch is 'x': give numbers"),
        (["--batch", "0"], "batch is 0: legal are 1 or more"),
        (["--batch", "max", "--batch", "4"], "batch is 'max': give numbers"),
        (["--draft-tokens", "4"], "draft-tokens is 4: legal are 0…3"),
        (["--acceptance", "1.5"], "acceptance is 1.5: legal are 0…1"),
        (["--kv-len", "1", "--draft-tokens", "1"], "kv-len is 1: legal are at least the 2 tokens of a step"),
        (["--model", "tinyseek", "--kv-len", "5000"], "kv-len is 5000: legal are up to 4096, the model's positions"),
        (["--fabric", "ib400"], "fabric is ib400, which stands in for the other ranks of a shadow rank: add --shadow"),
        (["--routing", "equal"], "routing is equal, which stands in"),
        (["--model", "tinyseek", "--layers", "2"], "layers is 2: a checkpoint is run whole"),
        (["--layers", "70"], "layers is 70: legal are 1…61"),
        (["--model", "tinyseek", "--dp", "3"], "16 experts divide only over"),
        (["--comm-sms", "-1"], "comm-sms is -1: legal are numbers of SMs from 1 on, and 0 for all"),
        (["--compute-sms", "24"], "compute-sms is 24, and a CPU has no SMs to share: leave --compute-sms out"),
        (["--graph"], "a CPU has no CUDA graphs: leave --graph out"),
        ([], "model deepseek-v3 (hidden 7168) takes a GPU: on a CPU give --model tinyseek"),
        (["--shadow", "--dp", "8"], "takes a GPU"),
        (["--device", "cuda"], "each rank takes a GPU, ranks are 1 and GPUs here 0"),
    ],
)
def test_what_cannot_be_is_one_line(command, arguments, message):
    status, out, err, records = command(*arguments)
    assert status == 1 and out == "" and not records
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_what_does_not_fit_is_refused_before_it_is_loaded(command, monkeypatch):
    monkeypatch.setattr(decode_rank, "available_bytes", lambda device, ranks: 30_000_000)
    monkeypatch.setattr(decode_rank, "_load", None)  # would fail if it came to that
    status, out, err, records = command("--model", "tinyseek", "--batch", "1,64", "--kv-len", "300")
    assert status == 1 and out == "" and not records
    assert "a rank needs" in err and "KV cache" in err and "has 0.03 GB" in err and err.count("\n") == 1
    named = int(err.partition("batch of ")[2].split()[0])
    setting = replace(SETTING, draft_tokens=0, kv_len=300)
    assert decode_memory.fitting(replace(setting, batches=(1, named)), 30e6) == (1, named)
    with pytest.raises(OutOfMemory, match=f"batch of {named} requests"):
        decode_memory.fitting(replace(setting, batches=(1, named + 1)), 30e6)
    with pytest.raises(OutOfMemory, match="not one request would fit"):
        decode_memory.fitting(setting, 10e6)


def test_max_is_the_largest_batch_that_fits_and_times_its_step_alone(command, monkeypatch):
    monkeypatch.setattr(decode_rank, "available_bytes", lambda device, ranks: 23_000_000)
    status, out, _, records = command("--model", "tinyseek", "--batch", "max", "--kv-len", "130", "--json")
    (one,) = json.loads(out)["batches"]
    setting = replace(SETTING, draft_tokens=0, kv_len=130, batches=())
    assert status == 0 and (one["batch"],) == decode_memory.fitting(setting, 23e6) and one["batch"] > 1
    assert one["step_us"] > 0 and one["stages_us"] is None and {r.metric for r in records} >= {"step", "memory"}
    counted = decode_memory.foreseen(setting, one["batch"])
    assert counted.total <= 23e6 * (1 - decode_memory.RESERVE) < decode_memory.foreseen(
        setting, one["batch"] + 1
    ).total  # fmt: skip
    assert one["memory_bytes"]["total"]["foreseen"] == counted.total


def test_a_full_size_rank_is_counted():
    """EP8 of an H200, drafts and all: between one hundred and the study's rounder guesses, and by the parts' sum."""
    largest = decode_memory.fitting(replace(SHADOW, batches=()), 150e9)
    assert 100 < largest[0] < 130
    need = decode_memory.foreseen(SHADOW, largest[0])
    assert decode_memory.totals(need)["total"] == need.total == sum(need.parts.values())
    assert set(decode_memory.totals(need)) == set(decode_memory.PARTS)
    with pytest.raises(OutOfMemory, match=f"weights 103, KV cache 46.2.* batch of {largest[0]} requests of 5000"):
        decode_memory.fitting(replace(SHADOW, batches=(128,)), 150e9)
    assert decode_memory.fitting(replace(SHADOW, batches=(128,), layers=40), 150e9) == (128,)
    assert decode_memory.fitting(replace(SHADOW, dp=128, batches=(1, 16, 64, 128)), 150e9) == (1, 16, 64, 128)


@pytest.mark.parametrize("name", ["comm_sms", "compute_sms"])
def test_a_budget_is_at_most_what_the_gpu_has(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    replace(SHADOW, **{name: 132}).check_here()
    said = name.replace("_", "-")
    with pytest.raises(BenchError, match=f"{said} is 133: the GPU has 132; give 1…132, or leave --{said} out for all"):
        replace(SHADOW, **{name: 133}).check_here()


@pytest.mark.parametrize("shadow", [True, False])
def test_budgets_reach_the_exchange_and_all_that_is_measured(monkeypatch, shadow):
    setting = replace(SHADOW, shadow=shadow, comm_sms=20, compute_sms=100, dp=8 if shadow else 1, batches=(1,))
    params = setting.params(1, 16)
    assert (params["comm_sms"], params["compute_sms"]) == (20, 100)
    assert "exchange on 20 SMs; compute on 100 SMs" in decode_console._heading(setting, "stand-in")
    seen = {}

    class Loaded(Exception):
        pass

    def group(ep, device, num_sms):
        seen["comm"] = num_sms

    def load(*args, num_sms=None, **options):
        seen.update({"compute": multiprocessors.budget()} | ({"comm": num_sms} if shadow else {}))
        raise Loaded

    monkeypatch.setattr(multiprocessors, "all_of", lambda device: 132)
    monkeypatch.setattr(decode_rank, "available_bytes", lambda device, ranks: 10**13)
    monkeypatch.setattr(decode_rank, "Ranks", lambda *_: None)
    monkeypatch.setattr(decode_rank.decode_memory, "Measured", lambda device: None)
    monkeypatch.setattr(decode_rank.decode_memory, "fitting", lambda setting, capacity: (1,))
    monkeypatch.setattr(decode_rank.decode_memory, "foreseen", lambda setting, batch: None)
    monkeypatch.setattr(decode_rank, "default_group", group)
    monkeypatch.setattr(decode_rank, "RandomWeights", lambda *_: None)
    monkeypatch.setattr(decode_rank, "shadow_rank", load)
    monkeypatch.setattr(decode_rank.DeepSeek, "load", load)
    context = SimpleNamespace(device="cuda:0", world_size=1, rank=0, emit=lambda event: None)
    with pytest.raises(Loaded):
        decode_rank.measure(context, {"setting": asdict(setting)})
    assert seen == {"comm": 20, "compute": 100} and multiprocessors.budget() is None


def test_a_setting_says_what_it_is():
    assert SHADOW.params(16, 32) == {
        "model": "deepseek-v3", "dp": 8, "tp": 1, "ep": 8, "batch": 16, "draft_tokens": 1, "q_len": 2, "kv_len": 5000,
        "kv_dtype": "bf16", "overlap": "none", "layers": 61, "moe_layers": 58, "max_tokens": 32, "mode": "graph",
        "weights": "random", "shadow": True, "routing": "equal", "fabric": "none", "comm_sms": 0, "compute_sms": 0,
    }  # fmt: skip
    few = replace(SHADOW, layers=2, draft_tokens=0)
    assert (few.config.num_hidden_layers, few.config.num_moe_layers, few.config.num_nextn_predict_layers) == (2, 2, 0)
    assert (SHADOW.max_tokens(1), SHADOW.max_tokens(9), SHADOW.max_tokens(128)) == (16, 32, 256)
    assert replace(SHADOW, dp=128).max_tokens(1) == 2  # an expert's room is dp · M rows, a multiple of 128
    assert SHADOW.parallel.gpus_per_node == 8 and replace(SHADOW, dp=32, tp=4).processes == 1
    with pytest.raises(ConfigError, match="TP group would span nodes"):
        replace(SHADOW, dp=4, tp=16)
    assert batches(["1,16", "64"]) == (1, 16, 64) and batches(["max"]) == () and SETTING.clock == "wall"
    with pytest.raises(BenchError, match="batch is ''"):
        batches([""])


def event(metric, samples, unit="us", clock="graph", batch=16, **params):
    return {
        "batch": batch, "metric": metric, "params": params, "unit": unit, "clock": clock, "samples": samples,
        "warmup": 2,
    }  # fmt: skip


def test_what_ranks_report_becomes_records():
    """By hand: two ranks, of which the slower counts; two and three layers; a step beside its stages."""
    setting = replace(SHADOW, shadow=False, dp=2, batches=(16,), layers=5)
    fast = [
        event("step", [900.0, 1000.0]), event("draft", [100.0, 120.0], of="first"),
        event("engine_step", [1500.0, 1600.0, 900.0], clock="wall"), event("layer", [200.0], of="moe"),
        event("stage", [100.0, 130.0], of="moe", stage="mla", category="MLA"),
        event("stage", [0.0, 0.0], of="moe", stage="dispatch", category="Dispatch"),
        event("stage", [50.0, 40.0], of="moe", stage="gate_up", category="GroupGEMM"),
        event("stage", [30.0, 30.0], of="moe", stage="down", category="GroupGEMM"),
        event("stage", [100.0, 100.0], of="dense", stage="mla", category="MLA"),
        event("stage", [20.0, 20.0], of="step", stage="head", category="GEMM"),
        event("memory", [7.0], unit="B", clock="none", part="weights", **{"from": "measured"}),
    ]  # fmt: skip
    slow = [e | {"samples": [x + 10 for x in e["samples"]]} for e in fast]
    late = [event("step", [5.0], batch=64)]  # of one rank alone: the run ended
    said = {"backend": "nvshmem", "max_tokens": 64}
    events = [(0, e) for e in fast + late] + [(1, e) for e in slow]
    (one,) = decode.collect(events, setting, said, HERE)
    assert one.batch == 16 and one.get("step").min == 910 and one.get("step").n == 2
    assert one.get("category", category="GroupGEMM", of="moe").min == pytest.approx(50 + 40)
    assert one.p50("category", category="GroupGEMM", of="moe") == pytest.approx((60 + 40 + 50 + 40) / 2)
    assert one.without_exchange_us == pytest.approx((110 + 140) / 2 + 95)
    # Two MoE and three dense layers of five, and the head.
    sums = [2 * (110 + 10 + 60 + 40) + 3 * 110 + 30, 2 * (140 + 10 + 50 + 40) + 3 * 110 + 30]
    assert [one.get("stages").min, one.get("stages").p50] == pytest.approx([min(sums), sum(sums) / 2])
    middle = sum(sums) / 2
    assert one.get("step_over_stages").min == pytest.approx(910 / middle)
    assert one.get("tok_s_request").min == pytest.approx(1.6e6 / (1010 + 120), rel=1e-6)
    assert one.get("host").p50 == pytest.approx(1510 - 960 - 120) and one.get("host").min == 0
    assert one.get("tok_s_gpu", acceptance=0.6).p50 == pytest.approx(16 * one.p50("tok_s_request"))
    assert one.memory() == {"weights": {"measured": 17}}
    assert {(r.backend, r.kind, r.params["max_tokens"]) for r in one.records} == {("nvshmem", "measured", 64)}

    (stood_in,) = decode.collect([(0, e) for e in fast], SHADOW, said, HERE)
    assert {record.kind for record in stood_in.records} == {"stand-in"}
    page = Console(width=150, file=io.StringIO(), record=True)
    for table in decode_console.tables([one]):
        page.print(table)
    text = page.export_text()
    assert "batch 16" in text and "head" in text and "GroupGEMM" in text and "0.000" in text


def test_a_run_that_ends_early_keeps_what_it_has(command, monkeypatch, tmp_path):
    def measure(context, job):
        context.emit({"backend": "virtual", "max_tokens": 64})
        context.emit(event("step", [7.0], clock="wall", batch=2))
        context.emit({"finished": 2})
        kept = Store(tmp_path / "records", package=False).records("decode")
        assert {(r.metric, r.params["batch"]) for r in kept} == {(m, 2) for m in ("step", "tok_s_request", "tok_s_gpu")}
        context.emit(event("step", [5.0, 6.0], clock="wall", batch=1))
        raise BenchError("the lights went out")

    monkeypatch.setattr(decode_rank, "measure", measure)
    status, out, err, records = command("--model", "tinyseek", "--batch", "1,2", "--kv-len", "65")
    assert status == 1 and out == "" and "error: the lights went out" in err
    metrics = ("step", "tok_s_request", "tok_s_gpu")
    assert {(r.metric, r.params["batch"]) for r in records} == {(m, batch) for m in metrics for batch in (1, 2)}


def test_the_models_tables_can_hold_these_records(tmp_path):
    """Under names of their own: no record of a whole step may pass for one of an op or an exchange."""
    stage = event("stage", [100.0], of="moe", stage="mla", category="MLA")
    setting = replace(SHADOW, shadow=False, dp=1)
    (one,) = decode.collect(
        [(0, event("step", [900.0])), (0, stage)], setting, {"backend": "x", "max_tokens": 32}, HERE
    )
    store = Store(tmp_path)
    for record in one.records:
        store.append(record)
    known = tables.load(tmp_path)
    points, origin = known.points("stage", "H200", ("batch", "kv_len"), stage="mla", of="moe")
    assert points == {(16.0, 5000.0): 100.0} and origin == "measured"
    assert not any(params["bench"] == "decode" for params, *_ in known.recorded.get(("mla", "H200"), ()))
