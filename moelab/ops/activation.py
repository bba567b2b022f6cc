"""SwiGLU's middle: silu(gate) · up, on the output of the merged gate-and-up projection."""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2·I], gate in the first half -> [..., I] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
