"""Does it fit? Weights, KV cache and communication buffers of one GPU against its memory.

    W  = Σ over components of bytes / (1, TP or EP)                                      weights
    KV = B · kv · L·(kv_lora + rope)·2                      whole on each TP rank: MLA's latent has no heads
    fits if W + KV + buffers <= capacity · (1 − reserve)

`capacity` is read from a device or stated, never guessed: "80 GB" and "141 GB" are nearer to GiB, and the
difference decides whether an H200 holds 81 requests of 5,000 tokens or 105. `reserve` is what the runtime keeps:
activations, graphs, fragmentation; 7 % in the checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moelab.config import ConfigError, ModelConfig, ParallelConfig
from moelab.perf.params import components

KV_ITEMSIZE = 2  # BF16


def weight_parts(model: ModelConfig, parallel: ParallelConfig, mtp: bool = True) -> dict[str, float]:
    """{part: bytes of weights on one GPU}; the MTP layer's are one part of their own, "MTP layer"."""
    parallel.check(model)
    parts: dict[str, float] = {}
    for c in components(model):
        if c.mtp and not mtp:
            continue
        part = "MTP layer" if c.mtp else c.part
        parts[part] = parts.get(part, 0.0) + c.per_gpu(parallel) * c.itemsize
    return parts


def weight_bytes(model: ModelConfig, parallel: ParallelConfig, mtp: bool = True) -> float:
    """W: bytes of weights on one GPU."""
    return sum(weight_parts(model, parallel, mtp).values())


def kv_bytes_per_token(model: ModelConfig, mtp: bool = False) -> int:
    """Cache of one token in all layers, 70,272 bytes for DeepSeek-V3; `mtp`: with the MTP layer's own row."""
    layers = model.num_hidden_layers + (model.num_nextn_predict_layers if mtp else 0)
    return layers * model.latent_dim * KV_ITEMSIZE


def deep_ep_buffer_bytes(model: ModelConfig, max_tokens: int) -> int:
    """DeepEP's low-latency buffer for M = `max_tokens` per rank (csrc/legacy/config.hpp, deepseek-ai/DeepEP):
    2·[max(M·d, E·M·c) + E·M·max(d, c) + 4E], a dispatch message d of BF16 values and a header, a combine
    message c of BF16 values and scales. Twice, for two exchanges in flight."""
    hidden, experts = model.hidden_size, model.n_routed_experts
    d = 2 * hidden + 16
    c = 2 * hidden + 4 * math.ceil(hidden / 128)
    return 2 * (max(max_tokens * d, experts * max_tokens * c) + experts * max_tokens * max(d, c) + 4 * experts)


@dataclass(frozen=True)
class Fit:
    """What one GPU has room for. Bytes; `batch` is the largest B of a DP group, 0 if not one request fits."""

    capacity: float
    reserve: float  # fraction of the capacity
    weights: float
    buffers: float
    kv_per_request: float

    @property
    def room(self) -> float:
        """Bytes left for KV; negative when the weights alone do not fit."""
        return self.capacity * (1 - self.reserve) - self.weights - self.buffers

    @property
    def batch(self) -> int:
        return max(0, math.floor(self.room / self.kv_per_request))

    @property
    def weights_fit(self) -> bool:
        return self.room >= 0


def fit(
    model: ModelConfig,
    parallel: ParallelConfig,
    kv_len: int,
    capacity: float,
    reserve: float,
    buffers: float = 0.0,
    mtp: bool = True,
    mtp_kv: bool = False,
) -> Fit:
    """Room for requests of `kv_len` tokens on a GPU of `capacity` bytes, of which the fraction `reserve` is kept
    free. `mtp`: weights of the MTP layer are loaded; `mtp_kv`: it keeps a cache of its own. Raises ConfigError."""
    if kv_len < 1:
        raise ConfigError(f"kv_len is {kv_len}: give 1 or more")
    if not (capacity > 0 and 0 <= reserve < 1):
        raise ConfigError(f"capacity is {capacity:g} bytes and reserve {reserve:g}: legal are > 0 and 0 <= … < 1")
    weights = weight_bytes(model, parallel, mtp)
    return Fit(capacity, reserve, weights, buffers, kv_len * kv_bytes_per_token(model, mtp_kv))
