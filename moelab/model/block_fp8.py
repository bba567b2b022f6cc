"""`BlockFp8`: the arithmetic of serving. FP8 weights in blocks of 128, bfloat16 stream and cache, our ops.

What a matrix product reads is FP8 with a scale for each 128 values (`moelab.ops.quantize`), made by the kernel that
made the values: by the norm, by silu·mul, or on its own before o_proj. Sums are float32 and rounded once to bfloat16.
Embedding, head, router and norms stay bfloat16, as in DeepSeek's checkpoints. Three sums stay open until the norm that
reads them: the residual stream's with what attention, or the feed-forward with its shared expert, adds to it.

On tensors of the CPU every op is its plain-torch reference, so that this runs anywhere; on a GPU no method waits for
the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moelab.config import ConfigError, ModelConfig
from moelab.model.arithmetic import routing
from moelab.model.scratch import Scratch
from moelab.model.weights import ALL, Source
from moelab.ops.activation import silu_mul_quantize
from moelab.ops.bmm import bmm, split_kv_b
from moelab.ops.fp8 import BLOCK, dequantize_block
from moelab.ops.grouped_gemm_fp8 import grouped_gemm_fp8
from moelab.ops.linear import linear, merge_weights
from moelab.ops.mla_cache import LATENT_DIM, ROPE_DIM, LatentCache
from moelab.ops.norm import add_rms_norm, rms_norm_quantize
from moelab.ops.quantize import Quantized, quantize_rows
from moelab.ops.rope_append import rope_append
from moelab.ops.router import route_fused

if TYPE_CHECKING:
    from moelab.comm.spec import ExchangeSpec
    from moelab.model.batch import State

SCALES = "column_tma"  # what the GEMMs read without a copy


class Fp8Rows(NamedTuple):
    """FP8 rows with their scales; `plain`, the same in bfloat16, where a router reads them."""

    values: Tensor
    scales: Tensor
    plain: Tensor | None = None

    @property
    def pair(self) -> Quantized:
        return self.values, self.scales


class BlockFp8:
    """See above. `Arithmetic`."""

    dtype = torch.bfloat16
    exchange = {"payload": "fp8", "scales": SCALES}

    def __str__(self) -> str:
        return "block FP8"

    def check(self, config: ModelConfig) -> None:
        fixed = {
            "kv_lora_rank": LATENT_DIM, "qk_rope_head_dim": ROPE_DIM, "qk_nope_head_dim": BLOCK, "v_head_dim": BLOCK,
        }  # fmt: skip
        for name, legal in fixed.items():
            if getattr(config, name) != legal:
                raise ConfigError(f"{name} is {getattr(config, name)}: in FP8 it is {legal}, or take Plain arithmetic")
        for name in ("hidden_size", "q_lora_rank", "intermediate_size", "moe_intermediate_size"):
            if getattr(config, name) % BLOCK:
                raise ConfigError(
                    f"{name} is {getattr(config, name)}: in FP8 it is a multiple of {BLOCK}, or take Plain arithmetic"
                )

    def weight(self, source: Source, *names: str, rows: slice = ALL, cols: slice = ALL) -> Quantized:
        parts = [source.quantized(name, rows, cols) for name in names]
        return parts[0] if len(parts) == 1 else merge_weights(parts)

    def experts(self, weights: list[Quantized]) -> Quantized:
        values = torch.stack([values.view(torch.uint8) for values, _ in weights])  # torch on the CPU joins no float8
        return values.view(torch.float8_e4m3fn), torch.stack([scales for _, scales in weights])

    def heads(self, source: Source, name: str, rows: slice) -> tuple[Quantized, Quantized]:
        return split_kv_b(*source.quantized(name, rows))

    def dense(self, weight: Quantized) -> Tensor:
        return dequantize_block(*weight, self.dtype)

    def rows(self, x: Tensor) -> Fp8Rows:
        return Fp8Rows(*quantize_rows(x, SCALES))

    def linear(self, x: Fp8Rows, weight: Quantized) -> Tensor:
        return linear(x.pair, weight)

    def bmm(self, x: Tensor, weight: Quantized) -> Tensor:
        return bmm(x, *weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, weight, eps)

    def norm_rows(self, x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        return Fp8Rows(*rms_norm_quantize(x, weight, eps, scale_format=SCALES))

    def add(self, s: State, *terms: Tensor) -> None:
        s.update = terms

    def norm(self, s: State, weight: Tensor, eps: float, routed: bool = False) -> Fp8Rows:
        x, more = self._open_sum(s)
        plain = torch.empty_like(s.residual) if routed else None
        return Fp8Rows(*rms_norm_quantize(x, weight, eps, scale_format=SCALES, normed=plain, **more), plain)

    def settled(self, s: State, weight: Tensor, eps: float) -> Tensor:
        x, more = self._open_sum(s)
        return add_rms_norm(x, weight, eps, **more)

    def rope_append(self, s: State, cache: LatentCache) -> None:
        rope_append(s.q_pe, s.latent, s.k_pe, s.cos, s.sin, s.batch.slots, cache, out=s.q_pe)

    def route(self, config: ModelConfig, x: Fp8Rows, weight: Tensor, bias: Tensor | None, real: Tensor | None):
        return route_fused(wide_linear(x.plain, weight), bias, real=real, **routing(config))

    def payload(self, x: Fp8Rows) -> tuple[Tensor, Tensor]:
        return x.pair

    def received(self, rows: Tensor, scales: Tensor) -> Fp8Rows:
        return Fp8Rows(rows, scales)

    def scratch(self, config: ModelConfig, spec: ExchangeSpec, device: torch.device | str) -> Scratch:
        width, hidden = config.moe_intermediate_size, config.hidden_size
        return Scratch.block_fp8(spec.local_experts, spec.expert_rows, width, hidden, SCALES, device)

    def silu_mul(self, gate_up: Tensor, counts: Tensor | None = None, out: Quantized | None = None) -> Fp8Rows:
        return Fp8Rows(*silu_mul_quantize(gate_up, counts, SCALES, out=out))

    def grouped(
        self, x: Fp8Rows, weight: Quantized, counts: Tensor, expected_m: int, out: Tensor | None = None
    ) -> Tensor:
        return grouped_gemm_fp8(x.pair, weight, counts, out, expected_m)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return wide_linear(hidden, weight)

    @staticmethod
    def _open_sum(s: State) -> tuple[Tensor, dict[str, Tensor | None]]:
        """What a norm reads: x, and what else it adds. The stream is then settled, in place."""
        terms, s.update = s.update, ()
        if not terms:
            return s.residual, {}
        return terms[0], {"residual": s.residual, "also": terms[1] if len(terms) > 1 else None}


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x bfloat16 [T, K], weight bfloat16 [N, K] -> float32 [T, N]: products exact, sums never rounded to bfloat16."""
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T
