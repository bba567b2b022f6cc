"""Will it fit? What one rank of the engine allocates, counted before it does.

    weights      the tensors of this rank as its arithmetic holds them: in the dtype of `Plain`; by `BlockFp8` one byte
                 a value of a linear layer and four for each block of 128 × 128, the others two
    KV cache     pages · 64 · layers · bytes of a row               whole on each TP rank, MTP's layer too
    exchange     slots · L · dp·M · (row + its scales), and what a backend has beside (`window_bytes`)
    activations  L · dp·M · (gate_up + act + output)                of one layer: each goes as soon as it is read, the
                                                                    next layer's takes its place; in block FP8 the
                                                                    output stands where gate_up did
    attention    what `attention_bytes` counts, where it is asked for

with L experts on the rank, M the most tokens of a DP group in a step. Small things (logits, the exchange's messages,
graphs, loaded kernels) are left to the reserve.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moelab.config import ModelConfig, MoelabError, ParallelConfig
from moelab.engine.kv_cache import PAGE_SIZE, pages_for
from moelab.model.arithmetic import Arithmetic, Plain
from moelab.model.block_fp8 import BlockFp8
from moelab.model.weights import tensor_shapes
from moelab.ops.fp8 import BLOCK, num_blocks
from moelab.ops.layout import round_up

RESERVE = 0.07  # share of the free memory for what is not counted; as in the performance model
SLOTS = 2  # of the model's exchange
CUT_BY_HEADS = ("q_b_proj", "kv_b_proj", "o_proj")


class OutOfMemory(MoelabError):
    """What is asked for would not fit; nothing was allocated."""


@dataclass(frozen=True)
class Need:
    """Bytes on one rank."""

    weights: int
    kv_cache: int
    exchange: int
    activations: int
    page: int  # a page of the cache in all layers
    attention: int = 0

    @property
    def parts(self) -> dict[str, int]:
        found = {"weights": self.weights, "KV cache": self.kv_cache, "exchange": self.exchange}
        found["activations"] = self.activations
        return found | ({"attention": self.attention} if self.attention else {})

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, capacity: float, reserve: float = RESERVE) -> bool:
        """Into `capacity` bytes, of which the share `reserve` is kept free."""
        return self.total <= capacity * (1 - reserve)

    def batch(self, capacity: float, kv_len: int) -> int:
        """Requests of `kv_len` tokens whose cache fits beside the rest, 0 or fewer if not one does."""
        room = capacity * (1 - RESERVE) - (self.total - self.kv_cache)
        return int(room // (pages_for(kv_len) * self.page))

    def check(self, capacity: float, kv_len: int, reserve: float = RESERVE, batch: int | None = None) -> None:
        """Raise `OutOfMemory` unless it `fits`; with the arithmetic, and the batch of requests of `kv_len` tokens that
        would fit: `batch`, or else what fits beside the rest as it is."""
        if self.fits(capacity, reserve):
            return
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in self.parts.items())
        batch = self.batch(capacity, kv_len) if batch is None else batch
        fix = (
            f"a DP group's batch of {batch} requests of {kv_len} tokens would fit: give the cache fewer tokens"
            if batch > 0
            else "not one request would fit: spread the experts over more ranks, or take fewer tokens in a step"
        )
        raise OutOfMemory(
            f"a rank needs {_gb(self.total)} GB ({parts}) and has {_gb(capacity)} GB, of which {_percent(reserve)} are "
            f"kept free; {fix}"
        )


def need(
    config: ModelConfig,
    parallel: ParallelConfig,
    arithmetic: Arithmetic | torch.dtype,
    max_tokens: int,
    cache_tokens: int,
    *,
    kv_dtype: str | None = None,
    window_bytes: int = 0,
    attention: int = 0,
) -> Need:
    """What `DeepSeek.load` and `Engine` allocate for these arguments; a dtype stands for `Plain` arithmetic in it.

    `kv_dtype` "fp8": a cache of `Fp8Cache` (`moelab.ops.mla_cache`) in place of one in the arithmetic's dtype.
    `window_bytes`: of the exchange beside its slots' rows, as its backend says. `attention`: bytes, counted with the
    others.
    """
    arithmetic = Plain(arithmetic) if isinstance(arithmetic, torch.dtype) else arithmetic
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    page = layers * PAGE_SIZE * _cache_row(config, arithmetic, kv_dtype)
    experts, rows = config.n_routed_experts // parallel.ep, parallel.dp * max_tokens
    return Need(
        weights=weight_bytes(config, parallel, arithmetic),
        kv_cache=pages_for(cache_tokens) * page,
        exchange=SLOTS * experts * _received(config, arithmetic, rows) + window_bytes,
        activations=experts * expert_bytes(config, arithmetic, rows),
        page=page,
        attention=attention,
    )


def largest_batch(needs: Callable[[int], Need], capacity: float, reserve: float = RESERVE) -> int:
    """The largest batch B whose `needs(B)`, rising in B, fit into `capacity` bytes less the reserve; 0 if none does."""
    high = 1
    while needs(high).fits(capacity, reserve):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle).fits(capacity, reserve) else (low, middle)
    return low


def weight_bytes(config: ModelConfig, parallel: ParallelConfig, arithmetic: Arithmetic) -> int:
    """Of the tensors that `DeepSeek.load` keeps on one rank."""
    return _weight_bytes(config, parallel, isinstance(arithmetic, BlockFp8), arithmetic.dtype.itemsize)


@functools.lru_cache(maxsize=8)
def _weight_bytes(config: ModelConfig, parallel: ParallelConfig, in_fp8: bool, itemsize: int) -> int:
    shapes = dict(tensor_shapes(config.replace(weight_block_size=(BLOCK, BLOCK))))  # scales tell what is linear
    total = 0
    for name, shape in shapes.items():
        expert = name.partition(".mlp.experts.")[2]
        if name.endswith("_scale_inv") or (expert and not expert.startswith("0.")):
            continue
        scales = shapes.get(f"{name}_scale_inv")
        if in_fp8 and scales:
            size = _count(shape) + 4 * _count(scales)
        else:
            size = _count(shape) * (4 if name.endswith("e_score_correction_bias") else itemsize)
        if expert:
            size *= config.n_routed_experts // parallel.ep
        total += size // (parallel.tp if name.split(".")[-2] in CUT_BY_HEADS else 1)
    return total


def expert_bytes(config: ModelConfig, arithmetic: Arithmetic, rows: int) -> int:
    """What an expert computes in, with room for so many rows: gate_up, act and output (`moelab.model.scratch`)."""
    width, hidden, size = config.moe_intermediate_size, config.hidden_size, arithmetic.dtype.itemsize
    if not isinstance(arithmetic, BlockFp8):
        return rows * (3 * width + hidden) * size
    return rows * (max(2 * width, hidden) * size + width) + 4 * round_up(rows, 4) * num_blocks(width)


def attention_bytes(config: ModelConfig, parallel: ParallelConfig, arithmetic: Arithmetic, tokens: int) -> int:
    """Activations of one layer outside the experts, for `tokens` of the DP group: q, what it is after absorption and
    after attention, the first of them twice, since a layer's goes when the next one's is there, and what o_proj reads;
    gate and up of a dense layer; and eight times the residual stream, what norms and projections make of it."""
    heads = config.num_attention_heads // parallel.tp
    per_head = config.qk_head_dim + 3 * config.kv_lora_rank + config.v_head_dim
    dense = 2 * config.intermediate_size if config.first_k_dense_replace else 0
    return tokens * (heads * per_head + dense + 8 * config.hidden_size) * arithmetic.dtype.itemsize


def available_bytes(device: str, ranks_here: int = 1) -> int:
    """Memory that one of `ranks_here` ranks, which share this machine's memory or this GPU, may still take."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // ranks_here
    meminfo = Path("/proc/meminfo")  # Linux counts there what it would give up; elsewhere all there is
    if meminfo.exists():
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024 // ranks_here
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_here


def _cache_row(config: ModelConfig, arithmetic: Arithmetic, kv_dtype: str | None) -> int:
    """Bytes of a token's row in one layer."""
    if kv_dtype == "fp8":
        return config.kv_lora_rank + 4 * num_blocks(config.kv_lora_rank) + 2 * config.qk_rope_head_dim
    return config.latent_dim * arithmetic.dtype.itemsize


def _received(config: ModelConfig, arithmetic: Arithmetic, rows: int) -> int:
    """Bytes of an expert's room for `rows`: values, and in FP8 their scales, whose columns are rounded up to 4 rows."""
    if not isinstance(arithmetic, BlockFp8):
        return rows * config.hidden_size * arithmetic.dtype.itemsize
    return rows * config.hidden_size + 4 * round_up(rows, 4) * num_blocks(config.hidden_size)


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"
