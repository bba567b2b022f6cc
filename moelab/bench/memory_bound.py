"""Cases of the ops that are bound by memory: quantise, RMSNorm, SiLU·mul.

The peer is the plain-torch reference through torch.compile, where it does the same job: row-major scales, all rows.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from moelab.bench.case import OpCase, compiled
from moelab.ops import activation
from moelab.ops.activation import silu_mul, silu_mul_quantize
from moelab.ops.fp8 import num_blocks
from moelab.ops.layout import empty_scales
from moelab.ops.norm import add_rms_norm, rms_norm, rms_norm_quantize
from moelab.ops.quantize import quantize_reference, quantize_rows

HIDDEN, INTERMEDIATE, EXPERTS, ROOM = 7168, 2048, 32, 1024
EPS = 1e-6


def quantize_cases(quick: bool) -> list[OpCase]:
    tokens = (128, 8192) if quick else (1, 16, 64, 128, 256, 1024, 4096, 8192, 16384)
    formats = ("row", "column_tma") if quick else ("row", "column_tma", "ue8m0")
    return [_quantize(m, HIDDEN, name) for name in formats for m in tokens]


def _quantize(rows: int, columns: int, scale_format: str) -> OpCase:
    def make(device: torch.device) -> tuple[Tensor, tuple]:
        return _draw(device, rows, columns), _pair((rows, columns), scale_format, device)

    backends = {"triton": lambda i: quantize_rows(i[0], scale_format, out=i[1])}
    if scale_format == "row":
        backends["torch.compile"] = compiled(quantize_reference, lambda i: (i[0],))
    params = {"m": rows, "k": columns, "scales": scale_format}
    return OpCase("quantize", params, make, backends, rows * (3 * columns + _scale_bytes(columns, scale_format)))


def rms_norm_cases(quick: bool) -> list[OpCase]:
    shapes = [(128, HIDDEN), (8192, HIDDEN)]
    if not quick:
        shapes += [(1, HIDDEN), (16, HIDDEN), (1024, HIDDEN), (128, 1536), (8192, 1536), (128, 512), (8192, 512)]
    forms = ("quantize",) if quick else ("plain", "add", "quantize", "add_quantize")
    return [_rms_norm(m, h, form) for form in forms for m, h in shapes]


def _rms_norm(rows: int, columns: int, form: str) -> OpCase:
    add, quantizes = "add" in form, "quantize" in form

    def make(device: torch.device) -> tuple:
        x, weight = _draw(device, rows, columns), _draw(device, columns)
        residual = _draw(device, rows, columns) if add else None
        return x, weight, residual, _pair((rows, columns), "row", device) if quantizes else torch.empty_like(x)

    def run(inputs: tuple) -> object:
        x, weight, residual, out = inputs
        if quantizes:
            return rms_norm_quantize(x, weight, EPS, residual, out=out)
        return add_rms_norm(x, weight, EPS, residual, out=out)

    def plain(x: Tensor, weight: Tensor) -> object:
        normed = rms_norm(x, weight, EPS)
        return quantize_reference(normed) if quantizes else normed

    backends = {"triton": run}
    if not add:
        backends["torch.compile"] = compiled(plain, lambda i: i[:2])
    moved = columns * (2 + (4 if add else 0) + (1 if quantizes else 2)) + (4 * num_blocks(columns) if quantizes else 0)
    return OpCase("rms_norm", {"m": rows, "h": columns, "form": form}, make, backends, rows * moved + 2 * columns)


def silu_mul_cases(quick: bool) -> list[OpCase]:
    populated = (256, 2048, 16384) if quick else (32, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    cases = [_masked(rows) for rows in populated]
    return cases + ([] if quick else [_dense(rows) for rows in (128, 1024, 8192)])


def _masked(populated: int) -> OpCase:
    """Rows spread over the experts as a seeded draw has it; no expert beyond its room."""

    def make(device: torch.device) -> tuple:
        counts = _counts(populated)
        gate_up = torch.empty(EXPERTS, ROOM, 2 * INTERMEDIATE, dtype=torch.bfloat16, device=device)
        for expert, count in enumerate(counts.tolist()):
            gate_up[expert, :count].normal_()
        return gate_up, counts.to(device), _pair((EXPERTS, ROOM, INTERMEDIATE), "column_tma", device)

    params = {
        "experts": EXPERTS, "room": ROOM, "i": INTERMEDIATE, "populated": populated, "layout": "padded",
        "scales": "column_tma",
    }  # fmt: skip

    def run(i: tuple) -> object:
        return silu_mul_quantize(i[0], i[1], "column_tma", out=i[2])

    def run_padded(i: tuple) -> object:
        """The same kernel, a program for every row there is room for: those beyond the counts find nothing to do."""
        with mock.patch.object(activation, "num_programs", lambda *_, **__: EXPERTS * ROOM):
            return run(i)

    backends = {"triton": run, "triton-padded": run_padded}
    return OpCase("silu_mul", params, make, backends, populated * _silu_bytes() + 4 * EXPERTS)


def _dense(rows: int) -> OpCase:
    def make(device: torch.device) -> tuple:
        return _draw(device, rows, 2 * INTERMEDIATE), _pair((rows, INTERMEDIATE), "row", device)

    def plain(gate_up: Tensor) -> object:
        return quantize_reference(silu_mul(gate_up.float()))

    params = {"m": rows, "i": INTERMEDIATE, "layout": "dense", "scales": "row"}
    backends = {
        "triton": lambda i: silu_mul_quantize(i[0], out=i[1]),
        "torch.compile": compiled(plain, lambda i: (i[0],)),
    }
    return OpCase("silu_mul", params, make, backends, rows * _silu_bytes())


def _counts(populated: int) -> Tensor:
    """int32 [EXPERTS], sum `populated`, each at most ROOM: a draw of experts for rows, what overflows moved on."""
    generator = torch.Generator().manual_seed(populated)
    drawn = torch.randint(EXPERTS, (populated,), generator=generator).bincount(minlength=EXPERTS)
    counts = drawn.clamp(max=ROOM)
    spare = int((drawn - counts).sum())
    for expert in range(EXPERTS):
        more = min(spare, ROOM - int(counts[expert]))
        counts[expert] += more
        spare -= more
    return counts.to(torch.int32)


def _silu_bytes() -> int:
    return 2 * 2 * INTERMEDIATE + INTERMEDIATE + 4 * num_blocks(INTERMEDIATE)


def _draw(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=device)


def _pair(shape: tuple[int, ...], scale_format: str, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return values, empty_scales(shape, scale_format, device)


def _scale_bytes(columns: int, scale_format: str) -> int:
    groups = num_blocks(columns)
    return 4 * (-(-groups // 4) if scale_format == "ue8m0" else groups)
