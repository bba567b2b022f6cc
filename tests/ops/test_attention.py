"""Partial attention and its merge: empty chunks, strides, the base of the logarithm."""

from __future__ import annotations

import pytest
import torch

from moelab.ops import attention
from moelab.ops.attention import attend, merge


def qkv(num_q, num_kv, heads=4, dim=24, width=16):
    return torch.randn(num_q, heads, dim), torch.randn(num_kv, heads, dim), torch.randn(num_kv, heads, width)


def reference(q, k, v, scale):
    """Float64 softmax attention, the queries being the last positions."""
    scores = torch.einsum("qhd,lhd->hql", q.double(), k.double()) * scale
    visible = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
    return torch.einsum("hql,lhv->qhv", scores.masked_fill(~visible, float("-inf")).softmax(-1), v.double())


def test_causal_attention_equals_float64():
    q, k, v = qkv(7, 30)
    torch.testing.assert_close(
        attend(q, k, v, 0.2, causal=True)[0].double(), reference(q, k, v, 0.2), rtol=0, atol=1e-5
    )


def test_merged_chunks_equal_the_whole_with_empty_chunks_among_them():
    q, k, v = qkv(5, 40)
    for cuts in ([0, 35], [0, 0, 17, 17, 35], [35, 35]):
        parts, start = [], 0
        for stop in cuts:
            parts.append(attend(q, k[start:stop], v[start:stop], 0.2, causal=False))
            start = stop
        parts.append(attend(q, k[start:], v[start:], 0.2, causal=True))
        torch.testing.assert_close(merge(parts)[0].double(), reference(q, k, v, 0.2), rtol=0, atol=1e-5)


def test_an_empty_chunk_has_lse_minus_infinity_and_no_weight_even_if_it_holds_nan():
    q, k, v = qkv(3, 9)
    out, lse = attend(q, k[:0], v[:0], 1.0, causal=False)
    assert torch.equal(lse, torch.full((3, 4), float("-inf"))) and not out.any()
    whole = attend(q, k, v, 1.0, causal=True)
    merged, total = merge([(torch.full_like(out, float("nan")), lse), whole])
    assert torch.equal(merged, whole[0]) and torch.equal(total, whole[1])
    nothing, none = merge([(out, lse), (out, lse)])
    assert not nothing.any() and torch.equal(none, lse)


def test_the_lse_is_a_natural_logarithm():
    q, k, v = qkv(1, 6)
    _, lse = attend(q, k, v, 0.5, causal=True)
    scores = torch.einsum("hd,lhd->hl", q[0], k) * 0.5
    torch.testing.assert_close(lse[0], scores.exp().sum(-1).log())
    assert not torch.allclose(lse[0], scores.exp().sum(-1).log2())


def test_parts_of_different_strides_merge_alike():
    q, k, v = qkv(4, 20)
    a, b = attend(q, k[:16], v[:16], 0.3, causal=False), attend(q, k[16:], v[16:], 0.3, causal=True)
    padded = torch.full((*b[0].shape[:2], b[0].shape[2] + 8), float("nan"))
    padded[..., : b[0].shape[2]] = b[0]
    strided = (padded[..., : b[0].shape[2]], b[1].T.contiguous().T)
    assert strided[0].stride() != a[0].stride()
    assert torch.equal(merge([a, strided])[0], merge([a, b])[0])


def test_one_shared_key_head_serves_all_query_heads():
    q, k, v = qkv(4, 11)
    k, v = k[:, :1], v[:, :1]
    expected = attend(q, k.expand(-1, 4, -1).clone(), v.expand(-1, 4, -1).clone(), 0.2, causal=True)
    assert torch.equal(attend(q, k, v, 0.2, causal=True)[0], expected[0])


@pytest.mark.parametrize("causal", [True, False])
def test_queries_taken_in_turns_see_what_they_saw_together(monkeypatch, causal):
    q, k, v = torch.randn(37, 3, 20), torch.randn(50, 3, 20), torch.randn(50, 3, 12)
    out, lse = attend(q, k, v, 0.2, causal)
    monkeypatch.setattr(attention, "MOST_SCORES", 3 * 50 * 4)
    turns, turns_lse = attend(q, k, v, 0.2, causal)
    torch.testing.assert_close(turns, out, rtol=0, atol=1e-6)
    torch.testing.assert_close(turns_lse, lse, rtol=0, atol=1e-5)
