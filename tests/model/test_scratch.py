"""One memory for the experts of all layers: what is in it from before is never read, and layers share it."""

from __future__ import annotations

import pytest
import torch

from moelab.engine.engine import Engine
from moelab.engine.sequence import Sampling
from moelab.model.arithmetic import Plain
from moelab.model.block_fp8 import BlockFp8
from tests.engine.test_distributed import TINYSEEK, prompts
from tests.helpers import load_alone


def text(model, poison: bool, overlap: str) -> list[list[int]]:
    engine = Engine(model, cache_tokens=1024, overlap=overlap, draft_tokens=1)
    requests = [engine.add(i, prompt, Sampling(6)) for i, prompt in enumerate(prompts()[:3])]
    while not engine.all_idle:
        if poison:
            model.scratch.gate_up.fill_(float("nan"))
            model.scratch.out.fill_(float("nan"))
            model.scratch.act[0].view(torch.uint8).fill_(0x7F)  # e4m3's NaN
            model.scratch.act[1].fill_(float("nan"))
        engine.step()
    return [request.output for request in requests]


@pytest.mark.parametrize("overlap", ["none", "microbatch"])
def test_what_stood_in_it_is_never_read(overlap):
    model = load_alone(TINYSEEK, max_tokens=64, arithmetic=BlockFp8())
    assert text(model, True, overlap) == text(model, False, overlap)


def test_all_layers_share_it():
    model = load_alone(TINYSEEK, max_tokens=64, arithmetic=BlockFp8())
    layers = [*model.moe_layers, model.mtp.layer]
    assert len(layers) > 1 and all(layer.feed_forward.scratch is model.scratch for layer in layers)
    assert model.scratch.gate_up.data_ptr() == model.scratch.out.data_ptr()
    experts, rows, hidden = model.all_to_all.spec.rows_shape
    assert model.scratch.out.shape == (experts, rows, hidden)
    assert model.scratch.gate_up.shape == (experts, rows, 2 * model.config.moe_intermediate_size)


def test_plain_arithmetic_has_none():
    model = load_alone(TINYSEEK, max_tokens=64, arithmetic=Plain())
    assert model.scratch.nbytes == 0 and model.scratch.out is None
