"""Prefill: how long a prompt takes until its first token, and how many tokens a second a GPU prefills.

Prompts run as multi-head attention on expanded keys and values: 2·(192 + 128)·h FLOP for each pair of a token and one
before it, fewer than the 2·(576 + 512)·h of the absorbed form that decode uses; kv_b expands the latent, a GEMM of
[tokens, 512] × [512, 256h]. *Chunked*, a prompt comes in pieces of `chunk` tokens: the cache holds the latent, so every
piece expands all that came before it again, which is why sharing a GPU with decode costs more than its own tokens.

The exchange is the high-throughput one: a token goes once to each node (over NVLink: to each GPU) that holds one of
its experts, not once per expert. With two micro-batches it runs beside computation, which then has COMM_SMS fewer SMs;
else one after the other.

    pass = layers · max or sum (compute, exchange) + head;      first token = passes that the prompt takes

Rates of the exchange: 45 GB/s per NIC (DeepEP V1 normal kernels: 43 to 58 over RDMA), 280 GB/s over NVLink (UCCL-EP
and DeepEP on H200: 280 to 320), in the README files of both. Attention: ATTENTION_SHARE of the BF16 peak, as
FlashAttention-3 reaches on H100 (arXiv 2407.08608). Nobody's prefill was used to fit anything here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moelab.config import ConfigError
from moelab.hardware import GPU
from moelab.perf import costs, laws, traffic
from moelab.perf.deployment import Deployment, deployment
from moelab.perf.experts import active_experts, destinations
from moelab.perf.fabric import Exchange
from moelab.perf.kernels import Kernels
from moelab.perf.prediction import HOST_US
from moelab.perf.tables import Tables, load

ATTENTION_SHARE = 0.60  # of the BF16 peak
NORMAL_GB_S = {"nvlink": 280.0, "nic": 45.0}  # of the high-throughput exchange, per GPU
START_US = 50.0  # of both halves together: counts and channels are set up first (an assumption)
COMM_SMS = 24  # that DeepEP's normal kernels hold while they run (20 or 24 of 132)
ERROR = 0.30  # of a pass, half-width of 80 %: nothing in it was measured as a whole


@dataclass(frozen=True)
class Prefill:
    """`pass_ms`: one forward pass of `tokens` per DP group. `ttft_ms`: computation until the first token of a prompt,
    without waiting in a queue. `interval`: of ttft_ms, 80 %. `layer_us`: one MoE layer, compute and exchange."""

    deployment: Deployment
    prompt_len: float
    tokens: float
    passes: int
    pass_ms: float
    ttft_ms: float
    tok_s_per_gpu: float
    layer_us: dict[str, float]
    interval: tuple[float, float]


def prefill(
    gpu: str | GPU,
    dp: int,
    tp: int = 1,
    *,
    prompt_len: float,
    prompts: float = 1.0,
    chunk: float | None = None,
    overlap: bool = True,
    tables: Tables | None = None,
    **settings,
) -> Prefill:
    """`prompts` of `prompt_len` tokens in each DP group, in one pass or in chunks of `chunk` tokens per group.
    `overlap`: two micro-batches where NICs carry the exchange. `settings` as in `predict`. Raises ConfigError."""
    if not (prompt_len >= 1 and prompts > 0 and (chunk is None or chunk >= 1)):
        raise ConfigError(
            f"prompt_len {prompt_len}, prompts {prompts}, chunk {chunk}: legal are 1 or more tokens, prompts above 0"
        )
    settings["fabric_name"] = settings.pop("fabric", None)
    d = deployment(gpu, dp, tp, batch=prompts, kv_len=prompt_len, **settings)
    kernels = Kernels(d.gpu, d.model, load() if tables is None else tables)
    exchange = Exchange(d.gpu, d.model, d.parallel, d.alltoall, d.fabric, kernels.tables)
    piece = prompt_len if chunk is None else min(chunk / prompts, prompt_len)  # tokens of one prompt in a pass
    passes = math.ceil(prompt_len / piece)
    total_us, first = 0.0, {}
    for i in range(passes):
        here = min(piece, prompt_len - i * piece)
        spent = _layer(d, kernels, exchange, here * prompts, here, i * piece, overlap and not exchange.one_node)
        first = first or spent
        total_us += d.model.num_hidden_layers * spent["total"] + HOST_US
    head = kernels.linear(prompts, d.model.vocab_size, d.model.hidden_size, "bf16").us
    ms = (total_us + head) / 1e3
    rate = prompts * prompt_len * 1e3 / ms / d.parallel.tp
    interval = (ms / (1 + ERROR), ms * (1 + ERROR))
    return Prefill(d, prompt_len, piece * prompts, passes, ms / passes, ms, rate, first, interval)


def _layer(
    d: Deployment, kernels: Kernels, exchange: Exchange, tokens: float, new: float, before: float, hide: bool
) -> dict[str, float]:
    """us of one MoE layer for `tokens` of a DP group, in prompts of which `new` tokens follow `before` cached ones."""
    model, tp = d.model, d.parallel.tp
    heads = model.num_attention_heads // tp
    gemms = [kernels.linear(tokens, n, k).us for n, k in costs.attention_shapes(model, tp).values()]
    expanded = tokens / new * (new + before)
    kv_b = kernels.linear(expanded, heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank).us
    pairs = tokens * (before + new / 2)
    flops = 2 * pairs * heads * (model.qk_head_dim + model.v_head_dim)
    mha = flops / (ATTENTION_SHARE * d.gpu.bf16_tflops) / 1e6
    glue = sum(term.us for term in kernels.glue(tokens).values())
    width = model.moe_intermediate_size * model.n_shared_experts
    shared = sum(kernels.linear(tokens, n, k).us for n, k in costs.mlp_shapes(model, width, _cut(d)).values())
    everyone = tokens * d.parallel.dp
    if d.expert_tp:
        rows, active = everyone * model.num_experts_per_tok, float(active_experts(everyone, model, d.parallel)) * tp
        moved = 2 * exchange.reduce(tokens, tp).us
    else:
        rows = d.imbalance * tokens * model.num_experts_per_tok / tp
        active = float(active_experts(everyone, model, d.parallel)) * d.slots * d.parallel.ep / model.n_routed_experts
        moved = _exchange_us(d, exchange, tokens) + exchange.reduce(tokens, tp).us
    routed = sum(term.us for term in kernels.grouped(rows, active, _cut(d)).values())
    compute = sum(gemms) + kv_b + mha + glue + shared + routed
    total = max(compute / (1 - COMM_SMS / d.gpu.sms), moved) if hide else compute + moved
    return {"total": total, "compute": compute, "exchange": moved, "attention": mha, "routed experts": routed}


def _cut(d: Deployment) -> int:
    return d.parallel.tp if d.expert_tp else 1


def _exchange_us(d: Deployment, exchange: Exchange, tokens: float) -> float:
    """Dispatch and combine, each token once per place, T = t/tp sent and t received."""
    if d.parallel.ep == 1:
        return 0.0
    places = d.parallel.ep if exchange.one_node else math.ceil(d.parallel.ep / d.parallel.gpus_per_node)
    places = next(p for p in range(places, 0, -1) if d.model.n_routed_experts % p == 0)
    away = destinations(places, d.model) * (1 - 1 / places) * d.imbalance
    line = laws.LINE_GB_S[exchange.road]
    rate = NORMAL_GB_S["nvlink"] * line / 450 if exchange.one_node else NORMAL_GB_S["nic"] * line / 50
    row, back = traffic.dispatch_row_bytes(d.model), traffic.combine_row_bytes(d.model)
    return away * (tokens / d.parallel.tp * row + tokens * back) / rate / 1e3 + START_US
