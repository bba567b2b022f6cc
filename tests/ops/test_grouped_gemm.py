"""One matrix per expert over the rows that are there."""

from __future__ import annotations

import torch

from moelab.ops.activation import silu_mul
from moelab.ops.grouped_gemm import grouped_gemm


def test_rows_beyond_the_counts_are_neither_read_nor_needed():
    counts = torch.tensor([3, 0, 7, 8], dtype=torch.int32)
    rows, weight = torch.randn(4, 8, 24), torch.randn(4, 10, 24)
    poisoned = rows.clone()
    for expert, count in enumerate(counts):
        poisoned[expert, count:] = float("nan")
    clean, out = grouped_gemm(rows, weight, counts), grouped_gemm(poisoned, weight, counts)
    for expert, count in enumerate(counts):
        assert torch.equal(out[expert, :count], clean[expert, :count])
        expected = rows[expert, :count].double() @ weight[expert].double().T
        torch.testing.assert_close(out[expert, :count].double(), expected, rtol=0, atol=1e-5)


def test_the_gate_is_the_first_half():
    gate, up = torch.randn(2, 5, 16)
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), -1)).double(), expected, rtol=0, atol=1e-6)
