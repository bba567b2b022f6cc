"""Every stage of a layer as a `Term`: what runs on one GPU of a deployment, for the tokens of one micro-batch.

t = B·q tokens of a DP group pass through every TP rank; attention's heads are cut, what comes before them and the
latent cache are not. Of the routed rows a GPU gets t·k/tp on average (every DP group sends as many), times the
imbalance on the busiest one, for which the step waits. Its activated experts follow from the tokens of all DP groups.

GROUPS names whose error is one: the GEMMs' all come from one table, so they are wrong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moelab.config import ParallelConfig
from moelab.perf import costs, overlap
from moelab.perf.deployment import Deployment
from moelab.perf.experts import active_experts
from moelab.perf.fabric import Exchange
from moelab.perf.kernels import Kernels
from moelab.perf.sources import SHARED_GLUE
from moelab.perf.term import Term, combined

GROUPS = {
    "qkv_a": "GEMM", "q_b": "GEMM", "o_proj": "GEMM", "shared_expert": "GEMM", "dense_gate_up": "GEMM",
    "dense_down": "GEMM", "bmm_k": "BMM", "bmm_v": "BMM", "mla": "MLA", "gate_up": "GroupGEMM", "down": "GroupGEMM",
    "input_norm": "glue", "qkv_norm": "glue", "rope_append": "glue", "post_norm": "glue", "gate": "glue",
    "silu_mul_quant": "glue", "dense_silu_mul": "glue", "tp_reduce": "TP all-reduce", "dispatch": "Dispatch",
    "combine": "Combine",
}  # fmt: skip
NOTHING = Term(0.0, "measured", 0.0, "nothing")


@dataclass(frozen=True)
class LayerTerms:
    """`stages`: kernels, by the names of `moelab.stages`; `dispatch` and `combine`: the exchange, `hidden` of it in
    flight while the GPU computes (the rest are kernels that send)."""

    stages: dict[str, Term]
    dispatch: Term
    combine: Term
    hidden: float

    def micro_batch(self, factors: Mapping[str, float]) -> overlap.MicroBatch:
        """As the walk takes it, every group of terms times its factor (1 where it has none)."""
        shown, dispatch = 1 - self.hidden, self.dispatch.us * factors.get("Dispatch", 1.0)
        combine = self.combine.us * factors.get("Combine", 1.0)
        kernels = us_of(self.stages, factors)
        kernels |= {"dispatch_send": shown * dispatch, "combine_send": shown * combine}
        kernels |= {"dispatch_recv": 0.0, "combine_recv": 0.0}
        return overlap.MicroBatch(kernels, self.hidden * dispatch, self.hidden * combine)


def us_of(terms: Mapping[str, Term], factors: Mapping[str, float]) -> dict[str, float]:
    """Stages' times, us, every group of terms times its factor."""
    return {name: term.us * factors.get(GROUPS[name], 1.0) for name, term in terms.items()}


def moe_layer(d: Deployment, kernels: Kernels, exchange: Exchange, batch: float, q_len: float) -> LayerTerms:
    """One MoE layer for `batch` requests of each DP group."""
    tokens = batch * q_len
    stages = _attention(d, kernels, exchange, batch, q_len)
    stages["gate"] = kernels.glue(tokens)["gate"]
    stages["shared_expert"] = _mlp(d, kernels, tokens, d.model.moe_intermediate_size * d.model.n_shared_experts)
    everyone = tokens * d.parallel.dp
    if d.expert_tp:
        active = float(active_experts(everyone, d.model, ParallelConfig()))
        rows, cut = everyone * d.model.num_experts_per_tok, d.parallel.tp
        dispatch, combine, hidden = NOTHING, exchange.reduce(tokens, d.parallel.tp), 0.0
    else:
        share = d.slots * d.parallel.ep / d.model.n_routed_experts
        active = float(active_experts(everyone, d.model, d.parallel)) * share
        rows, cut = d.imbalance * tokens * d.model.num_experts_per_tok / d.parallel.tp, 1
        dispatch = exchange.time("dispatch", tokens / d.parallel.tp, d.imbalance)
        combine = exchange.time("combine", tokens, d.imbalance)
        hidden = exchange.law("dispatch").hidden
    stages |= kernels.grouped(rows, active, cut, d.expert_dtype)
    return LayerTerms(stages, dispatch, combine, hidden)


def dense_layer(d: Deployment, kernels: Kernels, exchange: Exchange) -> dict[str, Term]:
    """One dense layer, the whole batch."""
    tokens = d.batch * d.q_len
    cut = d.parallel.tp if d.expert_tp else 1
    shapes = costs.mlp_shapes(d.model, d.model.intermediate_size, cut)
    return _attention(d, kernels, exchange, d.batch, d.q_len) | {
        "dense_gate_up": kernels.linear(tokens, *shapes["up"]),
        "dense_silu_mul": kernels.activation(tokens, d.model.intermediate_size // cut),
        "dense_down": kernels.linear(tokens, *shapes["down"]),
    }


def _attention(d: Deployment, kernels: Kernels, exchange: Exchange, batch: float, q_len: float) -> dict[str, Term]:
    tokens, tp = batch * q_len, d.parallel.tp
    heads = d.model.num_attention_heads // tp
    glue = {name: term for name, term in kernels.glue(tokens, heads).items() if name != "gate"}
    gemms = {name: kernels.linear(tokens, n, k) for name, (n, k) in costs.attention_shapes(d.model, tp).items()}
    return glue | gemms | {
        "bmm_k": kernels.bmm(tokens, heads, "bmm_k"),
        "mla": kernels.mla(batch, q_len, heads, d.kv_len, d.kv_dtype),
        "bmm_v": kernels.bmm(tokens, heads, "bmm_v"),
        "tp_reduce": exchange.reduce(tokens, tp),
    }  # fmt: skip


def _mlp(d: Deployment, kernels: Kernels, tokens: float, width: int) -> Term:
    """The shared expert: two GEMMs with quantisation and activation."""
    if not width:
        return NOTHING
    cut = d.parallel.tp if d.expert_tp else 1
    gemms = [kernels.linear(tokens, n, k) for n, k in costs.mlp_shapes(d.model, width, cut).values()]
    between = kernels.activation(tokens, width // cut)
    if between.us < SHARED_GLUE:
        between = Term(SHARED_GLUE, "published", between.error, "shared expert's small kernels in DeepSeek's trace")
    return combined([*gemms, between])
