"""Cases of what stands around MLA decode: k_b and v_b, RoPE with the append to the cache, and weights to FP8.

The peer of k_b and v_b is cuBLAS on bfloat16 weights, heads outermost in every operand, as it likes them; it need not
quantise, and reads twice as many bytes of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.bench.case import OpCase, compiled
from moelab.ops.bmm import bmm
from moelab.ops.fp8 import dequantize_block, num_blocks, quantize_block
from moelab.ops.mla_cache import LATENT_DIM, PAGE_SIZE, ROPE_DIM, ROW_DIM, Fp8Cache
from moelab.ops.quantize_blocks import quantize_blocks
from moelab.ops.rope_append import rope_append

NOPE, LATENT, HEADS = 128, 512, (128, 16)  # whole, and one of eight TP ranks
PROJECTIONS = {"k_b": (LATENT, NOPE), "v_b": (NOPE, LATENT)}  # N, K


def _tokens(quick: bool) -> tuple[int, ...]:
    return (16, 256) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def bmm_cases(quick: bool) -> list[OpCase]:
    heads = HEADS[:1] if quick else HEADS
    return [_bmm(name, tokens, count) for count in heads for name in PROJECTIONS for tokens in _tokens(quick)]


def _bmm(name: str, tokens: int, heads: int) -> OpCase:
    """x and the result as they stand before and after: q_nope in rows of 192, the query of MLA in rows of 576."""
    columns, depth = PROJECTIONS[name]

    def make(device: torch.device) -> dict[str, Tensor]:
        x = torch.randn(tokens, heads, 192 if name == "k_b" else depth, dtype=torch.bfloat16, device=device)
        out = torch.empty(tokens, heads, ROW_DIM if name == "k_b" else columns, dtype=x.dtype, device=device)
        weight, scales = quantize_block(torch.randn(heads, columns, depth, device=device))
        x, out = x[..., :depth], out[..., :columns]
        return {
            "x": x, "weight": weight, "scales": scales, "out": out,
            "x_by_head": x.transpose(0, 1).contiguous(), "out_by_head": out.transpose(0, 1).contiguous(),
            "wide_weight": dequantize_block(weight, scales, torch.bfloat16).mT,
        }  # fmt: skip

    backends = {
        "triton": lambda i: bmm(i["x"], i["weight"], i["scales"], i["out"]),
        "cublas": lambda i: torch.bmm(i["x_by_head"], i["wide_weight"], out=i["out_by_head"]),
    }
    moved = heads * (2 * tokens * (columns + depth) + columns * depth + 4 * num_blocks(columns) * num_blocks(depth))
    flops = 2.0 * tokens * heads * columns * depth
    params = {"projection": name, "tokens": tokens, "heads": heads}
    return OpCase("bmm", params, make, backends, moved, flops, "fp8")


def rope_append_cases(quick: bool) -> list[OpCase]:
    heads, forms = (HEADS[:1], ("bf16",)) if quick else (HEADS, ("bf16", "fp8"))
    return [_rope_append(form, tokens, count) for form in forms for count in heads for tokens in _tokens(quick)]


def _rope_append(form: str, tokens: int, heads: int) -> OpCase:
    """Slots drawn from a cache of 4096 tokens."""
    pages = 64

    def make(device: torch.device) -> tuple:
        q, kv = (torch.randn(tokens, *size, dtype=torch.bfloat16, device=device) for size in ((heads, 192), (ROW_DIM,)))
        angles = torch.rand(tokens, ROPE_DIM // 2, device=device)
        slots = torch.randperm(pages * PAGE_SIZE, device=device)[:tokens]
        if form == "fp8":
            cache = Fp8Cache.empty(pages, device)
        else:
            cache = torch.empty(pages, PAGE_SIZE, ROW_DIM, dtype=torch.bfloat16, device=device)
        query = torch.empty(tokens, heads, ROW_DIM, dtype=torch.bfloat16, device=device)
        latent, k_pe = kv.split([LATENT_DIM, ROPE_DIM], dim=-1)
        return q[..., NOPE:], latent, k_pe, angles.cos(), angles.sin(), slots, cache, query[..., LATENT_DIM:]

    params = {"tokens": tokens, "heads": heads, "cache": form}
    row = 656 if form == "fp8" else 2 * ROW_DIM
    moved = tokens * (2 * 2 * heads * ROPE_DIM + 2 * ROW_DIM + row + 4 * ROPE_DIM + 8)
    return OpCase("rope_append", params, make, {"triton": lambda i: rope_append(*i)}, moved)


def quantize_weight_cases(quick: bool) -> list[OpCase]:
    """Projections of DeepSeek-V3 [N, K]."""
    shapes = [(7168, 16384)] if quick else [(7168, 16384), (24576, 1536), (4096, 7168), (2112, 7168), (7168, 2048)]
    return [_quantize_weight(*shape) for shape in shapes]


def _quantize_weight(rows: int, columns: int) -> OpCase:
    def make(device: torch.device) -> tuple:
        weight = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
        scales = torch.empty(num_blocks(rows), num_blocks(columns), device=device)
        return weight, (torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device), scales)

    backends = {
        "triton": lambda i: quantize_blocks(*i),
        "torch.compile": compiled(quantize_block, lambda i: i[:1]),
    }
    moved = 3 * rows * columns + 4 * num_blocks(rows) * num_blocks(columns)
    return OpCase("quantize_weight", {"n": rows, "k": columns}, make, backends, moved)
