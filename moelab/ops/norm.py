"""RMSNorm: x / rms(x) · weight, the variance in float32 whatever x is (arXiv 1910.07467)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension. x [..., H] of any float dtype, weight [H] -> [..., H] in x's dtype.

    Rounds to x's dtype before the weight is applied, as DeepSeek's and transformers' code do.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
