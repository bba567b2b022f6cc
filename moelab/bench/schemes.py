"""What FP8 loses by where its scales stand: round trips through e4m3, and the error they leave.

A round trip divides each value by its scale, rounds to e4m3 (3 mantissa bits, 2⁻⁹ … 448) and multiplies again: what an
FP8 kernel computes with, but for the order of its sums. Schemes differ in how many values share a scale, always
max|x| / 448 of them:

    per tensor    all of a matrix
    per row       a token of activations, an output channel of weights
    1×128         128 neighbours in a row: DeepSeek-V3's activations (arXiv 2412.19437, section 3.3)
    128×128       a square block: its weights
    …, 2ⁿ         the same, scales rounded up to powers of two, as UE8M0 holds them

Rounding alone, relative to the value, is the same in all: an exponent moves with its value, so outliers do not coarsen
their neighbours as they do in INT8 (here for comparison). Only what lies some 2¹⁵ below the maximum of its scale comes
into the subnormals, and what lies 2¹⁹ below it becomes 0. So finer scales pay where values that share one differ that
much.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moelab.config import MoelabError
from moelab.ops.fp8 import BLOCK, E4M3_MAX, dequantize_block, num_blocks, quantize_block
from moelab.ops.layout import dequantize_rows
from moelab.ops.quantize import quantize_reference


def _per_tensor(x: Tensor) -> Tensor:
    return _shared(x, x.abs().amax((-2, -1), keepdim=True))


def _per_row(x: Tensor) -> Tensor:
    return _shared(x, x.abs().amax(-1, keepdim=True))


def _shared(x: Tensor, amax: Tensor) -> Tensor:
    scale = amax.clamp(min=1e-12) / E4M3_MAX
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _groups(x: Tensor, power_of_two: bool = False) -> Tensor:
    return dequantize_rows(*quantize_reference(x, power_of_two))


def _blocks(x: Tensor) -> Tensor:
    return dequantize_block(*quantize_block(x))


def _blocks_power_of_two(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(quantize_block(x)[1])
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(torch.int32))
    rows, cols = x.shape[-2:]
    spread = scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :cols]
    return (x / spread).to(torch.float8_e4m3fn).float() * spread


def _int8(x: Tensor) -> Tensor:
    scale = x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round() * scale


SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "per tensor": _per_tensor,
    "per row": _per_row,
    "1×128": _groups,
    "1×128, 2ⁿ": lambda x: _groups(x, power_of_two=True),
    "128×128": _blocks,
    "128×128, 2ⁿ": _blocks_power_of_two,
    "BF16": lambda x: x.bfloat16().float(),
    "INT8 per tensor": _int8,
}


def round_trip(x: Tensor, scheme: str) -> Tensor:
    """x [..., M, K] of any float dtype -> float32 alike, as `scheme` keeps it; matrices of a stack go each by itself.
    Raises MoelabError for a scheme that is not in SCHEMES."""
    if scheme not in SCHEMES:
        raise MoelabError(f"no scheme {scheme!r}; there are: {', '.join(SCHEMES)}")
    return SCHEMES[scheme](x.float())


def relative_error(x: Tensor, kept: Tensor) -> float:
    """‖kept − x‖ / ‖x‖, over all values."""
    return float((kept.double() - x.double()).norm() / x.double().norm())


def lost_share(x: Tensor, kept: Tensor) -> float:
    """Share of the values of x other than 0 that are 0 in `kept`."""
    return float(((kept == 0) & (x != 0)).sum() / (x != 0).sum().clamp(min=1))


def scale_range(x: Tensor) -> Tensor:
    """log2 of (maximum of the tensor / maximum of a 1 × 128 group), for each group of x [M, K] that holds more than 0:
    the binades of e4m3's exponent that one scale for all would cost that group."""
    rows, cols = x.shape
    padded = torch.nn.functional.pad(x.float().abs(), (0, num_blocks(cols) * BLOCK - cols))
    amax = padded.unflatten(-1, (-1, BLOCK)).amax(-1).flatten()
    return (amax.max() / amax[amax > 0]).log2()


def plant_outliers(x: Tensor, weight: Tensor, channels: list[int], factor: float) -> tuple[Tensor, Tensor]:
    """x [M, K] and weight [N, K] with the same product x · weightᵀ: `channels` of x are multiplied by `factor`, those
    of the weight divided by it. A power of two keeps the product exact."""
    scale = torch.ones(x.shape[-1])
    scale[channels] = factor
    return x * scale, weight / scale


def product_error(x: Tensor, weight: Tensor, activations: str, weights: str) -> float:
    """Relative error of x · weightᵀ, x [M, K], weight [N, K], when both go through a round trip."""
    kept = round_trip(x, activations) @ round_trip(weight, weights).T
    return relative_error(x @ weight.T, kept)
