"""Two equal ways to attend to a latent cache, and what each has to do (the algebra is in `moelab.model.mla`).

For one request with q new tokens, kv cached rows and h heads, in one layer:

    absorbed   bmm_k, bmm_v   4·q·h·128·512 FLOP              weights once
               attention      2·q·h·kv·(576 + 512)            576 values a row, for all heads
    expanded   kv_b           2·kv·h·(128 + 128)·512          makes k and v of every head: 256·h values a row, written
               attention      2·q·h·kv·(192 + 128)            and read again, beside 64 of the rotary part

Expanding is paid per cached row, absorbing per new token: 1088 − 320 FLOP more for each pair of them. They meet where

    q·(2·(1088 − 320)·kv + 4·128·512) = 2·kv·256·512,    q = 171 for long caches, whatever the number of heads.

A decode step has one to four new tokens, a prefill's chunk hundreds. A *kept* expansion (the cache of plain multi-head
attention) pays no kv_b in decode, but its cache is 320·h values a row instead of 576: 71 times as many at 128 heads,
each read in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from moelab.config import ModelConfig
from moelab.hardware import GPU
from moelab.perf import costs
from moelab.perf.costs import Cost

WAYS = ("absorbed", "expanded", "kept")


@dataclass(frozen=True)
class Way:
    """What a way launches, one after another."""

    kernels: dict[str, Cost]

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.kernels.values())

    @property
    def bytes(self) -> float:
        return sum(cost.bytes for cost in self.kernels.values())

    def least_us(self, gpu: GPU) -> float:
        """Every kernel under its roof."""
        return sum(costs.roofline_us(cost, gpu) for cost in self.kernels.values())


def ways(model: ModelConfig, q_len: float, kv_len: float, batch: float = 1, heads: int | None = None) -> dict[str, Way]:
    """{name of WAYS: what it does} for one layer; every query sees all `kv_len` rows. `heads`: of one GPU."""
    heads = heads or model.num_attention_heads
    tokens, rows = batch * q_len, batch * kv_len
    absorbed = {name: costs.bmm(tokens, heads, n, k) for name, (n, k) in costs.bmm_shapes(model).items()}
    absorbed["attention"] = costs.mla(batch, q_len, heads, kv_len, model)
    made = heads * (model.qk_nope_head_dim + model.v_head_dim)
    weights = made * model.kv_lora_rank
    expand = Cost(2 * rows * weights, weights + 2 * rows * (model.kv_lora_rank + made))
    width = model.qk_head_dim + model.v_head_dim
    flops = 2 * tokens * heads * kv_len * width
    plain = Cost(flops, 2 * rows * (made + model.qk_rope_head_dim), "bf16")
    kept = Cost(flops, 2 * rows * heads * width, "bf16")
    return {
        "absorbed": Way(absorbed),
        "expanded": Way({"kv_b": expand, "attention": plain}),
        "kept": Way({"attention": kept}),
    }


def crossing(model: ModelConfig, kv_len: float) -> float:
    """New tokens of a request from which expanding takes fewer FLOP than absorbing."""
    per_row = 2 * kv_len * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank
    more = 2 * kv_len * (model.latent_dim + model.kv_lora_rank - model.qk_head_dim - model.v_head_dim)
    return per_row / (more + 2 * (model.qk_nope_head_dim + model.v_head_dim) * model.kv_lora_rank)


def crossing_us(model: ModelConfig, kv_len: float, gpu: GPU, batch: float = 1) -> float:
    """The same by the least times on `gpu`, found by halving; between 1 and kv_len tokens."""
    low, high = 1.0, float(kv_len)
    while high - low > 0.5:
        middle = (low + high) / 2
        way = ways(model, middle, kv_len, batch)
        longer = way["absorbed"].least_us(gpu) > way["expanded"].least_us(gpu)
        low, high = (low, middle) if longer else (middle, high)
    return high


def cache_bytes(model: ModelConfig) -> dict[str, int]:
    """{latent, expanded: bytes of one token in one layer}, BF16."""
    expanded = model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)
    return {"latent": 2 * model.latent_dim, "expanded": 2 * expanded}
