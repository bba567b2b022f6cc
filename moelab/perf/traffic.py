"""Bytes that a layer moves between GPUs, in each way of dividing the work. Expectations, for balanced routing;
`moelab.comm.traffic` counts the same for a given routing.

What stands here is what one GPU *receives* in one layer, from any other GPU, when each of DP groups brings t
tokens (T = t·DP in all). With a dispatched row of d bytes and an output row of c bytes:

| scheme          | attention        | dispatch                    | combine               | experts' inputs come from |
|-----------------|------------------|-----------------------------|-----------------------|---------------------------|
| expert-major    | 2(TP−1)/TP·t·c   | t/TP·k·d·(1−1/EP)           | t·k·c·(1−1/EP)        | a row per (token, expert) |
| per rank        | same             | t/TP·D·(d+8k)·(1−1/EP)      | t·D·c·(1−1/EP)        | a row per (token, rank)   |
| padded          | same             | (EP−1)·⌈t/TP⌉·min(k, e)·d   | (EP−1)·t·min(k, e)·c  | worst-case blocks         |
| gather all      | same             | (T − t/TP)·d                | (EP−1)·t·c            | every token, everywhere   |
| EP, replicated  | 0                | 0                           | 2(EP−1)/EP·T·c        | a router on every rank    |
| EP, unfused     | 0                | 0                           | T·k·c·(1−1/EP)        | a router on every rank    |
| EP, broadcast   | 0                | T·(d+8k)                    | T·k·c·(1−1/EP)        | one router, one attention |
| TP only         | 2(EP−1)/EP·T·c   | (EP−1)/EP·T·c               | (EP−1)/EP·T·c         | all-gather of the tokens  |

D is the expected number of distinct ranks of a token (experts.destinations), 8k its ids and weights.

*DP groups* (the first four): attention of a group's t tokens is cut over its TP ranks, which all-reduce; of the
sending each takes a share t/TP, but every one receives the whole result, so combine does not shrink with TP.
*EP only*: all attention happens once (repeated on all ranks, or on one while the rest idles), and T tokens are
everywhere, or are sent everywhere. Nothing routed is sent where the router is repeated; then the experts' outputs
must reach every rank: one by one, or summed on the way (fused, an all-reduce). With one router the busiest GPU
of combine is that router's.
*TP only*: attention is cut by heads over all ranks. An all-gather brings every token to every rank, a
reduce-scatter takes the partial sums home, once for attention and once for the experts. Heads end this way: below
two heads a rank there is nothing left to cut.

Source of the schemes: "Efficient and portable mixture-of-experts communication", 2025-04-02.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moelab.config import ConfigError, ModelConfig, ParallelConfig
from moelab.perf.experts import destinations

SCHEMES = (
    "expert-major", "per rank", "padded", "gather all", "EP, replicated", "EP, unfused", "EP, broadcast", "TP only",
)  # fmt: skip
HEADER_BYTES = 16  # of a dispatched row, as DeepEP packs it: whose token it is


def dispatch_row_bytes(model: ModelConfig) -> int:
    """d: one token on its way to an expert: FP8 values, a float32 scale for 128 of them, a header."""
    return model.hidden_size + 4 * math.ceil(model.hidden_size / 128) + HEADER_BYTES


def combine_row_bytes(model: ModelConfig) -> int:
    """c: one expert's output for a token, BF16."""
    return 2 * model.hidden_size


def dispatch_bytes_per_token(model: ModelConfig) -> int:
    """k·d: 59,264 for DeepSeek-V3, to wherever, the own rank included."""
    return model.num_experts_per_tok * dispatch_row_bytes(model)


def combine_bytes_per_token(model: ModelConfig) -> int:
    """k·c: 114,688 for DeepSeek-V3."""
    return model.num_experts_per_tok * combine_row_bytes(model)


def off_node_share(parallel: ParallelConfig) -> float:
    """φ: the part of the rows that leave the node, 1 − (GPUs per node)/EP; on one node what leaves the GPU."""
    return 1 - min(parallel.gpus_per_node, parallel.ep) / parallel.ep or 1 - 1 / parallel.ep


def wire_floor_us(
    bytes_per_token: float, tokens: int, parallel: ParallelConfig, nvlink_gb_s: float = 450, nic_gb_s: float = 50
) -> float:
    """The least time in which `tokens` of one GPU can leave at line rate (per GPU and direction): φ·bytes over the
    NIC between nodes, over NVLink inside one."""
    rate = nic_gb_s if parallel.ep > parallel.gpus_per_node else nvlink_gb_s
    return tokens * bytes_per_token * off_node_share(parallel) / rate / 1e3


@dataclass(frozen=True)
class LayerTraffic:
    """Bytes that one GPU (the busiest) receives in one layer."""

    attention: float
    dispatch: float
    combine: float

    @property
    def total(self) -> float:
        return self.attention + self.dispatch + self.combine


def layer_traffic(scheme: str, model: ModelConfig, parallel: ParallelConfig, tokens: int) -> LayerTraffic:
    """Traffic of `scheme` when each DP group brings t = `tokens`. The schemes without DP groups run the same T =
    t·DP tokens on the same EP GPUs. Raises ConfigError for an unknown scheme."""
    if scheme not in SCHEMES:
        raise ConfigError(f"scheme is {scheme!r}: legal are {', '.join(map(repr, SCHEMES))}")
    d, c, k = dispatch_row_bytes(model), combine_row_bytes(model), model.num_experts_per_tok
    ep, tp, t = parallel.ep, parallel.tp, tokens
    total = t * parallel.dp
    away = 1 - 1 / ep
    if scheme == "EP, replicated":
        return LayerTraffic(0, 0, 2 * away * total * c)
    if scheme == "EP, unfused":
        return LayerTraffic(0, 0, away * total * k * c)
    if scheme == "EP, broadcast":
        return LayerTraffic(0, total * (d + 8 * k) if ep > 1 else 0, away * total * k * c)
    if scheme == "TP only":
        return LayerTraffic(2 * away * total * c, away * total * c, away * total * c)
    attention = 2 * (tp - 1) / tp * t * c
    if scheme == "expert-major":
        return LayerTraffic(attention, t / tp * k * d * away, t * k * c * away)
    if scheme == "per rank":
        ranks = destinations(ep, model)
        return LayerTraffic(attention, t / tp * ranks * (d + 8 * k) * away, t * ranks * c * away)
    if scheme == "padded":
        block = min(k, model.n_routed_experts // ep)
        return LayerTraffic(attention, (ep - 1) * math.ceil(t / tp) * block * d, (ep - 1) * t * block * c)
    return LayerTraffic(attention, (total - t / tp) * d, (ep - 1) * t * c)
