"""RMSNorm, with a residual and quantised."""

from __future__ import annotations

import pytest
import torch

from moelab.ops.checks import OpError
from moelab.ops.layout import FORMATS, dequantize_rows, unpack_ue8m0
from moelab.ops.norm import add_rms_norm, rms_norm, rms_norm_quantize
from moelab.ops.quantize import quantize_reference
from tests.ops.conftest import INTERPRETING
from tests.ops.fp8_checks import assert_rounds, poisoned_pair

SHAPES = [(5, 512), (3, 576), (1, 1), (7, 100), (2, 1536), (2, 2300)]
EPS = 1e-6


def draw(rows, columns, dtype):
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]
    return x.to(dtype), (torch.rand(columns) + 0.5).to(dtype), torch.randn(rows, columns).to(dtype)


def exact(x, weight, residual=None):
    """float64, nothing rounded on the way but the sum."""
    if residual is not None:
        x = (x.float() + residual.float()).to(x.dtype)
    wide = x.double()
    return x, wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def slack(dtype):
    """Relative error of the result: two roundings to bfloat16, which Triton's interpreter truncates."""
    if dtype == torch.float32:
        return 2e-6
    return 2 * 2**-7 if INTERPRETING else 2 * 2**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_reference_and_the_fused_form_without_a_kernel(dtype):
    x, weight, residual = draw(5, 300, dtype)
    total, want = exact(x, weight, residual)
    got = rms_norm(total, weight, EPS)
    assert ((got.double() - want).abs() <= want.abs() * slack(dtype)).all()
    stream = residual.clone()
    assert torch.equal(add_rms_norm(x, weight, EPS, stream), got) and torch.equal(stream, total)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(device, shape, dtype, with_residual):
    x, weight, residual = draw(*shape, dtype)
    total, want = exact(x, weight, residual if with_residual else None)
    stream = residual.to(device) if with_residual else None
    out = torch.full(shape, float("nan"), dtype=dtype, device=device)
    got = add_rms_norm(x.to(device), weight.to(device), EPS, stream, out=out)
    assert got is out
    if with_residual and (not INTERPRETING or dtype == torch.float32):
        assert torch.equal(stream.cpu(), total)
    elif with_residual:
        total, want = stream.cpu(), exact(stream.cpu(), weight)[1]  # of what the interpreter's truncated sum is
    assert ((got.cpu().double() - want).abs() <= want.abs() * slack(dtype)).all()


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_quantises(device, shape, scale_format, with_residual):
    x, weight, residual = (t.to(device) for t in draw(*shape, torch.float32))
    stream = residual.clone() if with_residual else None
    got = rms_norm_quantize(x, weight, EPS, stream, scale_format, out=poisoned_pair(shape, scale_format, device))
    total, want = exact(x.cpu(), weight.cpu(), residual.cpu() if with_residual else None)
    assert stream is None or torch.equal(stream.cpu(), total)
    scales = got[1].cpu()
    if scale_format == "ue8m0":
        scales = unpack_ue8m0(scales, -(-shape[1] // 128))
    assert_rounds(dequantize_rows(*got).cpu(), want, scales, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(130, 7168), (33, 1536), (17, 512), (5, 576)])
def test_fusing_changes_no_rounding(gpu, shape, with_residual):
    """Quantised in one pass, or normed by the kernel and quantised after it: the same bytes, but for the few values
    whose rounding to bfloat16 hangs on the order in which squares were summed."""
    x, weight, residual = (t.to(gpu) for t in draw(*shape, torch.bfloat16))
    streams = [residual.clone() if with_residual else None for _ in range(2)]
    values, scales = (t.cpu().float() for t in rms_norm_quantize(x, weight, EPS, streams[0]))
    want, want_scales = (t.float() for t in quantize_reference(add_rms_norm(x, weight, EPS, streams[1]).cpu()))
    assert (values != want).float().mean() < 1e-3 and (scales != want_scales).float().mean() < 1e-3
    assert ((values - want).abs() <= want.abs() / 8 + 2**-9).all()
    assert ((scales - want_scales).abs() <= want_scales * 2**-7).all()
    assert not with_residual or torch.equal(*streams)


def test_a_row_with_nan_spoils_no_other(device):
    x, weight, _ = draw(4, 300, torch.float32)
    x[1, 7] = float("nan")
    got = add_rms_norm(x.to(device), weight.to(device), EPS).cpu()
    assert got[1].isnan().all() and not got[[0, 2, 3]].isnan().any()
    back = dequantize_rows(*rms_norm_quantize(x.to(device), weight.to(device), EPS)).cpu()
    assert back[1].isnan().all() and not back[[0, 2, 3]].isnan().any()


def test_slices_of_a_wider_projection(device):
    """As q_a's and kv_a's outputs lie in one fused row."""
    x, _, _ = draw(3, 2112, torch.float32)
    weight = torch.ones(512, device=device)
    got = add_rms_norm(x.to(device)[:, 1536:2048], weight, EPS).cpu()
    torch.testing.assert_close(got, rms_norm(x[:, 1536:2048], weight.cpu(), EPS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(2, 128, dtype=torch.float16)), "x's dtype is float16: accepted: bfloat16 or float32"),
        (dict(x=torch.zeros(2, 20000)), "x's H is 20000: accepted: 1…16384"),
        (dict(weight=torch.zeros(64)), r"weight's shape is \[64\]: accepted: \[128\]"),
        (dict(weight=torch.zeros(128, dtype=torch.bfloat16)), "weight's dtype is bfloat16: accepted: float32"),
        (dict(residual=torch.zeros(3, 128)), r"residual's shape is \[3, 128\]: accepted: \[2, 128\]"),
        (dict(residual=torch.zeros(128, 2).T), "residual's strides"),
    ],
)
@pytest.mark.parametrize("op", [add_rms_norm, rms_norm_quantize])
def test_what_is_refused(op, change, message):
    with pytest.raises(OpError, match=message):
        op(**{"x": torch.zeros(2, 128), "weight": torch.zeros(128), "eps": EPS, **change})
