"""Kernel times: the published points exactly, the rules between and beyond them, and how good the estimates are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.config import preset
from moelab.hardware import gpu
from moelab.perf import costs, sources
from moelab.perf.kernels import ESTIMATES, Kernels, estimate_us
from moelab.perf.tables import NOTHING_RECORDED, Tables

V3 = preset("deepseek-v3")
H100, H200, H800 = (Kernels(gpu(name), V3, NOTHING_RECORDED) for name in ("H100", "H200", "H800"))


def recorded(op: str, points: list[tuple[dict, float]], gpu_name: str = "H200", origin: str = "recorded") -> Tables:
    rows = tuple(({"backend": "triton", "bench": "ops", "gpus": 1, **params}, us, origin) for params, us in points)
    return Tables({(op, gpu_name): rows})


def test_steps_of_the_table_model():  # check 19
    for tokens, batch, expected in ((256, 128, (76, 775, 41, 197)), (128, 64, (61, 426, 35, 143))):
        glue, shapes = H100.glue(tokens), costs.attention_shapes(V3)
        gemm = {name: H100.linear(tokens, *shape).us for name, shape in shapes.items()}
        s1 = gemm["qkv_a"] + gemm["q_b"] + H100.bmm(tokens, 128, "bmm_k").us
        s1 += sum(glue[x].us for x in ("input_norm", "qkv_norm", "rope_append"))
        s2 = H100.mla(batch, 2, 128, 5000).us + H100.bmm(tokens, 128, "bmm_v").us + gemm["o_proj"]
        s2 += glue["post_norm"].us + glue["gate"].us
        sh = H100.linear(tokens, 4096, 7168).us + H100.linear(tokens, 7168, 2048).us + 4
        m = sum(term.us for term in H100.grouped(8 * tokens, 2).values())
        assert (s1, s2, sh, m) == pytest.approx(expected, abs=1)


def test_published_points_are_met():
    assert H800.linear(128, 7168, 16384).us == 56.311  # InferSim
    assert H800.linear(4096, 7168, 16384).us == 674.7  # DeepGEMM's README, beyond InferSim
    assert H800.linear(256, 2112, 7168).us == 13.062  # q_a for the merged one
    assert H100.mla(128, 1, 128, 4095).us == 266.4 and H200.mla(128, 1, 128, 4095).us == 261.3
    assert H100.mla(64, 2, 128, 4095).us == 266.4  # two queries count as two requests
    assert H800.mla(128, 1, 128, 4096).us == 292.023  # FlashMLA
    assert H100.mla(16, 1, 128, 8191, "fp8").us == 74.1
    half = H100.mla(256, 1, 128, (4095 + 8191) / 2).us
    assert half == pytest.approx((535.2 + 981) / 2)
    for term in (H100.linear(100, 7168, 2048), H100.mla(100, 1, 128, 3000), H100.grouped(1500, 3)["gate_up"]):
        assert term.origin == "published"


def test_the_core_of_a_gpu_is_split():
    parts = H200.grouped(512, 32)  # EP8, 64 tokens
    assert sum(t.us for t in parts.values()) == pytest.approx(384.1, abs=0.1)
    assert parts["gate_up"].us == pytest.approx(2 * parts["down"].us)
    assert parts["silu_mul_quant"].us > 1


def test_beyond_a_table_is_said_and_follows_the_estimate():
    inside, beyond = H100.mla(256, 1, 128, 8191), H100.mla(256, 1, 128, 16382)
    assert beyond.origin == "extrapolated" and "beyond its end" in beyond.source and beyond.error > inside.error
    assert beyond.us == pytest.approx(2 * inside.us, rel=0.05)
    assert H100.linear(1, 7168, 16384).origin == "extrapolated"
    assert H100.linear(64, 999, 7168).source.startswith("roofline of H100")
    assert H100.grouped(2048, 40)["down"].origin == "extrapolated"


def test_another_gpu_is_scaled_by_the_estimates():
    there, here = H800.linear(64, 7168, 16384), H200.linear(64, 7168, 16384)
    cost = costs.linear(64, 7168, 16384)
    ratio = estimate_us("linear", cost, gpu("H200")) / estimate_us("linear", cost, gpu("H800"))
    assert here.us == pytest.approx(there.us * ratio) and 0.7 < ratio < 0.8
    assert here.origin == "extrapolated" and "scaled to H200" in here.source
    assert H100.linear(64, 7168, 16384) == there  # one die


def test_records_of_the_gpu_come_first_then_its_table_then_records_of_another():
    tables = recorded("linear", [({"m": m, "n": 7168, "k": 16384}, us) for m, us in ((1, 30.0), (64, 33.0))])
    on = {name: Kernels(gpu(name), V3, tables) for name in ("H200", "H100", "GB200")}
    assert on["H200"].linear(64, 7168, 16384).us == 33.0 and on["H200"].linear(1, 7168, 16384).origin == "recorded"
    assert on["H200"].linear(32.5, 7168, 16384).us == pytest.approx(31.5)
    assert on["H200"].linear(128, 7168, 16384).origin == "extrapolated"
    assert on["H100"].linear(64, 7168, 16384).us == 51.677
    scaled = on["GB200"].linear(64, 7168, 16384)
    assert "records of linear on H200; scaled to GB200" in scaled.source and scaled.us < 33
    own = recorded("linear", [({"m": m, "n": 7168, "k": 16384}, 30.0) for m in (1, 64)], origin="measured")
    assert Kernels(gpu("H200"), V3, own).linear(8, 7168, 16384).origin == "measured"


def test_records_of_attention_and_experts_are_read_by_their_parameters():
    points = [({"batch": b, "q_len": 2, "kv_len": kv, "heads": 128, "kv": "bf16"}, b * kv / 2000.0)
              for b in (1, 16, 128) for kv in (1024, 5000)]  # fmt: skip
    mla = Kernels(gpu("H200"), V3, recorded("mla", points))
    assert mla.mla(16, 2, 128, 5000).us == 40 and mla.mla(16, 2, 128, 5000).origin == "recorded"
    slow = [(params, 1000.0) for params, _ in points]
    assert Kernels(gpu("H200"), V3, recorded("mla", slow)).mla(16, 2, 128, 5000) == H200.mla(16, 2, 128, 5000)
    own = Kernels(gpu("H200"), V3, recorded("mla", slow, origin="measured")).mla(16, 2, 128, 5000)
    assert (own.us, own.origin) == (1000.0, "measured")  # the user's own counts even where it is slower
    assert mla.mla(16, 1, 128, 5000).origin == "published"  # other queries: the table of the GPU
    points = [({"active": a, "rows": r, "n": n, "k": k, "layout": "padded"}, a + r / 64.0 + n / 4096)
              for a in (2, 32) for r in (32, 2048) for n, k in ((4096, 7168), (7168, 2048))]  # fmt: skip
    routed = Kernels(gpu("H200"), V3, recorded("grouped_gemm", points)).grouped(2048, 32)
    assert routed["gate_up"].us == 32 + 32 + 1 and routed["down"].us == 32 + 32 + 1.75
    cut = Kernels(gpu("H200"), V3, recorded("grouped_gemm", points)).grouped(2048 * 8, 256, cut=8)
    assert cut["down"].us == routed["down"].us and cut["down"].origin == "extrapolated"  # the same weights and FLOP
    one_length = [({"batch": b, "q_len": 1, "kv_len": 5000, "heads": 16, "kv": "bf16"}, 10.0 + b) for b in (1, 32)]
    short = Kernels(gpu("H200"), V3, recorded("mla", one_length)).mla(32, 1, 16, 1000)
    assert short.origin == "extrapolated" and short.us < 42


def test_small_kernels_of_records():
    norms = [({"m": m, "h": h, "form": form}, 2.0) for m in (1, 8192) for h, form in
             ((7168, "add_quantize"), (1536, "quantize"), (512, "plain"))]  # fmt: skip
    tables = Tables(
        recorded("rms_norm", norms).recorded
        | recorded("router", [({"tokens": t, "experts": 256, "gather": 0}, 3.0) for t in (1, 4096)]).recorded
    )
    glue = Kernels(gpu("H200"), V3, tables).glue(64)
    assert glue["input_norm"].us == 2 and glue["qkv_norm"].us == 4
    assert glue["gate"].us == pytest.approx(3 + estimate_us("linear", costs.gate(64, V3), gpu("H200")))
    assert sum(t.us for t in glue.values()) < sum(t.us for t in H200.glue(64).values())


def residuals(op: str) -> np.ndarray:
    found = []
    if op == "linear":
        for (n, k), curve in sources.published_linear().items():
            found += [estimate_us(op, costs.linear(m, n, k), gpu("H800")) / us - 1
                      for m, us in zip(curve.x, curve.us, strict=True)]  # fmt: skip
    tables = {"grouped": sources.published_grouped(), "mla": sources.published_mla()}.get(op, {})
    for (name, part), grid in tables.items():
        if op == "mla" and part != "bf16":
            continue
        for i, j in np.ndindex(grid.us.shape):
            if op == "mla":
                cost = costs.mla(grid.x[i], 1, 128, grid.y[j], V3)
            else:
                whole, share = (
                    costs.grouped_gemm(grid.y[j], grid.x[i], V3),
                    {"up": 2 / 3, "down": 1 / 3, "core": 1}[part],
                )
                cost = costs.Cost(share * whole.flops, share * whole.bytes)
            found.append(estimate_us(op, cost, gpu(name)) / grid.us[i, j] - 1)
    return np.abs(found)


@pytest.mark.parametrize("op", ["linear", "grouped", "mla"])
def test_estimates_are_as_good_as_they_say(op):
    errors = residuals(op)
    assert np.median(errors) < 0.10 and np.quantile(errors, 0.8) < 0.20


@given(st.sampled_from(["linear", "grouped", "mla", "bmm"]), st.floats(1, 1e12), st.floats(1, 1e10), st.floats(1, 4))
def test_more_bandwidth_and_more_flops_are_never_slower(op, flops, moved, factor):
    cost, base = costs.Cost(flops, moved), gpu("H100")
    wide = dataclasses.replace(base, hbm_gb_s=base.hbm_gb_s * factor)
    fast = dataclasses.replace(base, fp8_tflops=base.fp8_tflops * factor)
    slow = estimate_us(op, cost, base)
    assert estimate_us(op, cost, wide) <= slow and estimate_us(op, cost, fast) <= slow
    assert slow >= ESTIMATES[op][0] and slow >= costs.roofline_us(cost, base)


@given(st.floats(1, 300), st.floats(1, 300), st.floats(1000, 20000))
def test_more_requests_and_longer_caches_are_never_faster(a, b, kv):
    low, high = sorted((a, b))
    for kernels in (H100, H200):
        assert kernels.mla(low, 1, 128, kv).us <= kernels.mla(high, 1, 128, kv).us * 1.001
        assert kernels.mla(low, 1, 128, kv).us <= kernels.mla(low, 1, 128, 1.1 * kv).us * 1.001
        assert kernels.linear(low, 7168, 16384).us <= kernels.linear(high, 7168, 16384).us * 1.001


def test_records_of_one_gpu_leave_another_its_published_table():
    """H200 records of every op must not move the study's layer on H100."""
    points = [({"tokens": t, "heads": 128, "projection": p}, 1.0) for t in (1, 256) for p in ("k_b", "v_b")]
    tables = Tables(
        recorded("bmm", points).recorded
        | recorded("linear", [({"m": m, "n": 7168, "k": 16384}, 1.0) for m in (1, 256)]).recorded
        | recorded("rms_norm", [({"m": m, "h": 7168, "form": "add_quantize"}, 1.0) for m in (1, 256)]).recorded
        | recorded("router", [({"tokens": t, "experts": 256, "gather": 0}, 1.0) for t in (1, 256)]).recorded
    )
    kernels = Kernels(gpu("H100"), V3, tables)
    assert kernels.bmm(128, 128, "bmm_k") == H100.bmm(128, 128, "bmm_k")
    assert kernels.linear(128, 7168, 16384) == H100.linear(128, 7168, 16384)
    assert kernels.glue(128) == H100.glue(128)
    here = Kernels(gpu("H200"), V3, tables)
    assert here.bmm(128, 128, "bmm_k").us == 1.0
    assert here.bmm(128, 16, "bmm_v").origin == "extrapolated" and here.bmm(128, 16, "bmm_v").us < 1.0
    nearest = here.linear(64, 7168, 4096)  # never recorded: as the recorded shape of nearest size, by the estimates
    assert nearest.origin == "extrapolated" and "as 7168 x 16384" in nearest.source and nearest.us < 1.0
