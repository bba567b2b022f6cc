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
from moelab.perf.params import Component, components

KV_ITEMSIZE = 2  # BF16
TP_ONLY = ("embedding", "head", "dense MLP", "shared expert")  # cut as well where a TP group is the whole instance


def check_slots(model: ModelConfig, parallel: ParallelConfig, redundant: int) -> None:
    """Raise ConfigError unless E routed experts and `redundant` copies fill all GPUs alike; names what would."""
    experts, ep = model.n_routed_experts, parallel.ep
    if redundant < 0:
        raise ConfigError(f"redundant experts are {redundant}: legal are 0, 1, …")
    if (experts + redundant) % ep == 0 and experts + redundant >= ep:
        return
    legal = [d for d in range(1, experts + redundant + 1) if (experts + redundant) % d == 0]
    nearest = min(legal, key=lambda d: (abs(d - ep), d))
    fill = -experts % ep or (0 if experts >= ep else ep - experts)
    slots = f"{experts} experts" + (f" and {redundant} redundant" if redundant else "")
    raise ConfigError(
        f"ep = dp·tp is {ep}: {slots} divide only over {', '.join(map(str, legal))} GPUs; "
        f"nearest legal: ep {nearest}, or {fill} redundant experts ({(experts + fill) // ep} on each of {ep} GPUs)"
    )


def check_heads(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError unless the heads can be cut over the TP ranks, as `ParallelConfig.check` does for any EP."""
    parallel.check(model.replace(n_routed_experts=parallel.ep, n_group=1, topk_group=1, num_experts_per_tok=1))


def weight_parts(
    model: ModelConfig,
    parallel: ParallelConfig,
    mtp: bool = True,
    redundant: int = 0,
    expert_tp: bool = False,
    expert_itemsize: float = 1.0,
) -> dict[str, float]:
    """{part: bytes of weights on one GPU}; the MTP layer's are one part of their own, "MTP layer". `redundant`
    copies of experts fill slots beside the E (EP72 and EP144 need 32). `expert_tp`: every expert is cut over all GPUs
    instead of standing on one of them, and TP_ONLY over the TP ranks. `expert_itemsize`: 0.5 for FP4."""
    if not expert_tp:
        check_slots(model, parallel, redundant)
    check_heads(model, parallel)
    parts: dict[str, float] = {}
    for c in components(model):
        if c.mtp and not mtp:
            continue
        part = "MTP layer" if c.mtp else c.part
        size = _per_gpu(c, model, parallel, redundant, expert_tp)
        parts[part] = parts.get(part, 0.0) + size * (expert_itemsize if c.cut == "ep" else c.itemsize)
    return parts


def _per_gpu(c: Component, model: ModelConfig, parallel: ParallelConfig, redundant: int, expert_tp: bool) -> float:
    if c.cut == "ep":
        return c.per_gpu(parallel) * (1 + redundant / model.n_routed_experts)
    return c.per_gpu(parallel) / (parallel.tp if expert_tp and c.part in TP_ONLY else 1)


def weight_bytes(model: ModelConfig, parallel: ParallelConfig, mtp: bool = True, **cut) -> float:
    """W: bytes of weights on one GPU; `cut` as in `weight_parts`."""
    return sum(weight_parts(model, parallel, mtp, **cut).values())


def kv_bytes_per_token(model: ModelConfig, mtp: bool = False, itemsize: int = KV_ITEMSIZE) -> int:
    """Cache of one token in all layers, 70,272 bytes for DeepSeek-V3; `mtp`: with the MTP layer's own row."""
    layers = model.num_hidden_layers + (model.num_nextn_predict_layers if mtp else 0)
    return layers * model.latent_dim * itemsize


def deep_ep_buffer_bytes(model: ModelConfig, max_tokens: int) -> int:
    """DeepEP's low-latency buffer for M = `max_tokens` per rank (csrc/legacy/config.hpp, deepseek-ai/DeepEP):
    2·[max(M·d, E·M·c) + E·M·max(d, c) + 4E], a dispatch message d of BF16 values and a header, a combine
    message c of BF16 values and scales. Twice, for two exchanges in flight."""
    hidden, experts = model.hidden_size, model.n_routed_experts
    d = 2 * hidden + 16
    c = 2 * hidden + 4 * math.ceil(hidden / 128)
    return 2 * (max(max_tokens * d, experts * max_tokens * c) + experts * max_tokens * max(d, c) + 4 * experts)


def pplx_buffer_bytes(model: ModelConfig, parallel: ParallelConfig, max_tokens: int) -> int:
    """pplx-kernels' symmetric buffers for M = `max_tokens` per DP group (perplexityai/pplx-kernels): tokens to send
    and private regions of every source, dispatch rows of t bytes, and float32 rows of combine on both sides:
    M·t + l·DP·M·t + 4·l·DP·M·H + 4·M·E·H, l experts on each GPU."""
    hidden, experts = model.hidden_size, model.n_routed_experts
    row = 16 * math.ceil((hidden + 4 * math.ceil(hidden / 128) + 4) / 16)
    regions = experts / parallel.ep * parallel.dp * max_tokens
    return int(max_tokens * row + regions * row + 4 * regions * hidden + 4 * max_tokens * experts * hidden)


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
