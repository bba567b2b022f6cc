"""Bits per byte under a round trip, held to transformers and to what zeroed operands must leave."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from moelab.bench import quality, schemes
from moelab.bench.quality import Variant, score
from moelab.config import MoelabError
from moelab.model import arithmetic
from moelab.results import Provenance

SCORED = 9
HERE = Provenance("cpu", 0, "", {"torch": "0"}, "0" * 40, False)


@pytest.fixture
def windows():
    return torch.randint(256, (3, 21)).tolist()


@pytest.fixture
def scheme(monkeypatch):
    """scheme(function) puts it into SCHEMES as "given"."""
    return lambda function: monkeypatch.setitem(schemes.SCHEMES, "given", function)


def bits(logits, windows) -> torch.Tensor:
    nats = cross_entropy(
        logits[:, -SCORED - 1 : -1].flatten(0, 1), torch.tensor(windows)[:, -SCORED:].flatten(), reduction="none"
    )
    return nats.double().view(len(windows), SCORED) / math.log(2)


@torch.no_grad()
def test_untouched_it_is_transformers(oracle, tiny_checkpoint, windows):
    expected = bits(oracle(torch.tensor(windows)).logits, windows)
    found = score(tiny_checkpoint, windows, Variant("as it is"), SCORED)
    torch.testing.assert_close(found.bits, expected, rtol=1e-4, atol=1e-4)


def test_steps_do_not_show(tiny_checkpoint, windows, monkeypatch):
    whole = score(tiny_checkpoint, windows, Variant("rows", "per row", "per row"), SCORED)
    monkeypatch.setattr(quality, "STEP", 2)
    torch.testing.assert_close(
        score(tiny_checkpoint, windows, whole.variant, SCORED).bits, whole.bits, rtol=0, atol=1e-4
    )


def test_what_changes_nothing_changes_nothing(tiny_checkpoint, windows, scheme):
    scheme(lambda x: x.clone())
    plain = score(tiny_checkpoint, windows, Variant("as it is"), SCORED)
    assert score(tiny_checkpoint, windows, Variant("all", "given", "given", "given"), SCORED).bits.equal(plain.bits)
    assert score(tiny_checkpoint, windows, Variant("as it is"), SCORED).against(plain) == (0.0, 0.0)


@pytest.mark.parametrize("part", ["weights", "activations"])
@torch.no_grad()
def test_every_multiplication_is_reached(oracle, tiny_checkpoint, windows, scheme, part):
    """With every input or every weight zeroed the layers add nothing: what is left is the embedding."""
    scheme(torch.zeros_like)
    found = score(tiny_checkpoint, windows, Variant("zeros", **{part: "given"}), SCORED)
    bare = oracle.lm_head(oracle.model.norm(oracle.model.embed_tokens(torch.tensor(windows))))
    torch.testing.assert_close(found.bits, bits(bare, windows), rtol=1e-4, atol=1e-4)


def test_each_operand_goes_through_once_and_whole(tiny_checkpoint, windows, scheme):
    seen: list[tuple[int, ...]] = []
    scheme(lambda x: (seen.append(tuple(x.shape)), x)[1])
    score(tiny_checkpoint, windows, Variant("activations", activations="given"), SCORED)
    tokens, k, heads = 3 * 21, 4, 4
    attention = [(tokens, 128), (tokens, 48), (tokens * heads, 16), (tokens * heads, 32), (tokens, heads * 16)]
    dense = [*attention, (tokens, 128), (tokens, 256)]
    # What the experts get, the shared expert's activation, and the populated rows of the routed ones: no padding.
    moe = [*attention, (tokens, 128), (tokens, 64), (tokens * k, 64)]
    assert sorted(seen) == sorted(dense + 3 * moe)


def test_the_router_sees_unquantised_tokens(tiny_checkpoint, windows, scheme, monkeypatch):
    scheme(lambda x: torch.full_like(x, 7.0))
    seen = []
    monkeypatch.setattr(arithmetic, "linear", lambda x, w: (seen.append(x) if w.shape[0] == 16 else None, x @ w.T)[1])
    score(tiny_checkpoint, windows, Variant("sevens", activations="given"), SCORED)
    assert len(seen) == 3 and not any(x.eq(7.0).all() for x in seen)


def test_the_latent_alone(tiny_checkpoint, windows, scheme):
    scheme(lambda x: x * 0)
    plain = score(tiny_checkpoint, windows, Variant("as it is"), SCORED)
    assert not score(tiny_checkpoint, windows, Variant("latent", latent="given"), SCORED).bits.equal(plain.bits)


def test_matrices_are_quantised_each_by_itself(tiny_checkpoint, windows, scheme):
    """gate and up are matrices of their own, experts and heads too."""
    seen = []
    scheme(lambda x: (seen.append(tuple(x.shape)), x)[1])
    score(tiny_checkpoint, windows, Variant("weights", weights="given"), SCORED)
    attention = [(48, 128), (4 * 24, 48), (40, 128), (4, 16, 32), (4, 16, 32), (128, 64)]
    moe = [(16, 2, 64, 128), (16, 128, 64), (2, 64, 128), (128, 64)]
    assert sorted(seen, key=str) == sorted(4 * attention + 3 * moe + [(2, 256, 128), (128, 256)], key=str)


def test_capture(tiny_checkpoint, windows):
    found = quality.capture(tiny_checkpoint, windows)
    assert found["layer 0: dense down"].shape == (63, 256)
    assert found["layer 3: experts down"].shape == (63 * 4, 64)
    assert found["layer 2: v_b"].shape == (63 * 4, 32)
    assert len(found) == 7 + 3 * 7 and all(x.isfinite().all() for x in found.values())


def test_the_difference_is_paired():
    base = quality.Scored(Variant("a"), torch.rand(8, 5, dtype=torch.float64) * 9, 21)
    other = quality.Scored(Variant("b"), base.bits + torch.linspace(0.1, 0.2, 8)[:, None], 21)
    mean, error = other.against(base)
    assert mean == pytest.approx(0.15) and error == pytest.approx(torch.linspace(0.1, 0.2, 8).std().item() / 8**0.5)
    records = other.records(base, HERE, "toy")
    assert [r.metric for r in records] == list(quality.METRICS) and records[1].p50 == pytest.approx(0.15)
    assert records[0].params["scored_bytes"] == 40 and records[0].params["weights"] is None
    assert records[0].params["window_tokens"] == 21


def test_bad_windows(tiny_checkpoint):
    with pytest.raises(MoelabError, match=r"windows of \[2, 3\] tokens"):
        score(tiny_checkpoint, [[1, 2, 3], [1, 2]], Variant("a"), 1)
    with pytest.raises(MoelabError, match="legal are 1…2"):
        score(tiny_checkpoint, [[1, 2, 3]], Variant("a"), 3)
    with pytest.raises(MoelabError, match="texts differ"):
        quality.Scored(Variant("a"), torch.ones(2, 3), 9).against(quality.Scored(Variant("b"), torch.ones(2, 4), 9))
