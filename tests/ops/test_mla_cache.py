"""The two forms of the latent cache."""

from __future__ import annotations

import pytest
import torch

from moelab.ops.checks import OpError
from moelab.ops.mla_cache import LATENT_DIM, Fp8Cache, check_cache, read_rows


def test_fp8_rows_come_back_within_the_rounding_of_their_group():
    rows = torch.randn(3, 64, 576) * torch.logspace(-3, 3, 64)[:, None]
    cache = Fp8Cache.from_rows(rows)
    check_cache(cache)
    slots = torch.randperm(3 * 64)[:50]
    back, want = read_rows(cache, slots), rows.flatten(0, 1)[slots]
    assert torch.equal(back[:, LATENT_DIM:], want[:, LATENT_DIM:].bfloat16().float())
    error = (back - want)[:, :LATENT_DIM].abs().unflatten(-1, (4, 128))
    groups = want[:, :LATENT_DIM].abs().unflatten(-1, (4, 128))
    # half a step of e4m3's 3 bits, or of its smallest number, 2^-9, where amax is 448
    assert (
        error <= torch.maximum(groups / 16, groups.amax(-1, keepdim=True).clamp(min=1e-4) / 448 * 2**-10) * 1.01
    ).all()


def test_a_token_takes_656_bytes():
    cache = Fp8Cache.empty(2, "cpu")
    parts = (cache.values, cache.scales, cache.rope)
    assert sum(part.numel() * part.element_size() for part in parts) == 2 * 64 * 656


def test_bfloat16_rows_are_read_as_they_are():
    cache = torch.randn(2, 64, 576).bfloat16()
    check_cache(cache)
    slots = torch.tensor([3, 127, 64])
    assert torch.equal(read_rows(cache, slots), cache.flatten(0, 1)[slots].float())


GOOD = Fp8Cache.empty(2, "cpu")


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(2, 64, 576), "cache's dtype is float32: accepted: bfloat16"),
        (torch.zeros(2, 16, 576).bfloat16(), r"cache's shape is \[2, 16, 576\]: accepted: \[pages, 64, 576\]"),
        (torch.zeros(2, 64, 1152).bfloat16()[..., :576], "cache's strides"),
        (Fp8Cache(GOOD.values.float(), GOOD.scales, GOOD.rope), "cache.values's dtype is float32"),
        (Fp8Cache(GOOD.values, GOOD.scales[..., :3], GOOD.rope), r"cache.scales's shape is \[2, 64, 3\]"),
        (Fp8Cache(GOOD.values, GOOD.scales.mT.contiguous().mT, GOOD.rope), "cache.scales's strides"),
        (Fp8Cache(GOOD.values[:1], GOOD.scales, GOOD.rope), r"cache's pages is \[1, 2, 2\]"),
    ],
)
def test_what_is_refused(cache, message):
    with pytest.raises(OpError, match=message):
        check_cache(cache)
