"""RoPE and the rows of the latent cache: kernel against reference bit for bit, reference against its parts."""

from __future__ import annotations

import pytest
import torch

from moelab.config import preset
from moelab.ops.checks import OpError
from moelab.ops.mla_cache import Fp8Cache, read_rows
from moelab.ops.quantize import quantize_reference
from moelab.ops.rope import apply_rope, cos_sin
from moelab.ops.rope_append import rope_append, rope_append_reference
from tests.ops.conftest import INTERPRETING
from tests.ops.fp8_checks import assert_same_rows

PAGES = 4


def poisoned(*shape):
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def poisoned_cache(form, pages=PAGES):
    rows = poisoned(pages, 64, 576)
    return rows if form == "bfloat16" else Fp8Cache.from_rows(rows)


def moved(cache, device):
    if isinstance(cache, Fp8Cache):
        return Fp8Cache(cache.values.to(device), cache.scales.to(device), cache.rope.to(device))
    return cache.to(device)


def draw(num_tokens, heads, padding=(), dtype=torch.int64, pages=PAGES):
    """Arguments of rope_append up to the slots, each a slice of something wider, as the projections leave them."""
    q = torch.randn(num_tokens, heads, 192).bfloat16()
    kv_a = (torch.randn(num_tokens, 576) * torch.logspace(-3, 3, 576)).bfloat16()
    latent = (torch.randn(num_tokens, 512) * torch.logspace(-3, 3, max(num_tokens, 1))[:num_tokens, None]).bfloat16()
    turns = cos_sin(preset("deepseek-v3"), torch.randint(100_000, (num_tokens,)))
    slots = torch.randperm(pages * 64)[:num_tokens].to(dtype)
    slots[list(padding)] = -1
    return [q[..., 128:], latent, kv_a[:, 512:], *turns, slots]


def assert_same(got, want):
    """bfloat16, bit for bit but for the sign of NaN; the interpreter cuts off where it should round."""
    got, want = got.cpu(), want.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    if INTERPRETING:
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0, equal_nan=True)
    else:
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def assert_same_cache(got, want):
    if isinstance(want, Fp8Cache):
        assert_same_rows((got.values, got.scales), (want.values, want.scales))
        assert_same(got.rope, want.rope)
    else:
        assert_same(got, want)


@pytest.mark.parametrize("form", ["bfloat16", "fp8"])
def test_the_reference_is_its_parts(form):
    inputs = draw(9, 3, padding=(0, 4))
    q_pe, latent, k_pe, cos, sin, slots = inputs
    cache = poisoned_cache(form)
    out = rope_append(*inputs, cache, poisoned(9, 3, 64))  # without a GPU this is the reference
    real = slots >= 0
    assert torch.equal(out[real], apply_rope(q_pe, cos, sin)[real]) and out[~real].isnan().all()
    back = read_rows(cache, slots[real])
    assert torch.equal(back[:, 512:], apply_rope(k_pe, cos, sin)[real].float())
    if form == "bfloat16":
        assert torch.equal(back[:, :512], latent[real].float())
    else:
        values, scales = quantize_reference(latent[real])
        assert torch.equal(back[:, :512], values.float() * scales.repeat_interleave(128, -1))
    others = torch.ones(PAGES * 64, dtype=torch.bool)
    others[slots[real]] = False
    assert read_rows(cache, others.nonzero()[:, 0]).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["bfloat16", "fp8"])
@pytest.mark.parametrize(("num_tokens", "heads"), [(1, 1), (7, 4), (5, 40), (3, 128)])
def test_kernel(device, num_tokens, heads, form, dtype):
    """Rows of the cache that no token takes keep their poison, and so do the queries of padding."""
    inputs = draw(num_tokens, heads, padding=range(1, num_tokens, 3), dtype=dtype)
    cache, want = moved(poisoned_cache(form), device), poisoned_cache(form)
    out, expected = poisoned(num_tokens, heads, 64).to(device), poisoned(num_tokens, heads, 64)
    assert rope_append(*(t.to(device) for t in inputs), cache, out) is out
    assert_same(out, rope_append_reference(*inputs, want, expected))
    assert_same_cache(cache, want)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bfloat16", "fp8"])
@pytest.mark.parametrize(("num_tokens", "heads"), [(256, 128), (1000, 16), (64, 17)])
def test_many_tokens_exactly(gpu, num_tokens, heads, form):
    inputs = draw(num_tokens, heads, padding=range(5, num_tokens, 11), pages=40)
    cache, want = moved(poisoned_cache(form, 40), gpu), poisoned_cache(form, 40)
    out, expected = poisoned(num_tokens, heads, 64).to(gpu), poisoned(num_tokens, heads, 64)
    rope_append(*(t.to(gpu) for t in inputs), cache, out)
    assert_same(out, rope_append_reference(*inputs, want, expected))
    assert_same_cache(cache, want)


@pytest.mark.gpu
def test_a_cache_beyond_32_bits(gpu):
    inputs = draw(3, 2)
    pages = 2**31 // (64 * 576) + 100
    cache = torch.zeros(pages, 64, 576, dtype=torch.bfloat16, device=gpu)
    inputs[-1] = torch.tensor([pages * 64 - 1, 17, pages * 64 - 65])
    rope_append(*(t.to(gpu) for t in inputs), cache)
    assert torch.equal(cache.flatten(0, 1)[inputs[-1].to(gpu), :512].cpu(), inputs[1])
    assert (cache.flatten(0, 1) != 0).any(1).sum() == 3


@pytest.mark.parametrize("form", ["bfloat16", "fp8"])
def test_nan_in_padding_stays_there(device, form):
    inputs = draw(6, 2, padding=(2, 3))
    clean, spoilt = moved(poisoned_cache(form), device), moved(poisoned_cache(form), device)
    out = rope_append(*(t.to(device) for t in inputs), clean)
    for tensor in inputs[:5]:
        tensor[2:4] = float("nan")
    again = rope_append(*(t.to(device) for t in inputs), spoilt)
    assert_same_cache(spoilt, clean)
    real = inputs[-1] >= 0
    assert torch.equal(out[real.to(device)], again[real.to(device)]) and not again.cpu()[real].isnan().any()


def test_in_place_or_beside_the_absorbed_query(device):
    inputs = draw(5, 3)
    want = rope_append_reference(*inputs, poisoned_cache("bfloat16"), torch.empty(5, 3, 64).bfloat16())
    on_device = [t.to(device) for t in inputs]
    query = poisoned(5, 3, 576).to(device)
    rope_append(*on_device, moved(poisoned_cache("bfloat16"), device), query[..., 512:])
    assert_same(query[..., 512:], want)
    assert query[..., :512].isnan().all()
    q_pe = on_device[0]
    assert rope_append(*on_device, moved(poisoned_cache("bfloat16"), device), q_pe) is q_pe
    assert_same(q_pe, want)


def test_no_tokens(device):
    inputs = [t.to(device) for t in draw(0, 4)]
    cache = poisoned_cache("bfloat16").to(device)
    assert rope_append(*inputs, cache).shape == (0, 4, 64) and cache.isnan().all()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(4, 2, 64), "q_pe's dtype is float32: accepted: bfloat16"),
        (0, torch.zeros(4, 2, 32).bfloat16(), r"q_pe's shape is \[4, 2, 32\]: accepted: \[T, heads, 64\]"),
        (0, torch.zeros(4, 64, 2).bfloat16().mT, "q_pe's strides is .*last stride of 1"),
        (1, torch.zeros(4, 576).bfloat16(), r"latent's shape is \[4, 576\]: accepted: \[4, 512\]"),
        (2, torch.zeros(5, 64).bfloat16(), r"k_pe's shape is \[5, 64\]: accepted: \[4, 64\]"),
        (3, torch.zeros(4, 32).bfloat16(), "cos's dtype is bfloat16: accepted: float32"),
        (4, torch.zeros(4, 64), r"sin's shape is \[4, 64\]: accepted: \[4, 32\]"),
        (5, torch.zeros(4), "slots's dtype is float32: accepted: int32 or int64"),
        (5, torch.zeros(4, dtype=torch.int64, device="meta"), "slots's device is meta: accepted: cpu"),
        (6, torch.zeros(2, 64, 576), "cache's dtype is float32: accepted: bfloat16"),
        (6, torch.zeros(2, 32, 576).bfloat16(), r"cache's shape is \[2, 32, 576\]: accepted: \[pages, 64, 576\]"),
        (7, torch.zeros(4, 2, 576).bfloat16(), r"out's shape is \[4, 2, 576\]: accepted: \[4, 2, 64\]"),
    ],
)
def test_what_is_refused(place, value, message):
    arguments = [*draw(4, 2), poisoned_cache("bfloat16"), None]
    arguments[place] = value
    with pytest.raises(OpError, match=message):
        rope_append(*arguments)
