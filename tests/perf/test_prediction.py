"""A whole step: the numeric checks, the study's layer, and what must hold for any deployment."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.config import ConfigError
from moelab.hardware import gpu
from moelab.perf import layer, overlap
from moelab.perf.deployment import deployment, tokens_per_step
from moelab.perf.prediction import HOST_US, TERMS, evaluate
from moelab.perf.prediction import predict as predict_with
from moelab.perf.tables import NOTHING_RECORDED
from moelab.stages import CATEGORIES

STUDY = {"batch": 128, "kv_len": 5000, "draft_tokens": 1, "acceptance": 0.6, "alltoall": "pplx-2025"}


def predict(*arguments, **settings):
    """By published tables alone, whatever records there are."""
    return predict_with(*arguments, tables=NOTHING_RECORDED, **settings)


def layer_us(*arguments, **settings) -> float:
    return predict(*arguments, **settings).layer_us["total"]


def test_the_studys_layer_by_the_table_model():  # check 18
    for mode, expected in (("none", 2694), ("dispatch", 2653), ("microbatch", 1890)):
        assert layer_us("h100", 128, overlap=mode, **STUDY) == pytest.approx(expected, abs=1)
    ep8 = predict("h100", 8, overlap="none", **STUDY).layer_us
    assert ep8["total"] - ep8["Dispatch"] - ep8["Combine"] + 391 == pytest.approx(1854, abs=1)


def test_the_studys_layer_from_other_inputs():
    """Totals and GroupGEMM, from tables of others; of the study's numbers only its two rates are used."""
    for ep, mode, measured in (
        (128, "none", 2667),
        (128, "dispatch", 2651),
        (128, "microbatch", 1896),
        (8, "none", 1802),
    ):
        assert layer_us("h100", ep, overlap=mode, **STUDY) == pytest.approx(measured, rel=0.05)
    assert predict("h100", 8, overlap="none", **STUDY).layer_us["GroupGEMM"] == pytest.approx(555, rel=0.05)
    micro = predict("h100", 128, overlap="microbatch", **STUDY).layer_us
    assert micro["GroupGEMM"] == pytest.approx(270, rel=0.08)


def test_todays_law_in_the_studys_layer():  # check 20
    today = STUDY | {"alltoall": "deepep"}
    none, micro = (layer_us("h100", 128, overlap=o, **today) for o in ("none", "microbatch"))
    assert (none, micro) == pytest.approx((2030, 1490), abs=2)
    assert micro / 1854 == pytest.approx(0.804, abs=0.002)


@pytest.mark.parametrize(
    ("batch", "kv_len", "drafts", "expected"), [(128, 4000, 1, (114.8, 84.1)), (256, 2000, 0, (101.3, 76.5))]
)
def test_sglang_by_hand(batch, kv_len, drafts, expected):  # checks 21 and 22: EP64 tables and law, 0.85 + 3 ms besides
    for mode, ms in zip(("none", "microbatch"), expected, strict=True):
        one = layer_us("h100", 64, batch=batch, kv_len=kv_len, draft_tokens=drafts, acceptance=0.6, overlap=mode)
        assert 58 * one / 1e3 + 3 * 0.85 + 3 == pytest.approx(ms, abs=0.1)


@pytest.mark.parametrize(
    ("one", "step", "speed", "node"),
    [(2667, 160.4, 9.98, 10_215), (1896, 115.7, 13.83, 14_165), (1802, 110.2, 14.52, 14_865)],
)
def test_step_speed_and_throughput_of_given_layers(one, step, speed, node, monkeypatch):  # checks 23 and 24
    """The study's layers in place of ours, 0.9 ms for a dense one and a tail of 3 ms."""
    d = deployment("h100", 128, overlap="none", **STUDY)
    monkeypatch.setattr(overlap, "layers", lambda *a: (58 * one, overlap.Walked(one, {"other": one})))
    monkeypatch.setattr(overlap, "dense", lambda us: overlap.Walked(900, {}))
    monkeypatch.setattr("moelab.perf.prediction._tail", lambda *a: {"host": layer.Term(3000, "published", 0.1, "x")})
    p = evaluate(d, NOTHING_RECORDED)
    assert p.step_ms == pytest.approx(step, abs=0.1)
    assert p.tok_s_per_request == pytest.approx(speed, abs=0.01)
    assert p.tok_s_per_node == pytest.approx(node, abs=5)


def test_tokens_per_step():  # check 25
    assert [tokens_per_step(n, 0.6) for n in (1, 2, 3)] == pytest.approx([1.6, 1.96, 2.176], abs=1e-12)
    for drafts, acceptance, expected in ((1, 0.6, 1.6), (3, 0.6, 2.176), (2, (0.8, 0.5), 2.2), (6, (0.8, 0.5), 2.2)):
        d = deployment("h100", 8, batch=1, kv_len=1, draft_tokens=drafts, acceptance=acceptance)
        assert d.tokens_per_step == pytest.approx(expected) and d.q_len == 1 + drafts


def test_communication_bound_of_deepseek():  # check 26
    for gb_s, ms, speed in ((50, 14.76, 67.8), (900, 0.82, 1220)):
        one = 3 * 32 * 9 * 7000 / gb_s / 1e3  # us: 3 bytes a value, 32 tokens, 9 copies
        total = one * 2 * 61 / 1e3
        assert (total, 1e3 / total) == pytest.approx((ms, speed), rel=0.002)


def test_the_first_and_last_layer_of_the_pipeline_count():
    p = predict("h100", 128, overlap="microbatch", **STUDY)
    inside = 58 * p.layer_us["total"] + 3 * p.dense_us + sum(p.tail_us.values())
    assert 0 < 1e3 * p.step_ms - inside < 2 * p.layer_us["total"]
    none = predict("h100", 128, overlap="none", **STUDY)
    assert 1e3 * none.step_ms == pytest.approx(
        58 * none.layer_us["total"] + 3 * none.dense_us + sum(none.tail_us.values())
    )


def test_best_is_the_best():
    for batch in (1, 16, 128):
        all_ = {o: predict("h100", 64, batch=batch, kv_len=5000, overlap=o) for o in ("none", "dispatch", "microbatch")}
        best = predict("h100", 64, batch=batch, kv_len=5000)
        assert best.step_ms == min(p.step_ms for p in all_.values()) == all_[best.overlap].step_ms
    assert predict("h200", 8, batch=64, kv_len=5000).overlap == "none"  # NVLink's sends are kernels: nothing hides


def test_tp_cuts_heads_and_sending_but_not_the_latent():
    whole, cut = (predict("h100", 128 // tp, tp, batch=64, kv_len=5000, overlap="none") for tp in (1, 4))
    assert cut.layer_us["GEMM"] < whole.layer_us["GEMM"] and cut.layer_us["MLA"] < whole.layer_us["MLA"]
    assert cut.layer_us["MLA"] > whole.layer_us["MLA"] / 4  # the latent is read by every rank
    assert cut.layer_us["Dispatch"] < whole.layer_us["Dispatch"]
    assert cut.layer_us["Combine"] == pytest.approx(whole.layer_us["Combine"])  # all of it comes to every rank
    assert cut.layer_us["other"] > whole.layer_us["other"]  # the all-reduce
    assert cut.memory_bytes["kv_cache"] == whole.memory_bytes["kv_cache"]
    assert cut.tok_s_per_gpu == pytest.approx(64 / 4 * cut.tok_s_per_request)


def test_experts_cut_by_tp():
    p = predict("h200", 1, 8, ep=1, batch=8, kv_len=1382)
    assert p.layer_us["Dispatch"] == 0 and 0 < p.layer_us["Combine"] < 20  # an all-reduce
    d = p.deployment
    assert d.expert_tp and p.memory_bytes["weights"] < predict("h200", 1, 8, batch=8, kv_len=1).memory_bytes["weights"]
    one, many = (predict("h200", 1, 8, ep=1, batch=b, kv_len=1).layer_us["GroupGEMM"] for b in (1, 512))
    assert one < many / 4  # eight experts against all of them


def test_redundant_experts():
    """288 slots: 4 on each of 72 GPUs, 2 on each of 144."""
    for ep, slots in ((72, 4), (144, 2)):
        p = predict("h100", ep, batch=128, kv_len=4000, redundant_experts=32)
        assert p.deployment.slots == slots
        without = predict("h100", 64 if ep == 72 else 128, batch=128, kv_len=4000)
        assert p.memory_bytes["weights"] == pytest.approx(without.memory_bytes["weights"], rel=0.02)
    with pytest.raises(ConfigError, match="nearest legal: ep 64, or 32 redundant experts"):
        predict("h100", 72, batch=1, kv_len=1)


def test_memory():
    p = predict("h200", 8, batch=100, kv_len=5000, draft_tokens=1)
    parts = dict(p.memory_bytes)
    total, capacity = parts.pop("total"), parts.pop("capacity")
    assert capacity == 150_754_820_096 and total == pytest.approx(sum(parts.values()))
    assert parts["kv_cache"] == 100 * 5000 * (70_272 + 1_152)
    assert parts["weights"] == pytest.approx(102.56e9, abs=0.02e9)
    assert not p.fits and p.largest_batch < 100 and any("does not fit" in n for n in p.notes)
    assert predict("h200", 8, batch=p.largest_batch, kv_len=5000, draft_tokens=1).fits
    assert not predict("h200", 8, batch=p.largest_batch + 1, kv_len=5000, draft_tokens=1).fits
    assert predict("h100", 8, batch=1, kv_len=5000).largest_batch == 0
    fp8 = predict("h200", 8, batch=100, kv_len=5000, draft_tokens=1, kv_dtype="fp8")
    assert fp8.memory_bytes["kv_cache"] == parts["kv_cache"] / 2


def test_origins_and_interval():
    p = predict("h100", 64, batch=64, kv_len=4000)
    assert set(p.origins) <= set(TERMS) and p.origins["MLA"].origin == "published"
    assert p.origins["host"].origin == "extrapolated" and p.origins["host"].ms == HOST_US / 1e3
    assert {"GEMM", "MLA", "GroupGEMM", "Dispatch", "Combine", "head", "host"} <= set(p.origins)
    low, high = p.interval["step_ms"]
    assert low < p.step_ms < high and 0.05 < (high - low) / (high + low) < 0.25
    slow, fast = p.interval["tok_s_per_request"]
    assert slow < p.tok_s_per_request < fast
    far = predict("gb200", 64, batch=64, kv_len=40_000)
    width = [(q.interval["step_ms"][1] - q.interval["step_ms"][0]) / q.step_ms for q in (p, far)]
    assert width[1] > width[0] and any("outside what was measured" in n for n in far.notes)
    shown = p.to_dict()
    for key in ("step_ms", "tok_s_per_request", "tok_s_per_gpu", "tok_s_per_node", "layer_us", "memory_bytes", "fits",
                "interval", "origins"):  # fmt: skip
        assert key in shown
    assert sum(shown["layer_us"][c] for c in CATEGORIES) == pytest.approx(shown["layer_us"]["total"])


def test_a_hidden_term_does_not_widen_the_interval():
    """Where the exchange is hidden its error moves nothing; where it is exposed it does."""
    base = deployment("h100", 128, batch=64, kv_len=16_000, overlap="microbatch")
    step = evaluate(base, NOTHING_RECORDED)
    assert step.layer_us["Combine"] == 0
    faster = evaluate(base, NOTHING_RECORDED, {"Combine": 0.9})
    assert faster.layer_us["total"] == pytest.approx(step.layer_us["total"])
    exposed = deployment("h100", 128, batch=64, kv_len=16_000, overlap="none")
    assert evaluate(exposed, NOTHING_RECORDED, {"Combine": 0.9}).step_ms < evaluate(exposed, NOTHING_RECORDED).step_ms


def test_scaling_a_term():
    p = predict("h100", 64, batch=64, kv_len=4000, overlap="none")
    for term, origin in p.origins.items():
        q = predict("h100", 64, batch=64, kv_len=4000, overlap="none", scale={term: 1.1})
        assert q.step_ms - p.step_ms == pytest.approx(0.1 * origin.ms, rel=1e-6)
    with pytest.raises(ConfigError, match="no term 'mla' to scale; there are: GEMM"):
        predict("h100", 64, batch=64, kv_len=4000, scale={"mla": 1.1})


def test_one_prediction_takes_less_than_50_ms():
    predict("h100", 128, overlap="best", **STUDY)  # tables are read once
    started = time.process_time()
    for _ in range(5):
        predict("h100", 128, overlap="best", **STUDY)
    assert (time.process_time() - started) / 5 < 0.05


def widened(name: str, **factors: float):
    base = gpu(name)
    return dataclasses.replace(base, **{field: getattr(base, field) * f for field, f in factors.items()})


cases = st.fixed_dictionaries({
    "dp": st.sampled_from([1, 2, 8, 16, 64, 128]), "tp": st.sampled_from([1, 2]), "batch": st.floats(0.1, 300),
    "kv_len": st.integers(1, 20_000), "draft_tokens": st.integers(0, 3), "acceptance": st.floats(0, 1),
    "overlap": st.sampled_from(["none", "dispatch", "microbatch", "best"]), "imbalance": st.floats(1, 2),
})  # fmt: skip


@settings(max_examples=30)
@given(cases, st.sampled_from(["h100", "h200", "h20", "gb200"]))
def test_any_deployment_has_a_step(case, name):
    p = predict(name, **case)
    assert 0 < p.interval["step_ms"][0] < p.step_ms < p.interval["step_ms"][1] < 1e6
    assert p.tok_s_per_request * p.step_ms / 1e3 == pytest.approx(p.deployment.tokens_per_step)
    assert all(us >= 0 for us in p.layer_us.values())
    assert p.fits == (case["batch"] <= p.largest_batch)


@settings(max_examples=25)
@given(cases, st.floats(1, 3))
def test_nothing_better_is_slower(case, factor):
    """More bandwidth, faster cores, a shorter cache, balance: a step takes no longer for it."""
    step = predict(widened("H20"), **case).step_ms
    for better in (widened("H20", hbm_gb_s=factor), widened("H20", fp8_tflops=factor, bf16_tflops=factor)):
        assert predict(better, **case).step_ms <= step * (1 + 1e-9)
    assert predict(gpu("H20"), **(case | {"imbalance": 1.0})).step_ms <= step * (1 + 1e-9)
    shorter = case | {"kv_len": max(1, case["kv_len"] // 2)}
    assert predict(gpu("H20"), **shorter).step_ms <= step * 1.001


@settings(max_examples=25)
@given(cases)
def test_acceptance_changes_the_speed_and_not_the_step(case):
    none, all_ = (predict("h100", **(case | {"acceptance": a})) for a in (0.0, 1.0))
    assert none.step_ms == pytest.approx(all_.step_ms)
    assert all_.tok_s_per_request == pytest.approx((1 + case["draft_tokens"]) * none.tok_s_per_request)


def test_a_faster_fabric_is_never_slower():
    for overlap_ in ("none", "microbatch", "best"):
        steps = [predict("h100", 64, batch=64, kv_len=5000, overlap=overlap_, fabric=f).step_ms
                 for f in ("ib200", "ib400", "ib800")]  # fmt: skip
        assert steps == sorted(steps, reverse=True)
    assert predict("h100", 64, batch=64, kv_len=5000, overlap="none", fabric="nvl72").step_ms < steps[-1]


def test_large_ep_tends_to_its_floor():
    """With one request a group, more GPUs only leave what every token costs: weights of few experts, latencies."""
    layers = [layer_us("h100", ep, batch=1, kv_len=1000, overlap="none") for ep in (16, 32, 64, 128, 256)]
    assert layers == sorted(layers, reverse=True)
    assert layers[-2] < 1.07 * layers[-1] and layers[0] > 1.2 * layers[-1]
    routed = [predict("h100", ep, batch=1, kv_len=1000).layer_us["GroupGEMM"] for ep in (128, 256)]
    assert routed[1] > 20  # one expert's weights take 14 us to read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "h300"}, "unknown GPU 'h300'; did you mean"),
        ({"dp": 0}, "dp is 0: legal is an integer from 1; nearest: 1"),
        ({"dp": 3}, "divide only over 1, 2, 4.*nearest legal: ep 2, or 2 redundant"),
        ({"tp": 3}, r"tp is 3: legal on nodes of 8 GPUs are \[1, 2, 4, 8\]; nearest: 2"),
        ({"tp": 16}, "nearest: 8"),
        ({"ep": 4}, "ep is 4, dp·tp is 8: nearest legal: ep 8"),
        ({"ep": 1}, "ep is 1 with dp 8 and tp 1.*nearest legal: dp 1, tp 8"),
        ({"batch": 0}, "batch is 0: legal is above 0"),
        ({"batch": float("nan")}, "batch is nan"),
        ({"kv_len": -5}, "kv_len is -5: legal is 1 or more tokens; nearest: 1"),
        ({"draft_tokens": -1}, "draft_tokens is -1: legal is 0"),
        ({"draft_tokens": 1, "acceptance": 1.5}, "acceptance is 1.5: legal is 0…1; nearest: 1"),
        ({"draft_tokens": 1, "acceptance": (0.5, 0.5)}, "at most 1"),
        ({"overlap": "mikro"}, "overlap is 'mikro'.*nearest: microbatch"),
        ({"fabric": "ib40"}, "did you mean ib400"),
        ({"dp": 16, "fabric": "nvlink"}, "nvlink joins 8 GPUs, ep is 16"),
        ({"alltoall": "nccl"}, "unknown alltoall 'nccl'"),
        ({"imbalance": 0.5}, "imbalance is 0.5: legal is 1"),
        ({"redundant_experts": -1}, "redundant experts are -1"),
        ({"reserve": 1.0}, "reserve is 1.0"),
        ({"capacity": 0}, "capacity is 0"),
        ({"expert_dtype": "fp4"}, "fp8 on H200"),
        ({"model": "deepseek"}, "preset 'deepseek' is unknown"),
    ],
)  # fmt: skip
def test_impossible_requests_name_the_nearest_legal_choice(change, message):
    with pytest.raises(ConfigError, match=message):
        predict(**({"gpu": "h200", "dp": 8, "batch": 8, "kv_len": 1000} | change))
