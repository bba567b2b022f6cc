"""BMM in block FP8: kv_b cut for absorption, kernel against float64."""

from __future__ import annotations

import pytest
import torch

from moelab.ops import bmm as module
from moelab.ops.bmm import bmm, bmm_reference, split_kv_b
from moelab.ops.checks import OpError
from moelab.ops.fp8 import dequantize_block, quantize_block
from moelab.ops.layout import dequantize_rows
from moelab.ops.quantize import quantize_reference
from tests.ops.conftest import INTERPRETING

SHAPES = [(5, 2, 512, 128), (67, 2, 128, 512), (1, 3, 128, 128), (20, 1, 256, 256)]  # T, heads, N, K


def draw_weight(heads, columns, depth):
    """FP8 weights whose blocks differ in size by orders of magnitude."""
    spread = torch.logspace(-2, 2, heads * (columns // 128) * (depth // 128)).view(heads, columns // 128, -1)
    spread = spread.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return quantize_block(torch.randn(heads, columns, depth) * spread)


def draw_representable(*shape):
    """bfloat16 whose groups of 128 quantisation leaves as they are, each of another size: normal e4m3 numbers, ±448
    among them, times a power of two."""
    codes = torch.randint(8, 127, shape, dtype=torch.uint8) | torch.randint(2, shape, dtype=torch.uint8) << 7
    groups = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 128))
    groups[..., 5] = 448.0
    return (groups * 2.0 ** torch.randint(-9, 9, (*groups.shape[:-1], 1))).flatten(-2).bfloat16()


def assert_product(got, rows, weight, scales):
    """got = rows · weightᵀ, rows being what the quantisation made of x. Tensor cores keep some 13 bits of the largest
    of 32 FP8 products (arXiv 2412.19437, section 3.3.2), which costs a sum of 128 up to 2⁻¹¹ of the sum of their sizes;
    a product left out costs 2⁻⁷ of it. The result is rounded to bfloat16, under the interpreter cut off."""
    rows, weight = rows.to(got.device).double(), dequantize_block(weight, scales).double()
    exact = torch.einsum("thk,hnk->thn", rows, weight)
    sizes = torch.einsum("thk,hnk->thn", rows.abs(), weight.abs())
    tolerance = exact.abs() * (2**-7 if INTERPRETING else 2**-8) + sizes * 2**-10
    assert ((got.double() - exact).abs() <= tolerance).all()


def poisoned(*shape, device="cpu"):
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)


def test_kv_b_is_cut_without_rounding():
    kv_b, scales = quantize_block(torch.randn(3 * 256, 512) * torch.logspace(-2, 2, 512))
    whole = dequantize_block(kv_b, scales).view(3, 256, 512)
    (w_uk, uk_scales), (w_uv, uv_scales) = split_kv_b(kv_b, scales)
    assert uk_scales.shape == (3, 4, 1) and uv_scales.shape == (3, 1, 4)
    assert torch.equal(dequantize_block(w_uk, uk_scales), whole[:, :128].mT)
    assert torch.equal(dequantize_block(w_uv, uv_scales), whole[:, 128:])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_quantises_each_group_alone(shape):
    tokens, heads, columns, depth = shape
    x = (torch.randn(tokens, heads, depth) * torch.logspace(-3, 3, tokens)[:, None, None]).bfloat16()
    weight, scales = draw_weight(heads, columns, depth)
    got = bmm(x, weight, scales)  # without a GPU this is the reference
    assert got.dtype == torch.bfloat16
    assert_product(got, dequantize_rows(*quantize_reference(x)), weight, scales)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_on_what_fp8_holds(device, shape):
    tokens, heads, columns, depth = shape
    x = draw_representable(tokens, heads, depth)
    weight, scales = (t.to(device) for t in draw_weight(heads, columns, depth))
    out = poisoned(tokens, heads, columns, device=device)
    assert bmm(x.to(device), weight, scales, out) is out
    assert_product(out, x, weight, scales)


def test_several_tiles_pass_weights_that_are_kept(device, monkeypatch):
    monkeypatch.setattr(module, "_on_hopper", lambda *sizes: False)
    monkeypatch.setattr(module, "_config", lambda *sizes: module._as_config(64, 2, 256, 4, 2))
    x = draw_representable(200, 2, 128)
    weight, scales = (t.to(device) for t in draw_weight(2, 512, 128))
    out = poisoned(200, 2, 512, device=device)
    bmm(x.to(device), weight, scales, out)
    assert_product(out, x, weight, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("on_hopper", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 63, 64, 65, 128, 200, 256, 257, 1024])
@pytest.mark.parametrize(
    ("heads", "columns", "depth"), [(128, 512, 128), (128, 128, 512), (16, 512, 128), (16, 128, 512)]
)
def test_kernels_on_random_activations(gpu, monkeypatch, tokens, heads, columns, depth, on_hopper):
    """Both kernels at every size, whichever would be chosen."""
    monkeypatch.setattr(module, "_on_hopper", lambda *sizes: on_hopper)
    x = (torch.randn(tokens, heads, depth) * torch.logspace(-3, 3, tokens)[:, None, None]).bfloat16()
    weight, scales = (t.to(gpu) for t in draw_weight(heads, columns, depth))
    out = poisoned(tokens, heads, columns, device=gpu)
    bmm(x.to(gpu), weight, scales, out)
    assert_product(out, dequantize_rows(*quantize_reference(x)), weight, scales)


@pytest.mark.parametrize("on_hopper", [False, True])
def test_slices_in_and_out(device, monkeypatch, on_hopper):
    """q_nope lies in rows of 192 behind q_b, the latent query in rows of 576 before MLA; what lies beside is neither
    read nor written. The row after the last token is poison too."""
    monkeypatch.setattr(module, "_on_hopper", lambda *sizes: on_hopper)
    weight, scales = (t.to(device) for t in draw_weight(2, 512, 128))
    q = poisoned(7, 2, 192)
    q[:6, :, :128] = draw_representable(6, 2, 128)
    query = poisoned(7, 2, 576, device=device)
    bmm(q.to(device)[:6, :, :128], weight, scales, query[:6, :, :512])
    assert_product(query[:6, :, :512], q[:6, :, :128], weight, scales)
    assert query[:6, :, 512:].isnan().all() and query[6].isnan().all()


@pytest.mark.parametrize(("columns", "depth"), [(128, 256), (512, 128)])
def test_heads_before_tokens(device, monkeypatch, columns, depth):
    """Which the Hopper kernel does not take."""
    monkeypatch.setattr(module, "_on_hopper", lambda *sizes: True)
    weight, scales = (t.to(device) for t in draw_weight(2, columns, depth))
    x = draw_representable(2, 5, depth).transpose(0, 1)
    out = poisoned(2, 5, columns, device=device).transpose(0, 1)
    bmm(x.to(device), weight, scales, out)
    assert_product(out, x, weight, scales)


@pytest.mark.parametrize("on_hopper", [False, True])
def test_a_token_with_nan_spoils_no_other(device, monkeypatch, on_hopper):
    monkeypatch.setattr(module, "_on_hopper", lambda *sizes: on_hopper)
    weight, scales = (t.to(device) for t in draw_weight(2, 128, 512))
    x = draw_representable(5, 2, 512)
    clean = bmm(x.to(device), weight, scales)
    x[1, 0, 3], x[3, 1, 200] = float("nan"), float("inf")
    got = bmm(x.to(device), weight, scales)
    spoilt = torch.zeros(5, 2, dtype=torch.bool)
    spoilt[1, 0] = spoilt[3, 1] = True
    assert torch.equal(got[~spoilt], clean[~spoilt])
    if not INTERPRETING:  # there NaN does not survive the conversion to FP8; the scale that is NaN does
        assert got[spoilt].isnan().all()


def test_no_tokens(device):
    weight, scales = (t.to(device) for t in draw_weight(2, 128, 256))
    assert bmm(torch.empty(0, 2, 256, dtype=torch.bfloat16, device=device), weight, scales).shape == (0, 2, 128)


X, (WEIGHT, SCALES) = torch.zeros(4, 2, 256, dtype=torch.bfloat16), quantize_block(torch.zeros(2, 128, 256))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=X.float()), "x's dtype is float32: accepted: bfloat16"),
        (dict(x=X[:, 0]), r"x's shape is \[4, 256\]: accepted: \[T, heads, K\]"),
        (dict(x=X.mT.contiguous().mT), "x's strides is .*last stride of 1"),
        (dict(x=X[..., :100], weight=WEIGHT[..., :100]), "x's K is 100: accepted: a multiple of 128"),
        (dict(weight=WEIGHT.float()), "weight's dtype is float32: accepted: float8_e4m3fn"),
        (dict(weight=WEIGHT[:1]), r"weight's shape is \[1, 128, 256\]: accepted: \[2, N, 256\]"),
        (dict(weight=WEIGHT[:, :100]), "weight's N is 100: accepted: a multiple of 128"),
        (dict(weight=torch.cat([WEIGHT, WEIGHT], 1)[:, :128]), "weight's strides is .*: accepted: contiguous"),
        (dict(scales=SCALES.mT), r"scales's shape is \[2, 2, 1\]: accepted: \[2, 1, 2\]"),
        (dict(scales=SCALES.double()), "scales's dtype is float64: accepted: float32"),
        (dict(out=torch.zeros_like(X)), r"out's shape is \[4, 2, 256\]: accepted: \[4, 2, 128\]"),
        (dict(out=torch.empty(4, 2, 128)), "out's dtype is float32: accepted: bfloat16"),
        (dict(weight=WEIGHT.to("meta")), "weight's device is meta: accepted: cpu, where the others are"),
    ],
)  # fmt: skip
def test_what_is_refused(change, message):
    with pytest.raises(OpError, match=message):
        bmm(**{"x": X, "weight": WEIGHT, "scales": SCALES, **change})


@pytest.mark.parametrize(
    ("kv_b", "scales", "message"),
    [
        (WEIGHT[0], SCALES[0], "kv_b's rows is 128: accepted: 256 a head"),
        (WEIGHT.flatten(0, 1)[:, :100], SCALES.flatten(0, 1), "kv_b's columns is 100: accepted: a multiple of 128"),
        (WEIGHT.flatten(0, 1), SCALES[0], r"scales's shape is \[1, 2\]: accepted: \[2, 2\]"),
    ],
)
def test_kv_b_that_is_refused(kv_b, scales, message):
    with pytest.raises(OpError, match=message):
        split_kv_b(kv_b, scales)


def test_equals_the_product_with_weights_in_bfloat16_but_for_quantisation():
    """So that k_b and v_b may stand where the model now multiplies dequantised weights."""
    kv_b, scales = quantize_block(torch.randn(2 * 256, 512) * 0.05)
    whole = dequantize_block(kv_b, scales).view(2, 256, 512)
    (w_uk, uk_scales), (w_uv, uv_scales) = split_kv_b(kv_b, scales)
    q_nope, context = torch.randn(9, 2, 128).bfloat16(), torch.randn(9, 2, 512).bfloat16()
    for got, want in (
        (bmm_reference(q_nope, w_uk, uk_scales), torch.einsum("thn,hnc->thc", q_nope.float(), whole[:, :128])),
        (bmm_reference(context, w_uv, uv_scales), torch.einsum("thc,hvc->thv", context.float(), whole[:, 128:])),
    ):
        assert (got.float() - want).norm() / want.norm() < 0.04
