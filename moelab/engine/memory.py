"""Will it fit? What one rank of the engine allocates, counted before it does.

    weights      Σ parameters of this rank · itemsize         dequantised as they are loaded (`moelab.perf.params`)
    KV cache     pages · 64 · (kv_lora + rope) · layers · itemsize           whole on each TP rank, MTP's layer too
    exchange     slots · L · dp·M · H · itemsize                             rows received, a buffer for each slot
    activations  L · dp·M · (parts · (3I + H) + 2I) · itemsize               gate_up, act and output of each micro-batch
                                                                             in flight, and one more gate_up on its way

with L experts on the rank, M the most tokens of a DP group in a step, H hidden, I an expert's width. Small things
(attention's activations, logits, the exchange's messages) are left to the reserve.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from moelab.config import ModelConfig, MoelabError, ParallelConfig
from moelab.engine.kv_cache import PAGE_SIZE, pages_for
from moelab.perf.params import components

RESERVE = 0.07  # share of the free memory for what is not counted; as in the performance model
SLOTS = 2  # of the model's exchange


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

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.exchange + self.activations

    def batch(self, capacity: float, kv_len: int) -> int:
        """Requests of `kv_len` tokens whose cache fits beside the rest, 0 or fewer if not one does."""
        room = capacity * (1 - RESERVE) - (self.total - self.kv_cache)
        return int(room // (pages_for(kv_len) * self.page))

    def check(self, capacity: float, kv_len: int) -> None:
        """Raise `OutOfMemory` unless all fits into `capacity` bytes less the reserve; with the arithmetic, and the
        batch of requests of `kv_len` tokens that would fit."""
        if self.total <= capacity * (1 - RESERVE):
            return
        parts = f"weights {_gb(self.weights)}, KV cache {_gb(self.kv_cache)}, exchange {_gb(self.exchange)}, "
        parts += f"activations {_gb(self.activations)}"
        batch = self.batch(capacity, kv_len)
        fix = (
            f"a DP group's batch of {batch} requests of {kv_len} tokens would fit: give the cache fewer tokens"
            if batch > 0
            else "not one request would fit: spread the experts over more ranks, or take fewer tokens in a step"
        )
        raise OutOfMemory(
            f"a rank needs {_gb(self.total)} GB ({parts}) and has {_gb(capacity)} GB, of which {RESERVE:.0%} are kept "
            f"free; {fix}"
        )


def need(
    config: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    max_tokens: int,
    cache_tokens: int,
    overlap: str = "none",
) -> Need:
    """What `DeepSeek.load` and `Engine` allocate for these arguments."""
    mtp = config.num_nextn_predict_layers
    weights = sum(c.per_gpu(parallel) for c in components(config)) * dtype.itemsize
    page = (config.num_hidden_layers + mtp) * PAGE_SIZE * config.latent_dim * dtype.itemsize
    rows = config.n_routed_experts // parallel.ep * parallel.dp * max_tokens * dtype.itemsize
    width, hidden = config.moe_intermediate_size, config.hidden_size
    parts = 2 if overlap == "microbatch" else 1
    return Need(
        weights=int(weights),
        kv_cache=pages_for(cache_tokens) * page,
        exchange=SLOTS * rows * hidden,
        activations=rows * (parts * (3 * width + hidden) + 2 * width),
        page=page,
    )


def available_bytes(device: str, ranks_here: int = 1) -> int:
    """Memory that one of `ranks_here` ranks, which share this machine's memory or this GPU, may still take."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // ranks_here
    meminfo = Path("/proc/meminfo")  # Linux counts there what it would give up; elsewhere all there is
    if meminfo.exists():
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024 // ranks_here
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_here


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"
