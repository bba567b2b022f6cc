"""FLOP and bytes of every op of a layer, and the least time they take.

    op              FLOP                         bytes
    linear          2·m·n·k                      m·k + n·k + 2·m·n           FP8 in, BF16 out
    bmm             2·t·h·n·k                    h·(n·k + 128t + 1024t)      h heads, each [t, k] × [k, n]
    mla             2·B·q·h·kv·(576 + 512)       B·kv·1152                   BF16; the latent has no heads
    grouped_gemm    2·rows·X                     a·X + rows·(H + 5I + 2H)    a activated experts, X = 3·H·I
    gate            2·t·E·H                      2·(E·H + t·H) + 4·t·E       BF16 in, float32 out

Both absorbed BMMs of MLA move the same bytes: k [t, 128] × [128, 512] reads FP8 and writes BF16, v [t, 512] × [512,
128] reads what attention wrote in BF16 and hands on FP8. Of the
grouped GEMM's activations H is read, 4I written by gate and up (BF16), I read by down (FP8), 2H written.

MLA does 242·q·h/128 FLOP a byte: at 128 heads and q = 2 it is bound by the tensor cores of every Hopper GPU.

`roofline_us` is max(FLOP / peak, bytes / bandwidth): the floor under every measurement. Scales of block FP8 (3 % of
what they scale) are left out. Source of the shapes: DeepSeek-V3's config.json; arXiv 2405.04434 for the absorption.
"""

from __future__ import annotations

from dataclasses import dataclass

from moelab.config import ModelConfig
from moelab.hardware import GPU


@dataclass(frozen=True)
class Cost:
    """What an op does at least; `precision` names the tensor cores that it runs on (fp8, bf16, fp4)."""

    flops: float
    bytes: float
    precision: str = "fp8"

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.precision)


def peak_tflops(gpu: GPU, precision: str) -> float:
    """Of the tensor cores, dense. Hopper has no FP4; Blackwell's FP4 peak is twice its FP8 peak."""
    return {"fp8": gpu.fp8_tflops, "bf16": gpu.bf16_tflops, "fp4": 2 * gpu.fp8_tflops}[precision]


def roofline_us(cost: Cost, gpu: GPU) -> float:
    """The least time in us: FLOP at peak or bytes at the HBM's rate, whichever takes longer."""
    return max(cost.flops / peak_tflops(gpu, cost.precision) / 1e6, cost.bytes / gpu.hbm_gb_s / 1e3)


def linear(m: float, n: int, k: int, precision: str = "fp8") -> Cost:
    """[m, k] × [k, n]; inputs and weights of one byte in FP8, two in BF16, output BF16."""
    size = {"fp8": 1, "bf16": 2}[precision]
    return Cost(2 * m * n * k, size * (m * k + n * k) + 2 * m * n, precision)


def bmm(t: float, heads: int, n: int, k: int) -> Cost:
    """The narrow side (128 values of a head) in FP8, the latent's side (512) in BF16, whichever is the input."""
    return Cost(2 * t * heads * n * k, heads * (n * k + t * (min(n, k) + 2 * max(n, k))))


def mla(batch: float, q_len: float, heads: int, kv_len: float, model: ModelConfig, itemsize: int = 2) -> Cost:
    """Absorbed decode attention over the latent cache, `itemsize` 2 for BF16, 1 for FP8. Both count at BF16's peak:
    on H100 TensorRT-LLM's kernel reaches 600 TFLOP/s over a BF16 cache and 700 over an FP8 one."""
    flops = 2 * batch * q_len * heads * kv_len * (model.latent_dim + model.kv_lora_rank)
    return Cost(flops, batch * kv_len * model.latent_dim * itemsize, "bf16")


def grouped_gemm(rows: float, active: float, model: ModelConfig, cut: int = 1, precision: str = "fp8") -> Cost:
    """Both grouped GEMMs of `active` experts for `rows` (token, expert) pairs. `cut`: each expert's I is cut over
    this many GPUs. `precision` fp4: weights of half a byte."""
    hidden, width = model.hidden_size, model.moe_intermediate_size / cut
    weights = 3 * hidden * width * (0.5 if precision == "fp4" else 1)
    moved = active * weights + rows * (hidden + 5 * width + 2 * hidden)
    return Cost(2 * rows * 3 * hidden * width, moved, precision)


def gate(t: float, model: ModelConfig) -> Cost:
    experts, hidden = model.n_routed_experts, model.hidden_size
    return Cost(2 * t * experts * hidden, 2 * (experts * hidden + t * hidden) + 4 * t * experts, "bf16")


def attention_shapes(model: ModelConfig, tp: int = 1) -> dict[str, tuple[int, int]]:
    """{stage: (n, k)} of attention's dense GEMMs on one TP rank. qkv_a comes before the heads divide."""
    heads = model.num_attention_heads // tp
    return {
        "qkv_a": (model.q_lora_rank + model.latent_dim, model.hidden_size),
        "q_b": (heads * model.qk_head_dim, model.q_lora_rank),
        "o_proj": (model.hidden_size, heads * model.v_head_dim),
    }


def bmm_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """{stage: (n, k)} of one head's absorbed projections."""
    return {
        "bmm_k": (model.kv_lora_rank, model.qk_nope_head_dim),
        "bmm_v": (model.v_head_dim, model.kv_lora_rank),
    }


def mlp_shapes(model: ModelConfig, width: int, cut: int = 1) -> dict[str, tuple[int, int]]:
    """{up, down: (n, k)} of a SwiGLU MLP of inner `width`, cut over `cut` GPUs; gate and up are one GEMM."""
    return {"up": (2 * width // cut, model.hidden_size), "down": (model.hidden_size, width // cut)}
