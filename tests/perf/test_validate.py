"""Validation: the errors that were promised, the rules by which a row becomes a request, causes for whole classes."""

from __future__ import annotations

import csv

import pytest

from moelab.config import ConfigError
from moelab.perf import points, validate
from moelab.perf.tables import NOTHING_RECORDED, load, rows
from tests.perf.test_kernels import recorded

PUBLISHED = {r["id"]: r for r in rows("deployments")}


@pytest.fixture(scope="module", params=["published tables alone", "with records"])
def judged(request):
    tables = NOTHING_RECORDED if request.param == "published tables alone" else load()
    return validate.deployments(tables=tables)


def test_public_deployments_are_met(judged):
    s = validate.summary(judged)["deployment"]
    assert s["rows"] >= 24
    assert s["median_abs_error"] <= 0.10
    assert 0.65 <= s["inside_interval"] <= 0.97  # one of the 25 rows is four in a hundred
    assert s["median_half_width"] <= 0.20
    unexplained = [r.id for r in judged if r.error is not None and abs(r.error) > 0.25 and not r.causes]
    assert not unexplained


def test_a_cause_is_a_term_for_its_whole_class(judged):
    by_id = {r.id: r for r in judged}
    for name, ids in {
        "early DeepEP": [i for i in by_id if i.startswith(("sglang-h100-ep72", "deepseek-h800"))],
        "host-driven exchange": [i for i in by_id if i.startswith("trtllm-h100-ep16")],
        "prefill in between": [i for i in by_id if i.startswith("sglang-h200-tp8")],
        "uneven groups": [i for i in by_id if i.startswith(("trtllm", "sglang-h200-ep8"))],
    }.items():
        assert {i for i, r in by_id.items() if name in r.causes} == set(ids) and ids
        assert all(by_id[i].before is not None for i in ids)
    assert all(r.before is None for r in judged if not r.causes)
    slow = [r for r in judged if "host-driven exchange" in r.causes]
    assert max(abs(r.error) for r in slow) < 0.25 < min(abs(r.before) for r in slow)


def test_what_cannot_be_predicted_says_why(judged):
    reasons = {r.id: r.reason for r in judged if r.error is None}
    assert "batch" in reasons["cloudmatrix384-ep320-tpot15"]
    assert "neither step" in reasons["sglang-gb200-ep48-bf16-part1"]
    assert all(reasons.values()) and all(not r.reason for r in judged if r.error is not None)


def row(**changes) -> dict[str, str]:
    base = {
        "id": "x", "engine": "SGLang", "gpu": "H200", "ep": "8", "dp": "8", "tp": "1", "batch_per_gpu": "8",
        "kv_len": "1000", "overlap": "none", "precision": "FP8", "step_ms": "30", "source": "a (2026-02-01)",
    }  # fmt: skip
    return base | changes


def test_rules_for_inputs():
    plain = validate.inputs(row())
    assert plain.batches == (8.0,) and plain.causes == {} and plain.settings["redundant_experts"] == 0
    assert validate.inputs(row(batch_per_gpu_mean_est="7.5")).batches == (8.0, 7.5)
    assert validate.inputs(row(ep="1", dp="1", tp="8", batch_per_gpu="0.5")).batches == (4.0,)
    assert validate.inputs(row(ep="1", dp="1", tp="8")).settings["ep"] == 1
    assert validate.inputs(row(ep="72", dp="72")).settings["redundant_experts"] == 32
    assert validate.inputs(row(kv_len="", isl="1000", osl="500")).settings["kv_len"] == 1250
    derived = validate.inputs(row(batch_per_gpu="", tok_s_per_gpu="1850", tok_s_per_user="18.5"))
    assert derived.batches == (100.0,)
    overlaps = {"two-batch overlap": "microbatch", "two micro-batches, 5-stage pipeline": "microbatch",
                "single-batch overlap": "dispatch", "two-batch overlap off": "none", "not stated": "none",
                "combine with down-GEMM and shared expert": "dispatch"}  # fmt: skip
    for text, expected in overlaps.items():
        assert validate.inputs(row(overlap=text)).settings["overlap"] == expected
    fp8 = validate.inputs(row(precision="FP8 attention and KV; NVFP4 MoE and output projection")).settings
    assert (fp8["kv_dtype"], fp8["expert_dtype"]) == ("fp8", "fp4")
    assert validate.inputs(row(precision="FP8 weights and dispatch; BF16 KV")).settings["kv_dtype"] == "bf16"
    with pytest.raises(ConfigError, match="batch not stated"):
        validate.inputs(row(batch_per_gpu=""))
    with pytest.raises(ConfigError, match="tp is 'eight', not a number"):
        validate.inputs(row(tp="eight"))


def test_causes_come_from_a_rows_engine_date_and_note():
    wide = row(ep="16", dp="16", gpu="H100")
    assert validate.inputs(wide).causes == {}
    assert "early DeepEP" in validate.inputs(wide | {"source": "blog (2025-05-05)"}).causes
    assert "host-driven exchange" in validate.inputs(wide | {"engine": "Dynamo + TensorRT-LLM"}).causes
    assert validate.inputs(wide | {"interconnect": "NVLink NVL72", "source": "x (2025-05-05)"}).causes == {}
    assert validate.inputs(row(engine="TensorRT-LLM")).causes == {}  # one node
    mixed = validate.inputs(row(note="Aggregated serving: …", isl="1024", osl="1024"))
    assert mixed.prefill == (1024, 1024) and "prefill in between" in mixed.causes


def test_the_fullest_group(rng):
    """Against draws: requests spread over 8 groups at random."""
    served = validate.inputs(row(batch_per_gpu="16", batch_per_gpu_mean_est="13", concurrency="128"))
    drawn = rng.multinomial(8 * 13, [1 / 8] * 8, size=4000).max(axis=1)
    assert served.fullest == pytest.approx(drawn.mean(), rel=0.05) and "uneven groups" in served.causes
    capped = row(batch_per_gpu="16", batch_per_gpu_mean_est="13", concurrency="128", note="16 is the cap of a recipe")
    assert validate.inputs(capped).fullest == 16
    assert validate.inputs(row(batch_per_gpu="16", batch_per_gpu_mean_est="13")).fullest is None  # a fixed batch
    alone = row(ep="1", dp="1", tp="8", batch_per_gpu_mean_est="7", concurrency="64")
    assert validate.inputs(alone).fullest is None


def test_two_batches_give_their_middle_and_the_whole_range():
    one, two = (validate.deployment_row(row(batch_per_gpu=b), NOTHING_RECORDED) for b in ("8", "16"))
    both = validate.deployment_row(row(batch_per_gpu="16", batch_per_gpu_mean_est="8"), NOTHING_RECORDED)
    assert both.predicted == pytest.approx((one.predicted + two.predicted) / 2)
    assert (both.low, both.high) == pytest.approx((one.low, two.high))
    assert both.error == pytest.approx(both.predicted / 30 - 1)


def test_speed_stands_in_for_a_step_that_is_not_published():
    found = validate.deployment_row(
        row(step_ms="", tok_s_per_user="20", draft_tokens="1", acceptance="0.6"), NOTHING_RECORDED
    )
    assert found.measured == pytest.approx(1e3 * 1.6 / 20) and found.quantity == "step, from tok/s per user"
    assert "unknown GPU" in validate.deployment_row(row(gpu="Ascend 910C"), NOTHING_RECORDED).reason


def test_the_measured_time_is_no_input():
    a, b = (validate.deployment_row(row(step_ms=ms), NOTHING_RECORDED) for ms in ("30", "60"))
    assert a.predicted == b.predicted and a.error == pytest.approx(2 * b.error + 1)


def test_a_table_of_ones_own(tmp_path):
    path = tmp_path / "mine.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, row())
        writer.writeheader()
        writer.writerow(row(id="mine"))
    (mine,) = validate.deployments(validate.read(path), NOTHING_RECORDED)
    assert mine.id == "mine" and mine.error is not None
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="lacks batch_per_gpu, gpu, id, kv_len, tp"):
        validate.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        validate.read(tmp_path / "nope.csv")


def test_other_points():
    found = points.every(NOTHING_RECORDED)
    s = validate.summary(found)
    assert s["study"]["median_abs_error"] < 0.03 and abs(s["study"]["worst_error"]) < 0.08
    assert s["module"]["median_abs_error"] < 0.05 and abs(s["module"]["worst_error"]) < 0.10
    assert s["exchange"]["median_abs_error"] < 0.10 and abs(s["exchange"]["worst_error"]) < 0.20
    assert s["kernel"]["median_abs_error"] < 0.12
    assert len({r.id for r in found}) == len(found)


def test_recorded_points_are_judged_without_their_records():
    tables = recorded("linear", [({"m": m, "n": 7168, "k": 16384}, 20.0) for m in (16, 64)])
    found = [r for r in points.recorded_rows(tables) if r.kind == "recorded"]
    assert len(found) == 2 and all(r.measured == 20.0 and r.predicted > 30 for r in found)
    padded = {"active": 32, "rows": 256, "layout": "padded", "projection": "down", "n": 7168, "k": 2048}
    settings = {
        "mla": {"batch": 8, "q_len": 1, "heads": 128, "kv_len": 4095, "kv": "bf16"}, "grouped_gemm": padded,
        "bmm": {"tokens": 128, "heads": 128, "projection": "v_b"}, "quantize": {"m": 8192, "k": 7168},
        "silu_mul": {"layout": "padded", "populated": 256, "i": 2048},
    }  # fmt: skip
    for op, params in settings.items():
        (row,) = points.recorded_rows(recorded(op, [(params, 50.0)]))
        assert row.predicted > 0 and row.id.startswith(f"H200 {op} ")
    assert not list(points.recorded_rows(recorded("router", [({"tokens": 1}, 3.0)])))


def test_leaving_a_source_out():
    found = {(x.left_out, x.judged): x for x in points.leave_one_out()}
    assert len(found) == 10
    assert all(x.median < 0.15 and x.points >= 4 for x in found.values())
