"""Parameters of each component, and how a deployment cuts it.

One table drives every question about weights. A component is

    whole  on every GPU,
    tp     cut by attention heads over the TP ranks of a DP group,
    ep     cut by experts over all GPUs.

MLA makes TP costly: q_a and kv_a come before the heads divide, so each TP rank holds and computes all of
them. kv_b does divide by heads: split into its k and v halves and absorbed, each rank needs its own heads' part
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from moelab.config import ModelConfig, ParallelConfig


@dataclass(frozen=True)
class Component:
    """`count` matrices (or vectors) of `params` parameters each, of `itemsize` bytes a parameter."""

    name: str
    part: str  # what it belongs to: attention, shared expert, routed experts, dense MLP, embedding, …
    params: int
    count: int
    cut: str  # whole, tp, ep
    itemsize: int = 1  # block FP8; its scales, 4 bytes for 128 × 128 values, add 0.024 % and are left out
    mtp: bool = False  # of the MTP layer

    @property
    def total(self) -> int:
        return self.params * self.count

    def per_gpu(self, parallel: ParallelConfig) -> float:
        """Parameters of all `count` on one GPU."""
        return self.total / {"whole": 1, "tp": parallel.tp, "ep": parallel.ep}[self.cut]


def components(model: ModelConfig) -> list[Component]:
    """Everything that a checkpoint holds, the MTP layer included (its embedding and head are the model's)."""
    h, layers, moe = model.hidden_size, model.num_hidden_layers, model.num_moe_layers
    table = [
        Component("embed_tokens", "embedding", model.vocab_size * h, 1, "whole", 2),
        Component("lm_head", "head", model.vocab_size * h, 1, "whole", 2),
        Component("norm", "norms", h, 1, "whole", 2),
        *_attention(model, layers, mtp=False),
        Component("dense_mlp", "dense MLP", 3 * h * model.intermediate_size, layers - moe, "whole"),
        *_moe(model, moe, mtp=False),
    ]
    if model.num_nextn_predict_layers:
        table += [
            *_attention(model, 1, mtp=True),
            *_moe(model, 1, mtp=True),
            # The hub keeps eh_proj in BF16 (DeepSeek-V3: 0.10 GB more); here it counts as quantised.
            Component("eh_proj", "MTP", 2 * h * h, 1, "whole", mtp=True),
            Component("mtp_norms", "norms", h, 3, "whole", 2, mtp=True),
        ]
    return table


def _attention(model: ModelConfig, layers: int, mtp: bool) -> list[Component]:
    h, heads = model.hidden_size, model.num_attention_heads
    shapes = {
        "q_a": (h * model.q_lora_rank, "whole"),
        "kv_a": (h * model.latent_dim, "whole"),
        "q_b": (model.q_lora_rank * heads * model.qk_head_dim, "tp"),
        "kv_b": (model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim), "tp"),
        "o": (heads * model.v_head_dim * h, "tp"),
    }
    norms = 2 * h + model.q_lora_rank + model.kv_lora_rank  # input, post-attention, and the two inside
    return [
        *(Component(n, "attention", params, layers, cut, mtp=mtp) for n, (params, cut) in shapes.items()),
        Component("layer_norms", "norms", norms, layers, "whole", 2, mtp=mtp),
    ]


def _moe(model: ModelConfig, layers: int, mtp: bool) -> list[Component]:
    x, experts = expert_params(model), model.n_routed_experts
    bias = experts if model.scoring_func == "sigmoid" else 0
    return [
        Component("routed_experts", "routed experts", x * experts, layers, "ep", mtp=mtp),
        Component("shared_expert", "shared expert", x * model.n_shared_experts, layers, "whole", mtp=mtp),
        Component("gate", "gate", experts * model.hidden_size, layers, "whole", 2, mtp=mtp),
        Component("gate_bias", "gate", bias, layers, "whole", 4, mtp=mtp),
    ]


def expert_params(model: ModelConfig) -> int:
    """X = 3·H·I: gate, up and down of one expert."""
    return 3 * model.hidden_size * model.moe_intermediate_size


def attention_params(model: ModelConfig) -> int:
    """A: the five projections of one layer's attention."""
    return sum(c.params for c in components(model) if c.part == "attention" and not c.mtp)


def repeated_attention_params(model: ModelConfig) -> int:
    """A₀: those of A that every TP rank holds whole, q_a and kv_a."""
    return sum(c.params for c in components(model) if c.part == "attention" and c.cut == "whole" and not c.mtp)


def total_params(model: ModelConfig, mtp: bool = False) -> int:
    """All parameters, norms and biases included; `mtp`: with the MTP layer's own."""
    return sum(c.total for c in components(model) if mtp or not c.mtp)


def touched_params(model: ModelConfig, experts_per_layer: float, embedding: bool = False) -> float:
    """Parameters that a step reads when it activates this many routed experts in each MoE layer. An embedding is
    a look-up of single rows: it counts only if asked for. k experts give the model's "active" parameters."""
    idle = model.num_moe_layers * (model.n_routed_experts - experts_per_layer) * expert_params(model)
    looked_up = 0 if embedding else model.vocab_size * model.hidden_size
    return total_params(model) - idle - looked_up
