"""Which experts a token goes to, and with what weight.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): s = sigmoid(logits); experts are *chosen* by s + bias, group by group (a
group scores the sum of its two best, the best `topk_group` groups stay), but *weighted* by s alone, normalised over
the chosen and multiplied by the routed scaling factor. The bias balances load and must never reach the output.

Dropped groups are masked with −inf: a zero would beat any expert whose biased score is negative. All in float32.
Mixtral's router is the case of softmax scores, one group and no bias. On ties the lower id wins.
"""

from __future__ import annotations

import torch


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [T, E], bias float32 [E] or None -> (ids int64 [T, K], weights float32 [T, K]).

    Ids of a token come in falling order of their biased score. Weights already hold `scale`.
    """
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
    biased = scores if bias is None else scores + bias.float()
    ids = _top(_keep_groups(biased, n_group, topk_group), top_k)
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def _keep_groups(biased: torch.Tensor, n_group: int, topk_group: int) -> torch.Tensor:
    if topk_group == n_group:
        return biased
    grouped = biased.unflatten(-1, (n_group, biased.shape[-1] // n_group))
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, _top(group_scores, topk_group), True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


def _top(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest, the lower index first among equals (torch.topk leaves that open)."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
