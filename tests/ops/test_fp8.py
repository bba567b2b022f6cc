"""Block-FP8 weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.ops.checks import OpError
from moelab.ops.fp8 import dequantize_block, quantize_block
from moelab.ops.quantize_blocks import quantize_blocks
from tests.ops.fp8_checks import assert_same_rows


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


def draw_blocks(*shape, dtype=torch.float32):
    """Blocks of very different size, one of zeros, tiny values, and the largest in the last place."""
    weight = torch.randn(shape) * torch.logspace(-5, 5, shape[-2])[:, None]
    weight[..., :128, -100:] = 0
    weight[..., -1, -1] = 3e4
    weight[..., : shape[-2] // 2, :64] *= 1e-6
    return weight.to(dtype)


def poisoned_blocks(shape, device):
    values = torch.full(shape, float("nan"), device=device).to(torch.float8_e4m3fn)
    scales = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return values, torch.full(scales, float("nan"), device=device)


BLOCK_SHAPES = [(128, 128), (1, 1), (130, 260), (576, 100), (3, 150, 130), (2, 2, 128, 256)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", BLOCK_SHAPES)
def test_kernel_quantises_blocks(device, shape, dtype):
    weight, out = draw_blocks(*shape, dtype=dtype), poisoned_blocks(shape, device)
    got = quantize_blocks(weight.to(device), out)
    assert got[0] is out[0] and got[1] is out[1]
    assert_same_rows(got, quantize_block(weight))


def test_kernel_reads_a_slice_of_a_wider_matrix(device):
    wide = torch.full((300, 400), float("nan"))
    wide[:200, 64:364] = draw_blocks(200, 300)
    got = quantize_blocks(wide.to(device)[:200, 64:364], poisoned_blocks((200, 300), device))
    assert_same_rows(got, quantize_block(wide[:200, 64:364]))


def test_nan_and_infinity_spoil_their_block_and_no_other(device):
    weight = draw_blocks(200, 400)
    spoilt = torch.zeros(200, 400, dtype=torch.bool)
    for (row, column), bad in {(3, 3): float("nan"), (140, 130): float("inf"), (1, 399): float("-inf")}.items():
        weight[row, column] = bad
        at = row // 128 * 128, column // 128 * 128
        spoilt[at[0] : at[0] + 128, at[1] : at[1] + 128] = True
    got = quantize_blocks(weight.to(device), poisoned_blocks((200, 400), device))
    assert_same_rows(got, quantize_block(weight))
    back = dequantize_block(got[0].cpu(), got[1].cpu())
    assert torch.equal(back.isnan(), spoilt)
    assert torch.equal(dequantize_block(*quantize_block(weight)).isnan(), spoilt)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2112, 7168), (7168, 16384), (3, 4096, 7168)])
def test_large_weights_exactly(gpu, shape, dtype):
    """Against the reference on the GPU too: torch divides there as on the CPU, rounding correctly."""
    weight = torch.randn(shape, device=gpu) * torch.logspace(-6, 3, shape[-1], device=gpu)
    got, want = quantize_blocks(weight.to(dtype), poisoned_blocks(shape, gpu)), quantize_block(weight.to(dtype))
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])


@pytest.mark.gpu
def test_every_bfloat16_under_every_mantissa_of_the_largest(gpu):
    every = torch.arange(2**16, device=gpu, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = torch.where(every.isfinite(), every, 0).view(4, 128, 128)
    for exponent in (20, 80, 90, 127, 140, 254):
        for mantissa in range(128):
            largest = torch.tensor(exponent << 7 | mantissa, dtype=torch.int16).view(torch.bfloat16).item()
            weight = every.clamp(-largest, largest)
            got, want = quantize_blocks(weight), quantize_block(weight)
            assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])


def test_no_weights(device):
    values, scales = quantize_blocks(torch.empty(0, 256, device=device))
    assert values.shape == (0, 256) and scales.shape == (0, 2)
    assert quantize_blocks(torch.empty(0, 130, 256, device=device))[1].shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=torch.zeros(4, 256).half()), "weight's dtype is float16: accepted: bfloat16 or float32"),
        (dict(weight=torch.zeros(256)), r"weight's shape is \[256\]: accepted: \[N, K\]"),
        (dict(weight=torch.zeros(256, 4).T), "weight's strides is .*last stride of 1"),
        (dict(weight=torch.zeros(2, 8, 256)[:, :4]), "weight's strides is .*a stack that is contiguous"),
        (dict(out=poisoned_blocks((4, 128), "cpu")), r"out\[0\]'s shape is \[4, 128\]: accepted: \[4, 256\]"),
        (dict(out=(torch.zeros(4, 256), torch.zeros(1, 2))), r"out\[0\]'s dtype is float32: accepted: float8_e4m3fn"),
        (dict(out=(poisoned_blocks((4, 256), "cpu")[0], torch.zeros(4, 2))), r"out\[1\]'s shape is \[4, 2\]"),
    ],
)
def test_what_the_block_kernel_refuses(change, message):
    with pytest.raises(OpError, match=message):
        quantize_blocks(**{"weight": torch.zeros(4, 256), **change})
