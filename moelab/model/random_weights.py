"""`RandomWeights`: a source of weights that needs no files, for timing a model of any size on the device at hand.

Made when asked for, on the device, FP8 as FP8: a value is e4m3 of a normal draw with σ = 112, which is how a block of
128 × 128 normal weights comes out of quantisation (its largest of 16,384 is about 4σ, and maps to 448); scales are such
that a weight has variance 1/K, K its whole number of columns, times a factor for each block. So whatever goes in with
variance one comes out with about that, in each layer anew after its norm, and the residual stream grows like the square
root of the number of layers. Draws pass through a buffer of PIECE values: nothing as large as a layer stands beside it.

What is drawn depends on the seed, the name, the slice and the kind of device, on nothing else. A slice is drawn at its
own size and is no part of what the whole would be, so two ranks that cut differently hold different models. Each alone
may be timed; together they compute nothing.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from moelab.config import ModelConfig
from moelab.model.weights import ALL, CheckpointError, tensor_shapes
from moelab.ops.fp8 import E4M3_MAX, dequantize_block, num_blocks
from moelab.ops.quantize import Quantized

PIECE = 1 << 25  # values drawn at a time; 64 MiB in bfloat16
SIGMA = E4M3_MAX / 4  # of the e4m3 values
BLOCKS_DIFFER = 0.1  # a block's scale is within this of the mean


class RandomWeights:
    """A `Source` for `config` on `device`; `dtype` is what `tensor` and `linear` return."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config, self.device, self.seed, self.dtype = config, torch.device(device), seed, dtype
        self._shapes = dict(tensor_shapes(config))

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole unquantised tensor. Norms are 1 ± 0.1, the router's bias 0 ± 0.01, embeddings of variance one, other
        matrices of variance 1/K."""
        shape, draws = self._shape(name), self._draws(name)
        if len(shape) == 1:
            values = torch.empty(shape, device=self.device).normal_(generator=draws)
            values = 0.01 * values if name.endswith("bias") else 1 + 0.1 * values
            return values.to(dtype or self.dtype)
        std = 1.0 if name.endswith("embed_tokens.weight") else shape[1] ** -0.5
        values = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, std, generator=draws)
        return values.to(dtype or self.dtype)

    def linear(self, name: str, rows: slice = ALL, cols: slice = ALL) -> Tensor:
        """`quantized`, dequantised to `dtype`; also for a configuration without quantisation."""
        return dequantize_block(*self.quantized(name, rows, cols), self.dtype)

    def quantized(self, name: str, rows: slice = ALL, cols: slice = ALL) -> Quantized:
        whole = self._shape(f"{name}.weight")
        shape = [len(range(*part.indices(size))) for part, size in zip((rows, cols), whole, strict=True)]
        draws = self._draws(name, rows, cols)
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        buffer = torch.empty(min(PIECE, values.numel()), dtype=torch.bfloat16, device=self.device)
        for piece in values.view(-1).split(PIECE):
            drawn = buffer[: piece.numel()].normal_(0, SIGMA, generator=draws)
            piece.copy_(drawn.clamp_(-E4M3_MAX, E4M3_MAX))  # beyond 448 the cast would make NaN
        scales = torch.empty([num_blocks(size) for size in shape], device=self.device)
        scales.uniform_(1 - BLOCKS_DIFFER, 1 + BLOCKS_DIFFER, generator=draws)
        return values, scales.mul_(whole[1] ** -0.5 / SIGMA)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise CheckpointError(f"{name}: this configuration has no such tensor; it holds {len(self._shapes)} others")
        return self._shapes[name]

    def _draws(self, name: str, *cut: slice) -> torch.Generator:
        key = f"{self.seed} {name} {[(part.start, part.stop) for part in cut]}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)
