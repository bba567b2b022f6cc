"""The block-FP8 linear op: FP8 rows times FP8 weights, both with scales, to bfloat16.

    out[t, n] = Σ_s xscale[t, s] · wscale[⌊n/128⌋, s] · Σ_{k in s} x[t, k] · w[n, k]        s: groups of 128 along K

(arXiv 2412.19437, section 3.3). Products of one group are added by the tensor cores, groups in float32; one rounding,
to bfloat16. Three backends do it: `deep_gemm` (`moelab.ops.deep_gemm`; Hopper, optional), and two kernels of ours that
cut K so that few tokens use the whole GPU, `hopper` (`moelab.ops.block_gemm_hopper`) and `triton`
(`moelab.ops.block_gemm`; any GPU, any operands). CPU tensors take plain torch.

Which one runs, and with which config, is read from the measured table of `moelab.ops.choice` ("linear"). For a GPU or
(N, K) that is not in it the default is DeepGEMM above 64 tokens; else, and where it cannot be used, `hopper`; else
`triton`; ours with `default_config`. A backend is taken only for operands that it reads as they are: `deep_gemm` and
`hopper` want scales in the `column_tma` format and K a multiple of 128.

A step's projections of one input can be one launch: `merge_weights` puts the rows of several weights below one another.
DeepSeek's q_a and kv_a, 7168 → 1536 and 576, become 7168 → 2112 so ("qkv_a"); 1536 is a multiple of 128, so no block of
scales is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moelab.ops import block_gemm, block_gemm_hopper, choice, deep_gemm
from moelab.ops.block_gemm import Config, gemm_kernel, parse
from moelab.ops.checks import check_tensor, require
from moelab.ops.fp8 import BLOCK, dequantize_block, num_blocks
from moelab.ops.jit import runs_on
from moelab.ops.layout import dequantize_rows, round_up
from moelab.ops.quantize import Quantized

BACKENDS = ("deep_gemm", "hopper", "triton")
OP = "linear"
READS = "for deep_gemm and hopper: column_tma scales, K a multiple of 128; for deep_gemm: all contiguous, N of 16"


def linear(x: Quantized, weight: Quantized, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """x (float8_e4m3fn [M, K], float32 [M, ⌈K/128⌉]), weight (float8_e4m3fn [N, K], float32 [⌈N/128⌉, ⌈K/128⌉], as in
    `moelab.ops.fp8`) -> bfloat16 [M, N].

    Scales of x in the format `column_tma` or `row` (`moelab.ops.layout`); the first is the faster one. `backend`: one
    of BACKENDS instead of the measured choice. `out` may be a slice of wider rows. Host work depends on shapes only, so
    a captured graph can be replayed; see `moelab.ops.arrivals` for graphs side by side. The sum is the same, bit for
    bit, in every run of one backend. Raises OpError for a dtype, shape, stride or device that is not accepted, and
    DeepGemmError if "deep_gemm" is asked for where it cannot be used.
    """
    out = _check(x, weight, out, backend)
    rows, depth = x[0].shape
    columns = weight[0].shape[0]
    if not runs_on(gemm_kernel, out):
        return out.copy_(linear_reference(x, weight))
    if rows == 0 or columns == 0 or depth == 0:
        return out.zero_()
    name, config = _choose(x, weight, out, backend) if out.is_cuda else ("triton", default_config(rows, columns, depth))
    if name == "deep_gemm":
        return deep_gemm.gemm(x, weight, out)
    kernel = block_gemm_hopper if name == "hopper" else block_gemm
    kernel.block_gemm(*x, *weight, out, config)
    return out


def linear_reference(x: Quantized, weight: Quantized) -> Tensor:
    """As `linear`, in plain torch: operands dequantised, product in float32."""
    return (dequantize_rows(*x) @ dequantize_block(*weight).T).to(torch.bfloat16)


def merge_weights(weights: Sequence[Quantized]) -> Quantized:
    """Weights ([Nᵢ, K], [⌈Nᵢ/128⌉, ⌈K/128⌉]) of one input -> one weight ([Σ Nᵢ, K], scales alike), copied. All but the
    last Nᵢ must be multiples of 128, or a block of scales would span two weights: OpError."""
    require(len(weights) > 0, "weights", "empty", "one or more")
    first = weights[0][0]
    for i, (values, scales) in enumerate(weights):
        check_tensor(f"weights[{i}][0]", values, ("N", first.shape[-1]), (torch.float8_e4m3fn,), first)
        shape = (num_blocks(values.shape[0]), num_blocks(values.shape[1]))
        check_tensor(f"weights[{i}][1]", scales, shape, (torch.float32,), first)
        whole = values.shape[0] % BLOCK == 0 or i == len(weights) - 1
        require(whole, f"weights[{i}]'s rows", values.shape[0], "a multiple of 128 for all but the last")
    bits = torch.cat([values.view(torch.uint8) for values, _ in weights])  # torch on the CPU joins no float8
    return bits.view(torch.float8_e4m3fn), torch.cat([scales for _, scales in weights])


def default_config(rows: int, columns: int, depth: int) -> Config:
    """Of our kernels, where nothing was measured: tiles of 64 weight rows, of as many tokens as there are from 32 to
    64, and K cut so that each of an H200's 132 multiprocessors has a program, with 4 groups of 128 or more."""
    block_m = min(64, max(32, 1 << (rows - 1).bit_length()))
    tiles = -(-columns // 64) * -(-rows // block_m)
    split = max(1, min(132 // tiles, num_blocks(depth) // 4, 14))
    return Config(64, block_m, split, 4, 2, 3)


def _choose(x: Quantized, weight: Quantized, out: Tensor, backend: str | None) -> tuple[str, Config]:
    """The backend, and the config if it is one of our kernels: by the table, else the default above."""
    rows, columns = out.shape
    depth = x[0].shape[1]
    if backend is not None:
        require(_reads(backend, x, weight, out), "x, weight or out", f"not as {backend} reads it", READS)
        able = (backend,)
    else:
        able = tuple(b for b in BACKENDS if _reads(b, x, weight, out))
        if able[0] == "deep_gemm" and deep_gemm.reason() is not None:
            able = able[1:]
    found = choice.pick(OP, out.device, columns, depth, rows, backends=able)
    if found is not None and found.config:
        return found.backend, parse(found.config)
    if found is None and rows <= 64 and len(able) > 1:
        able = tuple(b for b in able if b != "deep_gemm")
    return found.backend if found else able[0], default_config(rows, columns, depth)


def _reads(backend: str, x: Quantized, weight: Quantized, out: Tensor) -> bool:
    """Whether a backend reads the operands as they are."""
    rows, depth = x[0].shape
    if backend == "deep_gemm":
        shaped = depth % BLOCK == 0 and out.shape[1] % 16 == 0 and x[1].stride() == (1, round_up(rows, 4))
        return shaped and all(t.is_contiguous() for t in (x[0], *weight, out))
    return backend == "triton" or block_gemm_hopper.takes(*x, weight[0])


def _check(x: Quantized, weight: Quantized, out: Tensor | None, backend: str | None) -> Tensor:
    """The output: `out`, or a new one."""
    for name, pair in (("x", x), ("weight", weight)):
        require(
            isinstance(pair, tuple) and len(pair) == 2, name, f"a {type(pair).__name__}", "a (values, scales) tuple"
        )
    (values, scales), (w, w_scales) = x, weight
    check_tensor("x[0]", values, ("M", "K"), (torch.float8_e4m3fn,))
    rows, depth = values.shape
    require(isinstance(scales, Tensor), "x[1]", f"a {type(scales).__name__}", "a tensor")
    require(scales.dtype == torch.float32, "x[1]'s dtype", scales.dtype, "float32, in the format row or column_tma")
    wanted = (rows, num_blocks(depth))
    require(tuple(scales.shape) == wanted, "x[1]'s shape", list(scales.shape), f"{list(wanted)}")
    strided = 1 in scales.stride() or scales.numel() <= 1 or min(scales.shape) == 1
    require(strided, "x[1]'s strides", scales.stride(), "the format row or column_tma")
    require(scales.device == values.device, "x[1]'s device", scales.device, f"{values.device}, where x[0] is")
    check_tensor("weight[0]", w, ("N", depth), (torch.float8_e4m3fn,), values)
    check_tensor("weight[1]", w_scales, (num_blocks(w.shape[0]), num_blocks(depth)), (torch.float32,), values)
    require(backend in (None, *BACKENDS), "backend", repr(backend), ", ".join(map(repr, BACKENDS)))
    on_cpu = backend is not None and values.device.type != "cuda"
    require(not on_cpu, "backend", f"{backend!r} on {values.device}", "None where the tensors are on no GPU")
    if out is None:
        return torch.empty(rows, w.shape[0], dtype=torch.bfloat16, device=values.device)
    check_tensor("out", out, (rows, w.shape[0]), (torch.bfloat16,), values)
    return out
