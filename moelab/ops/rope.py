"""Rotary position embedding with YaRN, as DeepSeek-V3 applies it.

A pair (x₂ᵢ, x₂ᵢ₊₁) of neighbours is turned by the angle position · fᵢ, fᵢ = θ^(−2i/d). (Many codebases pair element i
with i + d/2 instead: the scores agree only if queries and keys are permuted alike, so caches are not interchangeable.)

YaRN (arXiv 2309.00071) stretches a context of L₀ tokens by `factor`: pairs that turn less than β_slow times within L₀
are slowed by the factor, those that turn more than β_fast times are left alone, a linear ramp lies between:

    f′ᵢ = fᵢ/factor · ramp(i) + fᵢ · (1 − ramp(i)),    ramp(i) = clamp((i − low) / (high − low), 0, 1)
    low, high = ⌊d·ln(L₀/(2π·β_fast)) / (2·ln θ)⌋, ⌈d·ln(L₀/(2π·β_slow)) / (2·ln θ)⌉

Longer contexts flatten the softmax; m = 0.1·mscale·ln(factor) + 1 sharpens it again. With `mscale_all_dim` the softmax
scale takes m²; cos and sin carry the quotient m(mscale) / m(mscale_all_dim), which is 1 for DeepSeek-V3.
"""

from __future__ import annotations

import functools
import math

import torch

from moelab.config import ModelConfig, RopeConfig


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: ModelConfig) -> float:
    """The factor on attention scores: qk_head_dim^-½, times m² where the checkpoint has `mscale_all_dim`."""
    scale = config.qk_head_dim**-0.5
    if config.rope.mscale_all_dim:
        scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale


def inverse_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Angle per position of each of the dim/2 pairs, float32 [dim/2]."""
    plain = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.factor <= 1.0:
        return plain
    length = rope.original_max_position_embeddings

    def pair_turning(times: float) -> float:  # the pair that turns `times` times within the original context
        return dim * math.log(length / (2 * math.pi * times)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_turning(rope.beta_fast)), 0)
    high = min(math.ceil(pair_turning(rope.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def cos_sin(config: ModelConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T] int -> cos, sin float32 [T, rope_dim/2], YaRN's multiplier included."""
    rope = config.rope
    angles = positions.float()[:, None] * _frequencies(rope, config.qk_rope_head_dim, positions.device)
    if rope.mscale and rope.mscale_all_dim:
        gain = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    else:
        gain = yarn_mscale(rope.factor, 1.0)
    return angles.cos() * gain, angles.sin() * gain


@functools.cache
def _frequencies(rope: RopeConfig, dim: int, device: torch.device) -> torch.Tensor:
    """Kept on the device: a step that is captured copies nothing from the host."""
    with torch.inference_mode(False):
        return inverse_frequencies(rope, dim).to(device)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each token's pairs. x [T, ..., d], cos and sin [T, d/2] -> like x, computed in float32."""
    shape = (x.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
    return turn_pairs(x, cos.view(shape), sin.view(shape))


def turn_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs. x [..., d], cos and sin broadcast to [..., d/2] -> like x, computed in float32."""
    even, odd = x.float().unflatten(-1, (x.shape[-1] // 2, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)
