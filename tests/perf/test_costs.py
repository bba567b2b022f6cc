"""FLOP and bytes by hand, and the study's layer as a roofline."""

from __future__ import annotations

import pytest

from moelab.config import preset
from moelab.hardware import gpu
from moelab.perf import costs

V3, H100 = preset("deepseek-v3"), gpu("H100")
X = 44_040_192


def test_ops_by_hand():
    assert vars(costs.linear(256, 2112, 7168)) == {
        "flops": 2 * 256 * 2112 * 7168, "bytes": 256 * 7168 + 2112 * 7168 + 2 * 256 * 2112, "precision": "fp8",
    }  # fmt: skip
    assert costs.linear(3, 100, 50, "bf16").bytes == 2 * (3 * 50 + 100 * 50) + 2 * 3 * 100
    for n, k in costs.bmm_shapes(V3).values():
        one = costs.bmm(64, 128, n, k)
        assert one.flops == 2 * 64 * 128 * 128 * 512
    assert costs.bmm(64, 128, 512, 128).bytes == 65_536 * 128 + 128 * 64 * 128 + 1024 * 64 * 128
    attention = costs.mla(128, 2, 128, 5000, V3)
    assert attention.flops == 2 * 128 * 2 * 128 * 5000 * 1088 and attention.bytes == 128 * 5000 * 1152
    assert attention.flops / attention.bytes == pytest.approx(242 * 2, rel=0.01)
    assert costs.mla(128, 2, 32, 5000, V3).bytes == attention.bytes  # TP cuts heads, not the latent
    assert costs.mla(1, 1, 128, 10, V3, itemsize=1).bytes == 10 * 576
    routed = costs.grouped_gemm(2048, 32, V3)
    assert routed.flops == 2 * 2048 * X
    assert routed.bytes == 32 * X + 2048 * (7168 + 4 * 2048 + 2048 + 2 * 7168)
    assert costs.grouped_gemm(0, 32, V3, cut=8).bytes == 32 * X / 8
    assert costs.grouped_gemm(0, 32, V3, precision="fp4").bytes == 32 * X / 2


def test_shapes():
    assert costs.attention_shapes(V3) == {"qkv_a": (2112, 7168), "q_b": (24576, 1536), "o_proj": (7168, 16384)}
    assert costs.attention_shapes(V3, 4) == {"qkv_a": (2112, 7168), "q_b": (6144, 1536), "o_proj": (7168, 4096)}
    assert costs.mlp_shapes(V3, 2048) == {"up": (4096, 7168), "down": (7168, 2048)}
    assert costs.mlp_shapes(V3, 18432, 8) == {"up": (4608, 7168), "down": (7168, 2304)}


def roofline_layer(ep: int, tokens: int, batch: int) -> dict[str, float]:
    def us(cost: costs.Cost) -> float:
        return costs.roofline_us(cost, H100)

    shapes = costs.attention_shapes(V3)
    everyone = tokens * ep
    active = 256 / ep * (1 - (31 / 32) ** everyone)
    return {
        "s1": us(costs.linear(tokens, *shapes["qkv_a"])) + us(costs.linear(tokens, *shapes["q_b"]))
        + us(costs.bmm(tokens, 128, 512, 128)),
        "s2": us(costs.mla(batch, 2, 128, 5000, V3)) + us(costs.bmm(tokens, 128, 128, 512))
        + us(costs.linear(tokens, *shapes["o_proj"])) + us(costs.gate(tokens, V3)),
        "sh": us(costs.linear(tokens, 4096, 7168)) + us(costs.linear(tokens, 7168, 2048)),
        "m": us(costs.grouped_gemm(8 * tokens, active, V3)),
    }  # fmt: skip


def test_roofline_and_wire():  # check 17
    wire = {8: (29.5, 57.1), 128: (284.5, 550.5)}
    for ep, expected in ((8, 990), (128, 1390)):
        assert sum(roofline_layer(ep, 256, 128).values()) + sum(wire[ep]) == pytest.approx(expected, abs=1)
    half, (dispatch, combine) = roofline_layer(128, 128, 64), (x / 2 for x in wire[128])
    layer = 2 * (max(dispatch, half["s1"] + half["sh"]) + half["m"] + max(combine, half["s2"]))
    assert layer == pytest.approx(926, abs=1)


def test_roofline_is_the_slower_of_two():
    assert costs.roofline_us(costs.Cost(1979e6, 1.0), H100) == pytest.approx(1.0)
    assert costs.roofline_us(costs.Cost(1.0, 3.35e6), H100) == pytest.approx(1.0)
    assert costs.roofline_us(costs.Cost(989e6, 1.0, "bf16"), H100) == pytest.approx(1.0)
