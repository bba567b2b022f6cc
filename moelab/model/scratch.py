"""What the experts of a layer compute in: one memory for all layers and micro-batches of a rank.

Gate and up, what they are multiplied to, and the experts' output are by far the largest values of a step, for they have
room for every row that could arrive. Every schedule runs the stages between dispatch's receive and combine's send in
one go (S4 in `moelab.stages`), so only one layer of one micro-batch needs them at a time, and gate and up have been
read when the output is written: those two share their place.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from moelab.ops.quantize import Quantized, empty_scales


class Scratch:
    """`gate_up` and `out` are one memory; `act` is FP8 with scales. None: made anew each time."""

    def __init__(
        self, gate_up: Tensor | None = None, act: Quantized | None = None, out: Tensor | None = None, nbytes: int = 0
    ) -> None:
        self.gate_up, self.act, self.out, self.nbytes = gate_up, act, out, nbytes

    @classmethod
    def block_fp8(
        cls, experts: int, rows: int, width: int, hidden: int, scale_format: str, device: torch.device | str
    ) -> Scratch:
        """For `rows` of each expert: gate_up bfloat16 [E, rows, 2·width], act [E, rows, width], out bfloat16
        [E, rows, hidden]. `nbytes`: of all."""
        shapes = (experts, rows, 2 * width), (experts, rows, hidden)
        shared = torch.empty(max(map(prod, shapes)), dtype=torch.bfloat16, device=device)
        gate_up, out = (shared[: prod(shape)].view(shape) for shape in shapes)
        values = torch.empty(experts, rows, width, dtype=torch.float8_e4m3fn, device=device)
        scales = empty_scales(values.shape, scale_format, torch.device(device))
        return cls(gate_up, (values, scales), out, shared.nbytes + values.nbytes + scales.untyped_storage().nbytes())
