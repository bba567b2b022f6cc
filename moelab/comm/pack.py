"""Routing as index arithmetic, in plain torch: who gets which token, and in which order.

Everything is one ordering. A distinct (expert, token) pair is a *row*: it crosses the wire once, is computed once,
comes back once. The rows of a DP group sorted by (expert, token) are

- at the sender, grouped by destination rank, since a rank's experts are consecutive;
- on the expert side, after one sort of all arrivals by (expert, DP group, token), the order of the expert's rows;
- on the way back again sorted by (expert, token), so that the results of rank 0, 1, … simply follow one another and a
  token finds its k-th result by a number known since dispatch.

The same holds for whatever number of ranks the experts are spread over, which is why the sum is the same bit for bit.
An expert named twice by one token is one row with both weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.comm.spec import ExchangeSpec


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one DP group go, as one of its ranks sees it. n tokens; R rows, sorted by (expert, token)."""

    row_of: Tensor  # [n, K] int64: the row that holds the k-th result of a token, -1 where there is none
    rows_per_rank: Tensor  # [ep] int64: of the R rows, how many each rank computes
    my_token: Tensor  # [r] int64: token of each row that this rank sends, of the group's R rows
    my_counts: Tensor  # [ep, L] int64: how many of these go to each rank and local expert


def route(topk_ids: Tensor, spec: ExchangeSpec, rank: int) -> Routing:
    """Of topk_ids [n, K], any integer dtype; rank i of a TP group sends the tokens i, i + tp, …"""
    n, device = topk_ids.shape[0], topk_ids.device
    ids = topk_ids.long()
    keys = ids * max(n, 1) + torch.arange(n, device=device)[:, None]
    going = ids >= 0
    row_of = torch.full_like(ids, -1)
    rows, row_of[going] = torch.unique(keys[going], return_inverse=True)  # sorted
    expert, token = rows // max(n, 1), rows % max(n, 1)
    mine = token % spec.parallel.tp == spec.parallel.tp_rank(rank)
    return Routing(
        row_of=row_of,
        rows_per_rank=torch.bincount(expert // spec.local_experts, minlength=spec.parallel.ep),
        my_token=token[mine],
        my_counts=torch.bincount(expert[mine], minlength=spec.num_experts).view(spec.parallel.ep, -1),
    )


def as_bytes(x: Tensor) -> Tensor:
    """[n, m > 1] of any dtype -> [n, m·itemsize] uint8; of a contiguous tensor a view."""
    return x.contiguous().view(torch.uint8)


def pack_rows(x: Tensor, scales: Tensor | None, tokens: Tensor) -> Tensor:
    """One message: token indices, scales and values of the rows, section after section (each keeps its alignment).

    x [n, H], scales [n, S] float32 or None, tokens [r] int64 -> uint8 [r·wire_row_bytes].
    """
    sections = [tokens.to(torch.int32).view(torch.uint8)]
    if scales is not None:
        sections.append(scales[tokens].flatten().view(torch.uint8))
    sections.append(as_bytes(x)[tokens].flatten())
    return torch.cat(sections)


def unpack_rows(message: Tensor, spec: ExchangeSpec) -> tuple[Tensor, Tensor | None, Tensor]:
    """Views of a message: tokens [r] int32, scales [r, S] float32 or None, values [r, row_bytes] uint8."""
    r = message.numel() // spec.wire_row_bytes
    tokens, scales, values = message.split([4 * r, 4 * r * spec.num_scales, r * spec.row_bytes])
    return (
        tokens.view(torch.int32),
        scales.view(torch.float32).view(r, spec.num_scales) if spec.num_scales else None,
        values.view(r, spec.row_bytes),
    )


@dataclass(frozen=True)
class Placement:
    """Where the arrived rows stand on the expert side."""

    where: Tensor  # [A] int64: flat row for each arrival, in order of source rank, then (expert, token)
    by_group: list[Tensor]  # for each DP group: flat rows of its arrivals, sorted by (expert, token)


def place(tokens: Tensor, counts: Tensor, starts: Tensor, spec: ExchangeSpec) -> Placement:
    """Order arrivals by (expert, DP group, token).

    tokens [A] of all arrivals by source rank, then (expert, token); counts [ep, L] int64 rows from each source for
    each local expert; starts [L] int64 flat first row of each expert.
    """
    ep, local = counts.shape
    device = counts.device
    source = torch.arange(ep, device=device).repeat_interleave(counts.sum(1))
    group = source // spec.parallel.tp
    expert = torch.arange(local, device=device).repeat(ep).repeat_interleave(counts.flatten())
    order = torch.argsort((expert * spec.parallel.dp + group) * spec.max_tokens + tokens)
    per_expert = counts.sum(0)
    first_arrival = torch.cumsum(per_expert, 0) - per_expert
    expert, group = expert[order], group[order]
    sorted_where = starts[expert] + torch.arange(len(order), device=device) - first_arrival[expert]
    where = torch.empty_like(sorted_where)
    where[order] = sorted_where
    return Placement(where, [sorted_where[group == g] for g in range(spec.parallel.dp)])
