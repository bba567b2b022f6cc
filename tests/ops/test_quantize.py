"""1 × 128 quantisation: kernel against reference bit for bit, reference against the arithmetic it promises."""

from __future__ import annotations

import pytest
import torch

from moelab.ops.checks import OpError
from moelab.ops.layout import FORMATS, dequantize_rows, is_power_of_two, pack_ue8m0
from moelab.ops.quantize import quantize_reference, quantize_rows
from tests.ops.fp8_checks import assert_rounds, assert_same_rows, poisoned_pair

SHAPES = [(5, 512), (3, 576), (9, 130), (1, 1), (6, 100), (2, 1920)]


def draw(rows, columns, dtype=torch.float32):
    """Rows of very different size, a group of zeros, tiny values, and the largest in the last place."""
    x = torch.randn(rows, columns) * torch.logspace(-4, 4, rows)[:, None]
    x[rows // 2, :128] = 0
    x[0, -1] = 3e4
    x[-1, : columns // 2] *= 1e-6
    return x.to(dtype)


def expected(x, scale_format, power_of_two=False):
    values, scales = quantize_reference(x.cpu(), power_of_two or scale_format == "ue8m0")
    return values, pack_ue8m0(scales) if scale_format == "ue8m0" else scales


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_reference_keeps_its_promise(shape, power_of_two):
    x = draw(*shape)
    values, scales = quantize_reference(x, power_of_two)
    assert scales.shape == (shape[0], -(-shape[1] // 128))
    for group in range(scales.shape[1]):
        least = x[:, group * 128 : (group + 1) * 128].double().abs().amax(1).clamp(min=1e-4) / 448
        ratio = scales[:, group].double() / least
        assert (ratio > 1 - 1e-6).all() and (ratio < (2 if power_of_two else 1 + 1e-6)).all()
    assert not power_of_two or is_power_of_two(scales).all()
    assert_rounds(dequantize_rows(values, scales), x.double(), scales)


def test_an_exact_power_of_two_is_not_rounded_up():
    x = torch.zeros(3, 128)
    x[:, 5] = torch.tensor([448.0, 448.0 * 1.0001, 448 / 1024])
    assert quantize_reference(x, power_of_two=True)[1].flatten().tolist() == [1.0, 2.0, 2.0**-10]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(device, shape, scale_format, dtype):
    x = draw(*shape, dtype).to(device)
    out = poisoned_pair(shape, scale_format, device)
    got = quantize_rows(x, scale_format, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    assert_same_rows(got, expected(x, scale_format))


def test_kernel_rounds_scales_of_any_format_to_powers_of_two(device):
    x = draw(5, 576).to(device)
    for scale_format in ("row", "column_tma"):
        got = quantize_rows(x, scale_format, power_of_two=True, out=poisoned_pair(x.shape, scale_format, device))
        assert_same_rows(got, expected(x, scale_format, power_of_two=True))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_nan_and_infinity_spoil_their_group_and_no_other(device, scale_format):
    x = draw(4, 300)
    x[0, 3], x[1, 130], x[2, 299] = float("nan"), float("inf"), float("-inf")
    clean = x.nan_to_num(0, 0, 0).to(device)
    got = quantize_rows(x.to(device), scale_format, out=poisoned_pair(x.shape, scale_format, device))
    assert_same_rows(got, expected(x, scale_format))
    spoilt = torch.zeros(4, 300, dtype=torch.bool)
    spoilt[0, :128] = spoilt[1, 128:256] = spoilt[2, 256:] = True
    back = dequantize_rows(*got).cpu()
    assert torch.equal(back.isnan(), spoilt)
    assert torch.equal(back[~spoilt], dequantize_rows(*quantize_rows(clean, scale_format)).cpu()[~spoilt])


def test_strided_rows_in_and_out(device):
    wide = draw(6, 704, torch.bfloat16).to(device)
    x = wide[::2, 64:640]
    values = poisoned_pair((3, 704), "row", device)[0]
    _, scales = poisoned_pair(x.shape, "row", device)
    assert_same_rows(quantize_rows(x, out=(values[:, 64:640], scales)), expected(x, "row"))
    untouched = torch.cat([values[:, :64], values[:, 640:]], dim=1).float()
    assert untouched.isnan().all()


def test_no_rows():
    values, scales = quantize_rows(torch.empty(0, 300), "column_tma")
    assert values.shape == (0, 300) and scales.shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("rows", [1, 7, 128, 1000])
def test_many_rows_exactly(gpu, rows, scale_format):
    x = draw(rows, 7168, torch.bfloat16).to(gpu)
    got = quantize_rows(x, scale_format, out=poisoned_pair(x.shape, scale_format, gpu))
    assert_same_rows(got, expected(x, scale_format))


@pytest.mark.gpu
def test_offsets_beyond_32_bits(gpu):
    x = torch.zeros(300_032, 7168, dtype=torch.bfloat16, device=gpu)
    x[-5:].normal_()
    values, scales = quantize_rows(x, "column_tma")
    assert_same_rows((values[-5:], scales[-5:]), expected(x[-5:], "column_tma"))


X = torch.zeros(4, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(4, 256, dtype=torch.float64)), "x's dtype is float64: accepted: bfloat16 or float32"),
        (dict(x=torch.zeros(2, 4, 256)), r"x's shape is \[2, 4, 256\]: accepted: \[M, K\]"),
        (dict(x=torch.zeros(256, 4).T), "x's strides is .*last stride of 1"),
        (dict(scale_format="column"), "scale_format is 'column': accepted: 'row', 'column_tma', 'ue8m0'"),
        (dict(out=(torch.zeros(4, 256), torch.zeros(4, 2))), r"out\[0\]'s dtype is float32: accepted: float8_e4m3fn"),
        (dict(out=poisoned_pair((5, 256), "row", "cpu")), r"out\[0\]'s shape is \[5, 256\]: accepted: \[4, 256\]"),
        (dict(out=poisoned_pair((4, 256), "ue8m0", "cpu")), r"out\[1\]'s dtype is torch.int32"),
        (dict(scale_format="column_tma", out=poisoned_pair((4, 256), "row", "cpu")), r"out\[1\]'s strides"),
    ],
)  # fmt: skip
def test_what_is_refused(change, message):
    with pytest.raises(OpError, match=message):
        quantize_rows(**{"x": X, **change})
