"""The cases around MLA decode, run once on the CPU at a few tokens: what they say they move is what goes in and out."""

from __future__ import annotations

import pytest
import torch

from moelab.bench import absorb
from tests.bench.test_routing import tensors

SMALL = [
    absorb._bmm("k_b", 3, 2),
    absorb._bmm("v_b", 3, 2),
    absorb._rope_append("bf16", 3, 2),
    absorb._rope_append("fp8", 3, 2),
    absorb._quantize_weight(300, 200),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.op} {next(iter(case.params.values()))}")
def test_bytes_are_those_of_inputs_and_outputs(case):
    inputs = case.make(torch.device("cpu"))
    result = case.backends["triton"](inputs)
    if case.op == "bmm":
        moved = [inputs[name] for name in ("x", "weight", "scales", "out")]
    elif case.op == "rope_append":
        q_pe, latent, k_pe, cos, sin, slots, _, out = inputs
        row = 512 + 4 * 4 + 64 * 2 if case.params["cache"] == "fp8" else 576 * 2
        assert case.bytes == sum(t.nbytes for t in (q_pe, latent, k_pe, cos, sin, slots, out)) + 3 * row
        return
    else:
        moved = [inputs[0], *result]
    assert case.bytes == sum(t.nbytes for t in tensors(moved))


@pytest.mark.parametrize("name", ["k_b", "v_b"])
def test_cublas_does_the_same_job(name):
    case = absorb._bmm(name, 5, 2)
    inputs = case.make(torch.device("cpu"))
    for run in case.backends.values():
        run(inputs)
    ours, theirs = inputs["out"].float(), inputs["out_by_head"].transpose(0, 1).float()
    assert (ours - theirs).norm() / theirs.norm() < 0.05  # they do not quantise
