"""Cases of the block-FP8 linear op, and the points of its measured table.

Shapes are DeepSeek-V3's projections, K → N, whole and as tensor parallelism of 2, 4 and 8 cuts them:

    qkv_a 7168 → 2112 (its parts 1536 and 576)      q_b 1536 → 24576      o_proj 16384 → 7168
    shared expert 7168 → 4096 and 2048 → 7168       dense FFN 7168 → 36864 and 18432 → 7168

Beside the choice (`moelab`) stand the backends it chooses from, with the best config the table has for each; cuBLAS
with one scale per tensor, which is less work; and for qkv_a the two launches that merging saves. Scales are in the
format that DeepGEMM likes.

The table has fewer m than the cases: an m that it lacks takes the next larger, and up to 32 tokens our kernels' times
differ by little.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from moelab.bench.case import OpCase
from moelab.bench.point import Candidate, Point
from moelab.ops import block_gemm, block_gemm_hopper, deep_gemm
from moelab.ops.block_gemm import Config
from moelab.ops.fp8 import BLOCK, num_blocks
from moelab.ops.layout import empty_scales
from moelab.ops.linear import linear

TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 1024, 4096)
TABLE_TOKENS = (4, 16, 32, 48, 64, 96, 128, 192, 256, 1024, 4096)
MANY = 64  # tokens from which plain Triton is neither a candidate nor worth the time
QKV_A, Q_A = (2112, 7168), 1536
SHAPES = (
    QKV_A, (1536, 7168), (576, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (36864, 7168),
    (7168, 18432), (12288, 1536), (6144, 1536), (3072, 1536), (7168, 8192), (7168, 4096),
)  # fmt: skip
QUICK = ((1, 16, 64, 128, 256), (QKV_A, (24576, 1536), (4096, 7168), (7168, 2048)))

Inputs = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor, Tensor]  # x, weight, out, one


def linear_cases(quick: bool) -> list[OpCase]:
    tokens, shapes = QUICK if quick else (TOKENS, SHAPES)
    return [_case(m, n, k) for n, k in shapes for m in tokens]


def linear_points() -> list[Point]:
    return [_point(m, n, k) for n, k in SHAPES for m in TABLE_TOKENS]


def _case(m: int, n: int, k: int) -> OpCase:
    backends = {"moelab": _backend(None)}
    if block_gemm_hopper.runs_on(torch.device("cuda", 0)):
        backends["hopper"] = _backend("hopper")
    if m <= MANY:
        backends["triton"] = _backend("triton")
    if deep_gemm.reason() is None:
        backends["deep_gemm"] = _backend("deep_gemm")
    backends["cublas per tensor"] = _cublas
    if (n, k) == QKV_A:
        backends["two launches"] = _two_launches
    return OpCase(
        "linear", {"m": m, "n": n, "k": k}, lambda device: _inputs(m, n, k, device), backends,
        bytes=_bytes(m, n, k), flops=2.0 * m * n * k, compute="fp8",
    )  # fmt: skip


def _point(m: int, n: int, k: int) -> Point:
    candidates = []
    if m <= MANY:
        candidates += [_candidate("triton", block_gemm, c, _plain(k, c)) for c in block_gemm.sweep(m, n, k)]
    gpu = torch.device("cuda", 0)
    if block_gemm_hopper.runs_on(gpu):
        for c in block_gemm_hopper.sweep(m, n, k):
            share = block_gemm_hopper.share(m, n, c.split, c.block_n, c.block_m, gpu)
            candidates.append(_candidate("hopper", block_gemm_hopper, c, f"share {share}"))
    if deep_gemm.reason() is None:
        candidates.append(Candidate("deep_gemm", "", f"deep_gemm {n} {k} {m}", _backend("deep_gemm")))
    return Point(0, n, k, m, candidates, lambda device: _inputs(m, n, k, device), _bytes(m, n, k))


def _candidate(name: str, module: ModuleType, config: Config, more: str) -> Candidate:
    """`more`: on what else it depends what is compiled; of the split only whether there is one."""
    kernel = f"{name} {config._replace(split=min(config.split, 2), ahead=min(config.ahead, 1))} {more}"
    return Candidate(name, str(config), kernel, lambda i: module.block_gemm(*i[0], *i[1], i[2], config))


def _plain(k: int, config: Config) -> str:
    return "even" if num_blocks(k) % (config.split * config.unroll) == 0 else "uneven"


def _backend(name: str | None) -> Callable[[Inputs], Tensor]:
    return lambda i: linear(i[0], i[1], out=i[2], backend=name)


def _inputs(m: int, n: int, k: int, device: torch.device) -> Inputs:
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
    w_scales = torch.rand(num_blocks(n), num_blocks(k), device=device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    x_scales = empty_scales((m, k), "column_tma", device).uniform_()
    return (x, x_scales), (weight, w_scales), out, torch.ones((), device=device)


def _cublas(i: Inputs) -> Tensor:
    (x, _), (weight, _), out, one = i
    return torch._scaled_mm(x, weight.T, one, one, out_dtype=out.dtype, use_fast_accum=True, out=out)


def _two_launches(i: Inputs) -> tuple[Tensor, Tensor]:
    """q_a and kv_a by themselves."""
    x, (weight, scales), out, _ = i
    parts = slice(None, Q_A), slice(Q_A, None)
    blocks = slice(None, Q_A // BLOCK), slice(Q_A // BLOCK, None)
    outs = out.view(-1)[: out.shape[0] * Q_A].view(-1, Q_A), out.view(-1)[out.shape[0] * Q_A :].view(out.shape[0], -1)
    both = zip(parts, blocks, outs, strict=True)
    return tuple(linear(x, (weight[rows], scales[block]), out=part) for rows, block, part in both)


def _bytes(m: int, n: int, k: int) -> int:
    return m * k + n * k + 2 * m * n + 4 * num_blocks(k) * (m + num_blocks(n))
