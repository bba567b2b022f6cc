"""Attention over one sequence, and the merge of partial results.

softmax attention over a set of keys is a weighted mean; over two sets it is the mean of their means, weighted by
exp(lse). So context and new tokens, or any chunks of a context, may be attended to apart and merged (arXiv 2205.14135).
An empty set has lse = −inf and weight 0. The lse here is a natural logarithm, always: libraries that return base 2
must be converted first.
"""

from __future__ import annotations

import torch

MOST_SCORES = 1 << 27  # held at once, in float32: half a GB, and as much again for what is made of them


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Q, heads, D]; k [L, heads or 1, D]; v [L, heads or 1, V] -> (out [Q, heads, V], lse float32 [Q, heads]).

    With `causal` the queries are the last Q of the L positions: query i sees keys 0 … L − Q + i. Computed in float32;
    out has q's dtype. L = 0 gives zeros and lse −inf. Many queries are taken in turns, each of MOST_SCORES at most.
    """
    num_q, num_kv = q.shape[0], k.shape[0]
    if num_q > 1 and num_q * q.shape[1] * num_kv > MOST_SCORES:
        first = num_q // 2
        seen = num_kv - (num_q - first) if causal else num_kv  # the last query of the first half sees no more
        halves = (attend(q[:first], k[:seen], v[:seen], scale, causal), attend(q[first:], k, v, scale, causal))
        out, lse = (torch.cat(parts) for parts in zip(*halves, strict=True))
        return out, lse
    if num_kv == 0:
        return q.new_zeros(num_q, q.shape[1], v.shape[-1]), torch.full(q.shape[:2], float("-inf"), device=q.device)
    scores = torch.einsum("qhd,lhd->qhl", q.float(), k.float().expand(-1, q.shape[1], -1)) * scale
    if causal:
        last = torch.arange(num_q, device=q.device)[:, None] + (num_kv - num_q)
        hidden = torch.arange(num_kv, device=q.device)[None, :] > last
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("qhl,lhv->qhv", weights, v.float().expand(-1, q.shape[1], -1))
    return out.to(q.dtype), lse


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join results of `attend` over disjoint key sets. [(out [Q, heads, V], lse [Q, heads])] -> the same pair."""
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    out = torch.zeros(parts[0][0].shape, device=total.device)
    for part, lse in parts:
        weight = torch.where(lse == float("-inf"), torch.zeros_like(lse), (lse - total).exp())
        out += weight[..., None] * torch.where(weight[..., None] > 0, part.float(), 0.0)
    return out.to(parts[0][0].dtype), total
