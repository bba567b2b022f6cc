"""RMSNorm: of sums of two and three, quantised, and kept beside what is quantised."""

from __future__ import annotations

import pytest
import torch

from moelab.ops.checks import OpError
from moelab.ops.layout import FORMATS, dequantize_rows, unpack_ue8m0
from moelab.ops.norm import add_rms_norm, rms_norm, rms_norm_quantize
from moelab.ops.quantize import quantize_reference
from tests.ops.conftest import INTERPRETING
from tests.ops.fp8_checks import assert_rounds, assert_same_rows, poisoned_pair

ADDS = [(), ("residual",), ("also",), ("residual", "also")]  # what stands beside x
SHAPES = [(5, 512), (3, 576), (1, 1), (7, 100), (2, 1536), (2, 2300)]
EPS = 1e-6


def draw(rows, columns, dtype):
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]
    return x.to(dtype), (torch.rand(columns) + 0.5).to(dtype), torch.randn(rows, columns).to(dtype)


def draw_adds(adds, rows, columns, dtype):
    return {name: (torch.randn(rows, columns) * 3).to(dtype) for name in adds}


def to(device, tensors):
    """Copies, of which an op may overwrite some."""
    return {name: tensor.clone().to(device) for name, tensor in tensors.items()}


def exact(x, weight, residual=None, also=None):
    """float64, nothing rounded on the way but the sums: x + also first, then the residual."""
    for other in (also, residual):
        if other is not None:
            x = (x.float() + other.float()).to(x.dtype)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_three_are_summed_as_separate_operations_sum_them(dtype):
    """x + also is rounded before the residual is added; and what is quantised is what `normed` shows."""
    x, weight, _ = draw(5, 300, dtype)
    added = draw_adds(("residual", "also"), 5, 300, dtype)
    stream = added["residual"] + (x + added["also"])
    assert dtype == torch.float32 or not torch.equal(stream, (added["residual"] + x) + added["also"])
    got = to("cpu", added)
    assert torch.equal(add_rms_norm(x, weight, EPS, **got), rms_norm(stream, weight, EPS))
    assert torch.equal(got["residual"], stream) and torch.equal(got["also"], added["also"])
    normed = torch.full_like(x, float("nan"))
    pair = rms_norm_quantize(x, weight, EPS, **to("cpu", added), normed=normed)
    assert torch.equal(normed, rms_norm(stream, weight, EPS))
    assert_same_rows(pair, quantize_reference(normed))


@pytest.mark.parametrize("adds", ADDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(device, shape, dtype, adds):
    x, weight, _ = draw(*shape, dtype)
    added = draw_adds(adds, *shape, dtype)
    total, want = exact(x, weight, **added)
    given = to(device, added)
    out = torch.full(shape, float("nan"), dtype=dtype, device=device)
    got = add_rms_norm(x.to(device), weight.to(device), EPS, out=out, **given)
    assert got is out
    if "also" in adds:
        assert torch.equal(given["also"].cpu(), added["also"])
    tolerance = slack(dtype)
    if not INTERPRETING or dtype == torch.float32:
        assert "residual" not in adds or torch.equal(given["residual"].cpu(), total)
    elif "residual" in adds:
        want = exact(given["residual"], weight)[1]  # of what the interpreter's truncated sum is
    elif "also" in adds:
        tolerance += 2 * 2**-7  # of a truncated sum, and of the mean of such
    assert ((got.cpu().double() - want).abs() <= want.abs() * tolerance).all()


@pytest.mark.parametrize("adds", ADDS)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_quantises(device, shape, scale_format, adds):
    x, weight, _ = (t.to(device) for t in draw(*shape, torch.float32))
    added = draw_adds(adds, *shape, torch.float32)
    given = to(device, added)
    got = rms_norm_quantize(x, weight, EPS, **given, scale_format=scale_format,
                            out=poisoned_pair(shape, scale_format, device))  # fmt: skip
    total, want = exact(x.cpu(), weight.cpu(), **added)
    assert "residual" not in adds or torch.equal(given["residual"].cpu(), total)
    scales = got[1].cpu()
    if scale_format == "ue8m0":
        scales = unpack_ue8m0(scales, -(-shape[1] // 128))
    assert_rounds(dequantize_rows(*got).cpu(), want, scales, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_kept_beside_its_quantised_form(device, shape, dtype):
    """It is what was quantised, bit for bit, and what the form without quantisation gives; that is another kernel on a
    GPU and may sum the squares in another order. It stands in rows of a wider tensor, whose other columns stay."""
    x, weight, _ = draw(*shape, dtype)
    x, weight, added = x.to(device), weight.to(device), draw_adds(("residual", "also"), *shape, dtype)
    wide = torch.full((shape[0] + 1, shape[1] + 9), float("nan"), dtype=dtype, device=device)
    normed = wide[:-1, : shape[1]]
    got = rms_norm_quantize(x, weight, EPS, **to(device, added), normed=normed)
    assert_same_rows(got, quantize_reference(normed.cpu()))
    want = add_rms_norm(x, weight, EPS, **to(device, added))
    torch.testing.assert_close(normed, want, rtol=slack(dtype), atol=0)
    assert wide[-1].isnan().all() and wide[:, shape[1] :].isnan().all()


@pytest.mark.parametrize("name", ["x", "also"])
def test_the_norm_may_lie_where_its_input_lay(device, name):
    x, weight, _ = draw(5, 300, torch.float32)
    weight, added = weight.to(device), draw_adds(("residual", "also"), 5, 300, torch.float32)
    given = {"x": x.to(device), **to(device, added)}
    want = add_rms_norm(weight=weight, eps=EPS, **to(device, given))
    rms_norm_quantize(weight=weight, eps=EPS, normed=given[name], **given)
    torch.testing.assert_close(given[name], want, rtol=slack(torch.float32), atol=0)


def test_no_rows(device):
    x, weight = torch.empty(0, 256, device=device), torch.ones(256, device=device)
    assert add_rms_norm(x, weight, EPS, x.clone(), also=x.clone()).shape == (0, 256)
    values, scales = rms_norm_quantize(x, weight, EPS, also=x.clone(), normed=x.clone())
    assert values.shape == (0, 256) and scales.shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("adds", ADDS)
@pytest.mark.parametrize("shape", [(130, 7168), (33, 1536), (17, 512), (5, 576)])
def test_fusing_changes_no_rounding(gpu, shape, adds):
    """Quantised in one pass, or normed by the kernel and quantised after it: the same bytes, but for the few values
    whose rounding to bfloat16 hangs on the order in which squares were summed. The stream, a sum, hangs on nothing."""
    x, weight, _ = (t.to(gpu) for t in draw(*shape, torch.bfloat16))
    added = to(gpu, draw_adds(adds, *shape, torch.bfloat16))
    once, apart = to(gpu, added), to(gpu, added)
    normed = torch.full_like(x, float("nan"))
    values, scales = (t.cpu().float() for t in rms_norm_quantize(x, weight, EPS, **once, normed=normed))
    summed = x + apart.pop("also") if "also" in adds else x
    plain = add_rms_norm(summed, weight, EPS, **apart)
    want, want_scales = (t.float() for t in quantize_reference(plain.cpu()))
    assert (normed != plain).float().mean() < 1e-3
    assert (values != want).float().mean() < 1e-3 and (scales != want_scales).float().mean() < 1e-3
    assert ((values - want).abs() <= want.abs() / 8 + 2**-9).all()
    assert ((scales - want_scales).abs() <= want_scales * 2**-7).all()
    assert "residual" not in adds or torch.equal(once["residual"], added["residual"] + summed)


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
        (dict(also=torch.zeros(2, 64)), r"also's shape is \[2, 64\]: accepted: \[2, 128\]"),
        (dict(also=torch.zeros(2, 128, dtype=torch.bfloat16)), "also's dtype is bfloat16: accepted: float32"),
    ],
)
@pytest.mark.parametrize("op", [add_rms_norm, rms_norm_quantize])
def test_what_is_refused(op, change, message):
    with pytest.raises(OpError, match=message):
        op(**{"x": torch.zeros(2, 128), "weight": torch.zeros(128), "eps": EPS, **change})


@pytest.mark.parametrize(
    ("normed", "message"),
    [
        (torch.zeros(2, 64), r"normed's shape is \[2, 64\]: accepted: \[2, 128\]"),
        (torch.zeros(2, 128, dtype=torch.bfloat16), "normed's dtype is bfloat16: accepted: float32"),
        (torch.zeros(128, 2).T, "normed's strides"),
    ],
)
def test_where_the_norm_is_not_kept(normed, message):
    with pytest.raises(OpError, match=message):
        rms_norm_quantize(torch.zeros(2, 128), torch.zeros(128), EPS, normed=normed)
