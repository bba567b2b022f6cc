"""Block-FP8 weights."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.ops.fp8 import dequantize_block, quantize_block


@given(st.sampled_from([(), (3,), (2, 2)]), st.integers(1, 300), st.integers(1, 300))
def test_round_trip_is_within_half_a_step_and_counts_blocks_with_ceil(stack, rows, cols):
    weight = torch.randn(*stack, rows, cols) * torch.rand(*stack, rows, 1) * 10
    quantized, scale = quantize_block(weight)
    assert quantized.shape == weight.shape and scale.shape == (*stack, -(-rows // 128), -(-cols // 128))
    back = dequantize_block(quantized, scale, torch.float32)
    spread = scale[..., (torch.arange(rows) // 128)[:, None], torch.arange(cols) // 128]
    # e4m3 keeps 3 bits of mantissa; below 2^-6 its steps are 2^-9, times the scale.
    assert ((back - weight).abs() <= weight.abs() * 2**-4 + spread * 2**-10 * 1.001).all()


def test_a_stack_is_its_matrices_one_by_one():
    weight = torch.randn(2, 3, 200, 130) * torch.logspace(-3, 3, 6).view(2, 3, 1, 1)
    quantized, scale = quantize_block(weight)
    back = dequantize_block(quantized, scale, torch.bfloat16)
    for i in range(2):
        for j in range(3):
            alone = quantize_block(weight[i, j])
            assert torch.equal(quantized[i, j].float(), alone[0].float()) and torch.equal(scale[i, j], alone[1])
            assert torch.equal(back[i, j], dequantize_block(*alone, torch.bfloat16))


def test_the_last_blocks_of_576_rows_are_read_with_their_own_scale():
    weight = torch.ones(576, 256)
    weight[512:] = 1000.0
    quantized, scale = quantize_block(weight)
    assert scale.shape == (5, 2)
    torch.testing.assert_close(dequantize_block(quantized, scale, torch.float32), weight, rtol=0.04, atol=0)


def test_zero_blocks_stay_zero():
    quantized, scale = quantize_block(torch.zeros(130, 130))
    assert scale.isfinite().all() and not dequantize_block(quantized, scale, torch.float32).any()


def test_dequantising_half_a_head_pair_equals_cutting_the_whole():
    weight, rows = torch.randn(1024, 512), slice(256, 512)
    quantized, scale = quantize_block(weight)
    whole = dequantize_block(quantized, scale, torch.bfloat16)
    assert torch.equal(dequantize_block(quantized[rows], scale[2:4], torch.bfloat16), whole[rows])
