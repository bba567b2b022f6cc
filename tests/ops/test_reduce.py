"""The weighted sum over a token's experts, bit for bit."""

from __future__ import annotations

import pytest
import torch

from moelab.ops.checks import OpError
from moelab.ops.reduce import reduce_topk, reduce_topk_reference
from tests.ops.poison import poison_outputs


def draw(device, num_rows, hidden, num_tokens, top_k, dtype, ids_dtype=torch.int64):
    """Rows that no token takes are NaN, and so are weights of what goes nowhere."""
    row_of = torch.randint(-1, num_rows, (num_tokens, top_k))
    y = torch.full((num_rows, hidden), float("nan"))
    y[row_of[row_of >= 0]] = torch.randn(int((row_of >= 0).sum()), hidden)
    weights = torch.rand(num_tokens, top_k).masked_fill(row_of < 0, float("nan"))
    return y.to(device, dtype), row_of.to(device, ids_dtype), weights.to(device)


def expected(y, row_of, weights, dtype):
    """One token, one expert at a time; float32 products and sums."""
    out = torch.zeros(len(row_of), y.shape[1])
    for t in range(len(row_of)):
        for row, weight in zip(row_of[t].tolist(), weights[t].cpu(), strict=True):
            if row >= 0:
                out[t] += weight * y[row].float().cpu()
    return out.to(dtype)


SHAPES = [(40, 300, 7, 8), (9, 1030, 5, 3), (3, 1, 4, 1), (1, 512, 6, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_adds_in_order(shape):
    y, row_of, weights = draw("cpu", *shape, torch.bfloat16)
    assert torch.equal(reduce_topk_reference(y, row_of, weights), expected(y, row_of, weights, torch.bfloat16))


@pytest.mark.parametrize(
    "dtype, ids_dtype",
    [(torch.bfloat16, torch.int32), (torch.float16, torch.int64), (torch.float32, torch.int64)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_adds_in_order(device, monkeypatch, shape, dtype, ids_dtype):
    y, row_of, weights = draw(device, *shape, dtype, ids_dtype)
    poison_outputs(monkeypatch)
    outputs = [torch.float32, torch.float16, torch.bfloat16]
    for out_dtype in outputs if device.type == "cuda" else outputs[:2]:  # the interpreter truncates to bfloat16
        out = reduce_topk(y, row_of, weights, out_dtype)
        assert torch.equal(out.cpu(), expected(y, row_of, weights, out_dtype))


def test_the_kernel_takes_rows_of_a_wider_tensor_and_none_at_all(device):
    wide = torch.randn(8, 300, device=device)
    row_of, weights = torch.randint(0, 8, (3, 4), device=device), torch.rand(3, 4, device=device)
    y = wide[:, 3:103]
    assert torch.equal(reduce_topk(y, row_of, weights).cpu(), expected(y, row_of, weights, torch.float32))
    assert reduce_topk(y, row_of[:0], weights[:0]).shape == (0, 100)
    nothing = torch.full_like(row_of, -1)
    assert torch.equal(reduce_topk(y[:0], nothing, weights), torch.zeros(3, 100, device=device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the sizes of a deployment need a GPU; none here")
def test_sizes_of_a_deployment():
    y, row_of, weights = draw("cuda", 2048, 7168, 256, 8, torch.bfloat16)
    assert torch.equal(reduce_topk(y, row_of, weights), reduce_topk_reference(y, row_of, weights))


@pytest.mark.parametrize(
    "named, accepted, changes",
    [
        ("y's dtype is float8_e4m3fn", "bfloat16", dict(y=torch.zeros(4, 64, dtype=torch.float8_e4m3fn))),
        ("row_of's dtype is float32", "int32 or int64", dict(row_of=torch.zeros(3, 2))),
        ("weights's shape is [3, 1]", "[3, 2]", dict(weights=torch.zeros(3, 1))),
        ("weights's device is meta", "cpu", dict(weights=torch.zeros(3, 2, device="meta"))),
        ("dtype is torch.int8", "bfloat16", dict(dtype=torch.int8)),
    ],
)
def test_what_it_does_not_take_it_names(named, accepted, changes):
    arguments = dict(y=torch.zeros(4, 64), row_of=torch.zeros(3, 2, dtype=torch.int64), weights=torch.zeros(3, 2))
    with pytest.raises(OpError) as error:
        reduce_topk(**{**arguments, **changes})
    assert named in str(error.value) and accepted in str(error.value)
