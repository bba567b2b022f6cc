"""The cases of routing, run once on the CPU: what they say they move is what goes in and comes out."""

from __future__ import annotations

import pytest
import torch

from moelab.bench import routing


def tensors(value):
    return [value] if isinstance(value, torch.Tensor) else [t for part in value for t in tensors(part)]


@pytest.mark.parametrize("cases", [routing.router_cases, routing.gather_cases, routing.reduce_cases])
def test_bytes_are_those_of_inputs_and_outputs(cases):
    for case in cases(True):
        inputs = case.make(torch.device("cpu"))
        outputs = case.backends["triton"](inputs)
        read = inputs[:2] if case.op == "router" else inputs  # the rest is where a peer writes
        assert case.bytes == sum(t.nbytes for t in tensors(read) + tensors(outputs))
        assert not any(t.isnan().any() for t in tensors(outputs))
