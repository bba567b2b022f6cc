"""That the bound of the grouped GEMM holds for the instruction it describes, and that no wrong product passes it."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped_checks import assert_close, cut_off, rms

KEPT = 13  # bits below the first


def cut(values, first):
    """Without the bits more than KEPT below 2^first, towards −∞ as a shift of two's complement does."""
    unit = torch.exp2((first - KEPT).double())
    return (values / unit).floor() * unit


def exponent(values):
    return torch.where(values == 0, -999, torch.frexp(values).exponent - 1)


def tensor_core_product(x, w):
    """x [M, K] · w [N, K]ᵀ of e4m3 values, K a multiple of 128: groups of 128 by the instruction, added in float64."""
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for group in range(0, x.shape[1], 128):
        sums = torch.zeros_like(total)
        for k in range(group, group + 128, 32):
            products = x[:, None, k : k + 32] * w[None, :, k : k + 32]
            exponents = exponent(x[:, k : k + 32])[:, None] + exponent(w[:, k : k + 32])[None]
            first = exponents.amax(-1).maximum(exponent(sums)).clamp(min=-500)
            sums = cut(products, first[..., None]).sum(-1) + cut(sums, first)
            sums = cut(sums, exponent(sums).clamp(min=-500))
        total += sums
    return total


def e4m3(values):
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).double()


def draw(kind, rows, k):
    values = torch.randn(rows, k)
    if kind == "wide":  # over the whole range, so that most products lose all their bits
        values = values * torch.exp2(torch.randint(-9, 8, values.shape))
    elif kind == "swamped":  # one value to which the others lose all their bits, and that goes again
        values = torch.rand(rows, k) * 0.008 + 0.02
        values[:, ::128] = 256
        values[:, 127::128] = -256
    return e4m3(values)


@pytest.mark.parametrize("kind", ["normal", "wide", "swamped"])
def test_the_instruction_stays_within_the_bound(kind):
    x, w = draw(kind, 12, 512), e4m3(torch.ones(20, 512)) if kind == "swamped" else draw(kind, 20, 512)
    lost, bound = (tensor_core_product(x, w) - x @ w.T).abs(), cut_off(x, w)
    assert (lost <= bound).all()
    assert lost.max() > 0 and (kind != "swamped" or (lost / bound).min() > 0.5)  # so it is hardly too wide
    if kind == "normal":
        assert rms(lost) < 2 / 3 * 2**-13 * rms(x.abs() @ w.abs().T)


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("k", [512, 2048])
@pytest.mark.parametrize("wrong", ["nothing", "a product", "a group", "a scale", "rounding", "rows", "a column"])
def test_what_is_refused(wrong, k, tensor_cores):
    x, w = draw("normal", 24, k), draw("normal", 96, k)
    right = tensor_core_product(x, w) if tensor_cores else x @ w.T
    if wrong == "a product":
        right -= x[:, 77, None] * w[None, :, 77]
    elif wrong == "a group":
        right[7] -= x[7, 128:256] @ w[:, 128:256].T
    elif wrong == "a scale":
        right += 0.1 * (x[:, :128] @ w[:, :128].T)
    elif wrong == "rounding":
        right = (right * 2**4).round() / 2**4  # as of 7 bits of the largest
        right = torch.where(right.abs() < 2**5, right, (right / 2).round() * 2)
    elif wrong == "rows":
        right[:2] = right[:2].flip(0)
    elif wrong == "a column":
        right[:, -1] = 0
    out = right.bfloat16()
    if wrong == "nothing":
        assert_close(out, x, w, tensor_cores)
        return
    with pytest.raises(AssertionError, match="of what is allowed"):
        assert_close(out, x, w, tensor_cores)
