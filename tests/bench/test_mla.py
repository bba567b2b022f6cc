"""The cases of MLA decode, run once on the CPU: what they say they move is what goes in and comes out."""

from __future__ import annotations

import pytest
import torch

from moelab.bench.mla import Setting, _case, mla_cases
from moelab.ops.mla_cache import Fp8Cache


def test_the_grid():
    settings = [tuple(case.params.values()) for case in mla_cases(False)]
    assert len(set(settings)) == len(settings)
    at_128_heads = {(b, q, kv) for b, q, kv, heads, form in settings if heads == 128 and form == "bf16"}
    assert {
        (b, q, kv) for b in (1, 2, 4, 8, 16, 32, 64, 128) for q in (1, 2) for kv in (1024, 5000, 16384)
    } <= at_128_heads
    assert {heads for *_, heads, _ in settings} == {128, 64, 32, 16}


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_bytes_are_those_of_the_rows_the_queries_and_the_output(kv):
    case = _case(Setting(3, 2, 128, 4, kv))
    inputs = case.make(torch.device("cpu"))
    out = case.backends["triton"](inputs)
    assert out is inputs.out and not out.isnan().any()
    cache = inputs.cache
    parts = (cache.values, cache.scales, cache.rope) if isinstance(cache, Fp8Cache) else (cache,)
    moved = (*parts, inputs.q_latent, inputs.q_pe, out)
    assert case.bytes == sum(part.numel() * part.element_size() for part in moved)
    assert case.flops == 2 * (576 + 512) * 3 * 2 * 4 * 128
