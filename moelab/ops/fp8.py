"""Block-FP8 weights: e4m3 values and one float32 scale for each block of 128 × 128.

DeepSeek's checkpoints name the scale `weight_scale_inv`; it is already the multiplier: w = w8 · scale. Blocks are
counted with ceil, so a weight of 576 rows has 5 rows of scales, the last for 64 rows (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

BLOCK = 128
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-12


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def dequantize_block(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """weight [..., N, K] float8_e4m3fn, scale [..., ⌈N/128⌉, ⌈K/128⌉] float32 -> [..., N, K] in `dtype`, multiplied in
    float32."""
    rows, cols = weight.shape[-2:]
    spread = scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :cols]
    return (weight.float() * spread).to(dtype)


def quantize_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., N, K] of any float dtype -> (float8_e4m3fn [..., N, K], float32 [..., ⌈N/128⌉, ⌈K/128⌉]).

    scale = max|w| / 448 over the block; a block of zeros gets the scale of 1e-12 and stays zero. A block that holds NaN
    or an infinity becomes NaN, scale and values. `quantize_blocks` does the same on a GPU in one kernel.
    """
    rows, cols = weight.shape[-2:]
    padded = pad(weight.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (num_blocks(cols), BLOCK)).unflatten(-3, (num_blocks(rows), BLOCK))
    amax = blocks.abs().amax((-3, -1))
    # Divided by a tensor: by a Python number torch multiplies with its reciprocal on a GPU, which rounds otherwise.
    scale = amax.clamp(min=AMAX_FLOOR) / torch.full_like(amax, E4M3_MAX)
    scale = torch.where(amax.isfinite(), scale, float("nan"))
    quantized = (blocks / scale[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return quantized.view(padded.shape)[..., :rows, :cols].contiguous(), scale
