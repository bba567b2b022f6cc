"""Cases of routing, with DeepSeek-V3's sizes: router, gather by expert, weighted reduce.

Router and gather move so little that their shares of the copy bandwidth say nothing; their times are to be read against
the gap between one kernel and the next, some of which they hide by early launch, as FlashInfer's router does. A router
case with gather 1 is both, two launches in a row.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from moelab.bench.case import OpCase, compiled
from moelab.ops.gather import gather_by_expert, gather_by_expert_reference
from moelab.ops.reduce import reduce_topk, reduce_topk_reference
from moelab.ops.router import route, route_fused

HIDDEN, EXPERTS, GROUPS, TOP_GROUPS, TOP_K, SCALE = 7168, 256, 8, 4, 8, 2.5
ROUTER = dict(top_k=TOP_K, n_group=GROUPS, topk_group=TOP_GROUPS, scale=SCALE)


def _tokens(quick: bool) -> tuple[int, ...]:
    return (1, 256) if quick else (1, 8, 32, 64, 128, 256, 1024, 4096)


def router_cases(quick: bool) -> list[OpCase]:
    return [_router(tokens, gathers) for gathers in (False, True) for tokens in _tokens(quick)]


def _router(tokens: int, gathers: bool) -> OpCase:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        logits, bias = torch.randn(tokens, EXPERTS, device=device), torch.rand(EXPERTS, device=device)
        weights = torch.empty(tokens, TOP_K, device=device)
        return logits, bias, weights, torch.empty(tokens, TOP_K, dtype=torch.int32, device=device)

    def run(inputs: tuple[Tensor, ...]) -> object:
        ids, weights = route_fused(*inputs[:2], ids_dtype=torch.int32, **ROUTER)
        return (ids, weights, gather_by_expert(ids, EXPERTS)) if gathers else (ids, weights)

    def plain(logits: Tensor, bias: Tensor) -> object:
        ids, weights = route(logits, bias, **ROUTER)
        return (ids, weights, gather_by_expert_reference(ids, EXPERTS)) if gathers else (ids, weights)

    def flashinfer(inputs: tuple[Tensor, ...]) -> None:
        from flashinfer.fused_moe import fused_topk_deepseek

        logits, bias, weights, ids = inputs
        fused_topk_deepseek(logits, bias, GROUPS, TOP_GROUPS, TOP_K, SCALE, weights, ids)

    backends = {"triton": run, "torch.compile": compiled(plain, lambda i: i[:2])}
    if not gathers and importlib.util.find_spec("flashinfer"):
        backends["flashinfer"] = flashinfer
    params = {"tokens": tokens, "experts": EXPERTS, "groups": GROUPS, "top_k": TOP_K, "gather": int(gathers)}
    moved = 4 * EXPERTS * (tokens + 1) + 8 * TOP_K * tokens + (_gathered_bytes(tokens) if gathers else 0)
    return OpCase("router", params, make, backends, moved)


def gather_cases(quick: bool) -> list[OpCase]:
    return [_gather(tokens) for tokens in _tokens(quick)]


def _gather(tokens: int) -> OpCase:
    backends = {
        "triton": lambda ids: gather_by_expert(ids, EXPERTS),
        "torch.compile": compiled(gather_by_expert_reference, lambda ids: (ids, EXPERTS)),
    }
    params = {"tokens": tokens, "experts": EXPERTS, "top_k": TOP_K}
    moved = 4 * TOP_K * tokens + _gathered_bytes(tokens)
    return OpCase("gather", params, lambda device: _draw_ids(tokens, device), backends, moved)


def reduce_cases(quick: bool) -> list[OpCase]:
    return [_reduce(tokens) for tokens in _tokens(quick)]


def _reduce(tokens: int) -> OpCase:
    """Every choice is a row of its own, in the order of the experts."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        rows = tokens * TOP_K
        y = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        slots = gather_by_expert_reference(_draw_ids(tokens, device), EXPERTS).permutation
        row_of = slots.argsort().to(torch.int32).view(tokens, TOP_K)
        return y, row_of, torch.rand(tokens, TOP_K, device=device)

    backends = {
        "triton": lambda inputs: reduce_topk(*inputs),
        "torch.compile": compiled(reduce_topk_reference, lambda inputs: inputs),
    }
    moved = tokens * ((TOP_K + 1) * HIDDEN * 2 + TOP_K * 8)
    return OpCase("reduce", {"tokens": tokens, "h": HIDDEN, "top_k": TOP_K}, make, backends, moved)


def _draw_ids(tokens: int, device: torch.device) -> Tensor:
    return torch.rand(tokens, EXPERTS, device=device).topk(TOP_K).indices.to(torch.int32)


def _gathered_bytes(tokens: int) -> int:
    """Permutation, counts and offsets."""
    return 4 * (TOP_K * tokens + EXPERTS + EXPERTS + 1)
