"""Cases of the grouped GEMM: the experts of one GPU in a decode step of DeepSeek-V3, from EP8 to EP128 with DP = EP.

With B requests a DP group and q tokens each, the mean rows of an expert are m = B·q·8·DP/256. From one row on every
expert gets m rows (counts "equal"): the study's figure. Below one, who gets a row decides how many weights are read, so
the tokens' experts are drawn, any 8 of 256 alike and always the same ("drawn"), and `active` says how many of the
GPU's experts woke. Rows stand in the room of the deployment, DP · 128 requests · q. Bytes and FLOP are those of
populated rows and of the experts that have some.

The dispatcher's tables (`moelab.ops.choice`) have the same groups and shapes, and 1, 2, 4 … rows an expert up to those
of the largest batch; fewer for the contiguous layout. Counts are equal from 4 rows on. Below, real ones are so unequal
that experts are without rows, and a choice that is best for equal ones loses more than it gains: they are drawn.

"moelab" is the dispatcher, which picks one of the others by a measured table. DeepGEMM is called directly, with counts
that it can trust, or the expert of each row at hand.
"""

from __future__ import annotations

import importlib.util
import math

import torch

from moelab.bench.case import Inputs, OpCase
from moelab.bench.point import Candidate, Point
from moelab.ops import deep_gemm
from moelab.ops.fp8 import num_blocks
from moelab.ops.grouped_gemm_fp8 import Config, expert_of_row, grouped_gemm_fp8, sweep
from moelab.ops.layout import empty_scales, segment_starts

EXPERTS, TOP_K, Q_LEN, MAX_BATCH = 256, 8, 2, 128
SHAPES = {"gate_up": (4096, 7168), "down": (7168, 2048)}  # N, K
EPS = (8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTIGUOUS = ((32, 16), (32, 128), (8, 512), (4, 2048), (4, 8192))  # groups, m


def grouped_gemm_cases(quick: bool) -> list[OpCase]:
    """OpCases of op "grouped_gemm", both layouts."""
    eps, batches, contiguous = ((8, 128), (1, 128), CONTIGUOUS[1:2]) if quick else (EPS, BATCHES, CONTIGUOUS)
    cases = [_deployment(ep, batch, name) for ep in eps for name in SHAPES for batch in batches]
    return cases + [_contiguous(groups, m, name) for groups, m in contiguous for name in SHAPES]


def _deployment(ep: int, batch: int, name: str) -> OpCase:
    groups, mean = EXPERTS // ep, batch * Q_LEN * TOP_K * ep / EXPERTS
    counts = equal_counts(groups, int(mean)) if mean >= 1 else drawn_counts(batch * Q_LEN * ep, groups)
    params = {"ep": ep, "batch": batch, "q_len": Q_LEN, "counts": "equal" if mean >= 1 else "drawn"}
    return case(name, counts, mean, ep * MAX_BATCH * Q_LEN, params)


def _contiguous(groups: int, m: int, name: str) -> OpCase:
    return case(name, equal_counts(groups, m), m, None, {"counts": "equal"})


def case(name: str, counts: torch.Tensor, mean: float, room: int | None, params: dict[str, str | int]) -> OpCase:
    """`room`: rows of an expert in the padded layout; None for the contiguous one. `counts` on the CPU."""
    n, k = SHAPES[name]
    groups, rows, active = counts.numel(), int(counts.sum()), int((counts > 0).sum())
    expected = math.ceil(mean)

    def make(device: torch.device) -> dict[str, Inputs]:
        return draw(counts, n, k, room, device)

    def through(backend: str):
        return lambda i: grouped_gemm_fp8(i["rows"], i["weight"], i["counts"], i["out"], expected, backend)

    def direct(i: dict[str, Inputs]) -> torch.Tensor:
        if room is None:
            return deep_gemm.grouped_contiguous(i["rows"], i["weight"], i["out"], i["expert_of_row"])
        return deep_gemm.grouped_masked(i["rows"], i["weight"], i["out"], i["counts"], expected)

    backends = {"moelab": through("auto"), "triton": through("triton")}
    if importlib.util.find_spec("deep_gemm"):
        backends["deep_gemm"] = direct
    params = params | {
        "projection": name, "groups": groups, "m": int(mean) if mean == int(mean) else mean, "n": n, "k": k,
        "rows": rows, "active": active, "layout": "contiguous" if room is None else "padded",
    }  # fmt: skip
    return OpCase("grouped_gemm", params, make, backends, _bytes(counts, n, k), 2.0 * rows * n * k, "fp8")


def padded_points() -> list[Point]:
    """Of the table "grouped_gemm_padded"."""
    return [
        _point(EXPERTS // ep, 2**i, name, max(128, 2**i))
        for ep in EPS
        for name in SHAPES
        for i in range((MAX_BATCH * Q_LEN * TOP_K * ep // EXPERTS).bit_length())
    ]


def contiguous_points() -> list[Point]:
    """Of the table "grouped_gemm_contiguous"."""
    return [_point(EXPERTS // ep, m, name, None) for ep in EPS for name in SHAPES for m in (16, 128, 1024)]


def _point(groups: int, m: int, name: str, room: int | None) -> Point:
    n, k = SHAPES[name]
    counts = equal_counts(groups, m) if m >= 4 else drawn_counts(m * EXPERTS // TOP_K, groups)

    def run(backend: str, config: Config | None = None):
        return lambda i: grouped_gemm_fp8(i["rows"], i["weight"], i["counts"], i["out"], m, backend, config)

    candidates = [Candidate("triton", str(c), f"triton {n} {k} {c}", run("triton", c)) for c in sweep(groups, m)]
    if deep_gemm.reason() is None:
        candidates.append(Candidate("deep_gemm", "", f"deep_gemm {groups} {n} {k} {m}", run("deep_gemm")))
    return Point(groups, n, k, m, candidates, lambda device: draw(counts, n, k, room, device), _bytes(counts, n, k))


def _bytes(counts: torch.Tensor, n: int, k: int) -> int:
    """Populated rows in and out, weights of the experts that have some, counts."""
    rows, active = int(counts.sum()), int((counts > 0).sum())
    per_row, per_expert = k + 4 * num_blocks(k) + 2 * n, n * k + 4 * num_blocks(n) * num_blocks(k)
    return rows * per_row + active * per_expert + 4 * counts.numel()


def equal_counts(groups: int, m: int) -> torch.Tensor:
    return torch.full((groups,), m, dtype=torch.int32)


def drawn_counts(tokens: int, groups: int) -> torch.Tensor:
    """Rows of the first `groups` of 256 experts when each of `tokens` draws 8 of them."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    return ids.flatten().bincount(minlength=EXPERTS)[:groups].to(torch.int32)


def draw(counts: torch.Tensor, n: int, k: int, room: int | None, device: torch.device) -> dict[str, Inputs]:
    """Inputs of one call, rows populated as `counts` says; what is not populated is whatever the memory held."""
    groups = counts.numel()
    starts = segment_starts(counts)
    last = int(starts[-1]) + -(-int(counts[-1]) // 128) * 128
    shape = (last, k) if room is None else (groups, room, k)
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    scales = empty_scales(shape, "column_tma", device)
    for expert, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        part = slice(start, start + count) if room is None else (expert, slice(count))
        _fill(values[part])
        scales[part] = torch.rand(count, scales.shape[-1], device=device)
    weight = torch.empty(groups, n, k, dtype=torch.float8_e4m3fn, device=device)
    _fill(weight)
    on_device = counts.to(device)
    return {
        "rows": (values, scales),
        "weight": (weight, torch.rand(groups, num_blocks(n), num_blocks(k), device=device)),
        "counts": on_device,
        "expert_of_row": expert_of_row(on_device, last),
        "out": torch.empty(*shape[:-1], n, dtype=torch.bfloat16, device=device),
    }


def _fill(values: torch.Tensor) -> None:
    """Random e4m3 of both signs below 2, all exponents alike; quicker than numbers that are cast, for a gigabyte."""
    values.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF)
