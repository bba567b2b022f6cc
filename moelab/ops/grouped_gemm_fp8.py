"""Block-FP8 grouped GEMM: the experts' matrices over the rows that were dispatched to them.

    out[r] = x[r] · W[e]ᵀ        for each of the counts[e] rows r of expert e

x carries a scale for 1 × 128 values, W one for 128 × 128. Rows stand padded per expert, [E, M, K] with the first
counts[e] populated ("masked" in DeepGEMM's words), or contiguous, [R, K] with expert e's rows from
`segment_starts(counts)[e]` on. Counts stay on the device, so a captured graph follows them, and a count beyond the room
stands for the room.

Two backends: DeepGEMM (`moelab.ops.deep_gemm`), and our Triton, which needs nothing else and has two kernels: a plain
one (`moelab.ops.grouped_gemm_kernel`), and one in Gluon for Hopper (`moelab.ops.grouped_gemm_hopper`). Which is taken,
with which tiles, was measured (`moelab.ops.choice`, tables "grouped_gemm_padded" and "grouped_gemm_contiguous"). For a
GPU or (experts, N, K) that is not in a table it is DeepGEMM from 128 rows an expert on, where it can be used, and else
the plain Triton kernel with `default_config`. On an H200 ours are the faster ones up to 32 rows an expert, but for the
gate and up projection of two experts; from 128 rows on they take up to twice as long as DeepGEMM.

Triton neither reads nor writes rows beyond a count. DeepGEMM works on whole tiles of up to 128 rows: it reads the rows
behind the last, which touch no other row, and leaves undefined values in theirs of `out`, within the expert's own room.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.ops import choice, deep_gemm, grouped_gemm_hopper
from moelab.ops.arrivals import counters
from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.fp8 import BLOCK, dequantize_block, num_blocks
from moelab.ops.grouped_gemm_kernel import counts_kernel, grouped_kernel
from moelab.ops.jit import runs_on, triton
from moelab.ops.layout import dequantize_rows, empty_scales, scales_shape, segment_starts
from moelab.ops.multiprocessors import num_programs

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton for this platform
    TensorDescriptor = None

BACKENDS = ("auto", "deep_gemm", "triton")
PADDED, CONTIGUOUS = "grouped_gemm_padded", "grouped_gemm_contiguous"  # tables of choices

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Config:
    """Of our kernels. Tiles: BLOCK_N columns × BLOCK_M rows, `stages` of 128 along K in flight in each of
    `per_sm` programs an SM. Programs may share a tile if each takes at least `least` steps; 0: never.
    `hopper`: the kernel in Gluon, whose parts have at least stages − 2 steps.
    """

    block_n: int
    block_m: int
    stages: int
    warps: int
    per_sm: int
    least: int
    hopper: bool = False

    def __str__(self) -> str:
        """As in tables of choices: "128x16/s6w4p2l4", an h before it for `hopper`."""
        tile = f"{'h' if self.hopper else ''}{self.block_n}x{self.block_m}"
        return f"{tile}/s{self.stages}w{self.warps}p{self.per_sm}l{self.least}"

    @classmethod
    def parse(cls, text: str) -> Config:
        """The inverse of str. Raises OpError."""
        found = re.fullmatch(r"(h?)(\d+)x(\d+)/s(\d+)w(\d+)p(\d+)l(\d+)", text)
        require(found is not None, "config", repr(text), "text like '128x16/s6w4p2l4'")
        hopper, *numbers = found.groups()
        return cls(*map(int, numbers), hopper=bool(hopper))


_parsed = functools.cache(Config.parse)


def grouped_gemm_fp8(
    rows: Pair, weight: Pair, counts: Tensor, out: Tensor | None = None, expected_m: int | None = None,
    backend: str = "auto", config: Config | None = None,
) -> Tensor:  # fmt: skip
    """rows: (float8_e4m3fn [E, M, K] padded or [R, K] contiguous, float32 scales in the format "row" or "column_tma").
    weight: (float8_e4m3fn [E, N, K], float32 [E, ⌈N/128⌉, ⌈K/128⌉]). counts: int32 [E] on the device.
    -> bfloat16, like rows with N columns; `out` to write into. Everything contiguous but the scales of rows; K a
    multiple of 16.

    `expected_m`: about how many rows an expert with rows has, for the choice of tiles; a wrong one costs time only.
    Without it R/E in the contiguous layout, and 64, or M if that is less, in the padded one. `backend`: "auto" takes
    the measured choice; DeepGEMM wants scales in "column_tma" (it would transpose others at every call), N a multiple
    of 16, K and M, or R, of 128. `config`: of "triton", which without one takes the measured, or else `default_config`.

    Raises OpError for an argument that is not accepted, DeepGemmError where DeepGEMM is demanded and cannot be used.
    """
    out = _check(rows, weight, counts, out)
    require(backend in BACKENDS, "backend", repr(backend), ", ".join(map(repr, BACKENDS)))
    require(expected_m is None or expected_m > 0, "expected_m", expected_m, "a positive number, or None")
    values, (w, _) = rows[0], weight
    if 0 in values.shape or 0 in w.shape:
        return out
    on_gpu = values.device.type == "cuda"
    require(backend != "deep_gemm" or on_gpu, "backend", f"'deep_gemm' on {values.device}", "'auto' there")
    if not runs_on(grouped_kernel, values):
        return _reference(rows, weight, counts, out)
    if expected_m is None:
        expected_m = min(values.shape[1], 64) if values.dim() == 3 else max(1, values.shape[0] // w.shape[0])
    if backend != "triton" or config is None:
        backend, config = _choose(backend, config, rows, w, expected_m)
    if backend == "deep_gemm":
        return _deep_gemm(rows, weight, counts, out, expected_m)
    return _triton(rows, weight, counts, out, config)


def default_config(expected_m: int) -> Config:
    """Of the Triton kernel where no table speaks: one tile holds the rows of an expert, up to 128."""
    if expected_m <= 16:
        return Config(64, 16, 5, 4, 4, 4)
    if expected_m <= 32:
        return Config(128, 32, 5, 4, 2, 4)
    return Config(128, 64, 4, 4, 2, 4) if expected_m <= 64 else Config(64, 128, 4, 4, 2, 0)


def sweep(groups: int, expected_m: int) -> list[Config]:
    """What is tried at a point of the measured table: what was among the best at some point near it on an H200."""
    few = groups <= 4  # too few tiles, unless they are small or cut
    if expected_m <= 16:
        names = ["h64x16/s10w4p2l8", "h128x16/s6w4p2l0", "64x16/s5w4p4l0"] + few * ["h64x16/s10w4p2l0"]
    elif expected_m <= 32:
        names = ["h64x32/s8w4p2l6", "h128x32/s10w4p1l8", "128x32/s5w4p2l4"] + [
            "h128x16/s6w4p2l0" if few else "h128x32/s5w4p2l0"
        ]
    elif expected_m <= 64:
        names = ["h64x64/s6w4p2l4", "h64x64/s6w4p2l0", "128x64/s4w4p2l0"] + few * ["h128x32/s5w4p2l0"]
    else:
        names = ["64x128/s4w4p2l0", "h128x128/s6w8p1l7"] + few * ["h64x64/s6w4p2l4"]
    return [Config.parse(name) for name in names]


def expert_of_row(counts: Tensor, num_rows: int) -> Tensor:
    """Which expert each row of the contiguous layout belongs to, int32 [num_rows]; −1 where there is none. One launch;
    counts int32 [E] on the device. CPU tensors take plain torch."""
    out = torch.empty(num_rows, dtype=torch.int32, device=counts.device)
    if not runs_on(counts_kernel, counts):
        out.fill_(-1)
        for expert, (start, count) in enumerate(zip(segment_starts(counts).tolist(), counts.tolist(), strict=True)):
            out[start : start + count] = expert
        return out
    early = launches_early(counts)
    if num_rows:
        counts_kernel[(triton.cdiv(num_rows, BLOCK),)](
            counts, out, counts.numel(), num_rows, EXPERTS=triton.next_power_of_2(counts.numel()), CLAMP=False,
            EARLY=early, launch_pdl=early, num_warps=4,
        )  # fmt: skip
    return out


def _check(rows: Pair, weight: Pair, counts: Tensor, out: Tensor | None) -> Tensor:
    """Everything fits; `out`, or a new one."""
    for name, pair in (("rows", rows), ("weight", weight)):
        require(isinstance(pair, tuple) and len(pair) == 2, name, f"a {type(pair).__name__}", "a pair (values, scales)")
    (values, scales), (w, w_scales) = rows, weight
    fp8, f32 = (torch.float8_e4m3fn,), (torch.float32,)
    require(isinstance(values, Tensor), "rows[0]", f"a {type(values).__name__}", "a tensor")
    padded = values.dim() == 3
    check_tensor("rows[0]", values, ("E", "M", "K") if padded else ("R", "K"), fp8)
    k = values.shape[-1]
    check_tensor("weight[0]", w, (values.shape[0] if padded else "E", "N", k), fp8, values)
    experts, n, _ = w.shape
    check_tensor("weight[1]", w_scales, (experts, num_blocks(n), num_blocks(k)), f32, values)
    check_tensor("counts", counts, (experts,), (torch.int32,), values)
    for name, tensor in (("rows[0]", values), ("weight[0]", w), ("weight[1]", w_scales), ("counts", counts)):
        _require_contiguous(name, tensor)
    require(k > 0 and k % 16 == 0, "rows[0]'s K", k, "a positive multiple of 16")
    require(isinstance(scales, Tensor), "rows[1]", f"a {type(scales).__name__}", "a tensor")
    shape = scales_shape(tuple(values.shape), "row")
    require(scales.dtype == torch.float32, "rows[1]'s dtype", scales.dtype, "float32")
    require(tuple(scales.shape) == shape, "rows[1]'s shape", list(scales.shape), list(shape))
    legal = [_strides(tuple(values.shape), name) for name in ("row", "column_tma")]
    require(scales.stride() in legal or scales.numel() == 0, "rows[1]'s strides", scales.stride(),
            f"{legal[0]} (row) or {legal[1]} (column_tma)")  # fmt: skip
    require(scales.device == values.device, "rows[1]'s device", scales.device, f"{values.device}, where the others are")
    if out is None:
        return torch.empty(*values.shape[:-1], n, dtype=torch.bfloat16, device=values.device)
    check_tensor("out", out, (*values.shape[:-1], n), (torch.bfloat16,), values)
    _require_contiguous("out", out)
    return out


def _require_contiguous(name: str, tensor: Tensor) -> None:
    require(tensor.is_contiguous(), f"{name}'s strides", tensor.stride(), "a contiguous tensor; call .contiguous()")


@functools.lru_cache(maxsize=1024)
def _strides(rows_shape: tuple[int, ...], scale_format: str) -> tuple[int, ...]:
    return empty_scales(rows_shape, scale_format, torch.device("meta")).stride()


def _choose(
    backend: str, config: Config | None, rows: Pair, w: Tensor, expected_m: int
) -> tuple[str, Config | None]:  # fmt: skip
    """The measured choice among what is allowed and possible."""
    values, scales = rows
    if not values.is_cuda:
        return "triton", config or default_config(expected_m)
    padded = values.dim() == 3
    experts, n, k = w.shape
    # A tile that hangs over the end of the room would be written into the next expert's rows.
    wanted = (
        (f"rows[0]'s {'M' if padded else 'R'}", values.shape[-2], values.shape[-2] % BLOCK == 0, "a multiple of 128"),
        ("rows[0]'s K", k, k % BLOCK == 0, "a multiple of 128"),
        ("weight[0]'s N", n, n % 16 == 0, "a multiple of 16"),
        ("rows[1]'s strides", scales.stride(), scales.stride(-2) == 1, "the format column_tma"),
    )
    if backend == "deep_gemm":
        for name, value, ok, accepted in wanted:
            require(ok, name, value, f"{accepted} with backend 'deep_gemm'")
        return "deep_gemm", None
    able = backend == "auto" and all(ok for _, _, ok, _ in wanted) and deep_gemm.reason() is None
    possible = ("deep_gemm", "triton") if able else ("triton",)
    found = choice.pick(PADDED if padded else CONTIGUOUS, values.device, n, k, expected_m, experts, possible)
    if found is None:
        return "deep_gemm" if able and expected_m >= BLOCK else "triton", config or default_config(expected_m)
    return found.backend, config or (_parsed(found.config) if found.backend == "triton" else None)


def _reference(rows: Pair, weight: Pair, counts: Tensor, out: Tensor) -> Tensor:
    """In float32, rounded once; an expert at a time."""
    values, scales = rows
    starts = [0] * counts.numel() if values.dim() == 3 else segment_starts(counts).tolist()
    for expert, (start, count) in enumerate(zip(starts, counts.tolist(), strict=True)):
        part = (expert, slice(count)) if values.dim() == 3 else (slice(start, start + count),)
        w = dequantize_block(weight[0][expert], weight[1][expert])
        out[part] = (dequantize_rows(values[part], scales[part]) @ w.T).to(torch.bfloat16)
    return out


def _deep_gemm(rows: Pair, weight: Pair, counts: Tensor, out: Tensor, expected_m: int) -> Tensor:
    if rows[0].dim() == 2:
        return deep_gemm.grouped_contiguous(rows, weight, out, expert_of_row(counts, rows[0].shape[0]))
    # DeepGEMM believes the counts; one beyond the room would reach the next expert.
    within, early = torch.empty_like(counts), launches_early(counts)
    counts_kernel[(1,)](
        counts, within, counts.numel(), rows[0].shape[1], EXPERTS=triton.next_power_of_2(counts.numel()), CLAMP=True,
        EARLY=early, launch_pdl=early, num_warps=1,
    )  # fmt: skip
    return deep_gemm.grouped_masked(rows, weight, out, within, expected_m)


def _triton(rows: Pair, weight: Pair, counts: Tensor, out: Tensor, config: Config) -> Tensor:
    (values, scales), (w, w_scales) = rows, weight
    experts, n, k = w.shape
    padded, steps = values.dim() == 3, num_blocks(k)
    programs = num_programs(values.device, config.per_sm, interpreted=3)
    least = min(config.least, steps) or steps
    size = 0 if least == steps else programs * config.block_n * config.block_m
    partials = torch.empty(size, dtype=torch.float32, device=values.device)
    sizes = (scales.stride(0) if padded else 0, *scales.stride()[-2:], experts, values.shape[-2])
    early = launches_early(values)
    common: dict[str, object] = dict(
        N=n, K=k, EXPERTS=max(32, triton.next_power_of_2(experts)), PADDED=padded, BLOCK_N=config.block_n,
        BLOCK_M=config.block_m, LEAST=least, STAGES=config.stages, num_warps=config.warps, launch_pdl=early,
    )  # fmt: skip
    flat = w.view(experts * n, k)
    if config.hopper:
        able = grouped_gemm_hopper.runs_on(values.device) and k % BLOCK == 0 and least >= config.stages - 2
        require(able, "config", f"'{config}'", "one without h, but on Hopper with K a multiple of 128 and l ≥ s − 2")
        grouped_gemm_hopper.grouped_hopper_kernel[(programs,)](
            values, scales, grouped_gemm_hopper.weight_tiles(flat, config.block_n), w_scales, counts, out, partials,
            counters(values.device), *sizes, WARPS=config.warps, **common,
        )  # fmt: skip
    else:
        grouped_kernel[(programs,)](
            values, scales, TensorDescriptor.from_tensor(flat, [config.block_n, BLOCK]), w_scales, counts, out,
            partials, counters(values.device), *sizes, EARLY=early, CUDA=values.is_cuda, **common,
        )  # fmt: skip
    return out
