"""The feed-forward half of a layer: routed experts with a shared one, or a dense MLP.

    y = Σ_k w_k · E_k(x) + Shared(x),    E(x) = down(silu(gate(x)) · up(x))

The weights come from the router with the routed scaling factor in them and are applied once, by combine. The shared
expert is not scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from moelab.comm import AllToAll
from moelab.config import ModelConfig, ParallelConfig
from moelab.model.batch import State
from moelab.model.weights import Checkpoint
from moelab.ops.activation import silu_mul
from moelab.ops.grouped_gemm import grouped_gemm
from moelab.ops.router import route


@dataclass
class MLP:
    """gate_up [2·I, H], gate first; down [H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> MLP:
        gate_up = [checkpoint.linear(f"{prefix}.{name}") for name in ("gate_proj", "up_proj")]
        return cls(torch.cat(gate_up), checkpoint.linear(f"{prefix}.down_proj"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(silu_mul(linear(x, self.gate_up)), self.down)


@dataclass
class Dense:
    """The feed-forward of the first layers, whole on every rank."""

    mlp: MLP

    def dense_gate_up(self, s: State) -> None:
        s.gate_up = linear(s.x, self.mlp.gate_up)

    def dense_silu_mul(self, s: State) -> None:
        s.act = silu_mul(s.gate_up)

    def dense_down(self, s: State) -> None:
        s.residual = s.residual + linear(s.act, self.mlp.down)


@dataclass
class MoE:
    """This rank's experts of one layer, the router and the shared expert, and the exchange between the ranks."""

    config: ModelConfig
    all_to_all: AllToAll
    gate_w: torch.Tensor  # [E, H]
    gate_bias: torch.Tensor | None  # float32 [E]; Mixtral-style routing has none
    gate_up_w: torch.Tensor  # [E/ep, 2·I, H]
    down_w: torch.Tensor  # [E/ep, H, I]
    shared_mlp: MLP | None

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, parallel: ParallelConfig, rank: int, all_to_all: AllToAll
    ) -> MoE:
        config = checkpoint.config
        experts = [
            MLP.load(checkpoint, f"{prefix}.experts.{expert}")
            for expert in parallel.experts(rank, config.n_routed_experts)
        ]
        has_bias = config.scoring_func == "sigmoid"
        return cls(
            config,
            all_to_all,
            gate_w=checkpoint.tensor(f"{prefix}.gate.weight"),
            gate_bias=checkpoint.tensor(f"{prefix}.gate.e_score_correction_bias", torch.float32) if has_bias else None,
            gate_up_w=torch.stack([expert.gate_up for expert in experts]),
            down_w=torch.stack([expert.down for expert in experts]),
            shared_mlp=MLP.load(checkpoint, f"{prefix}.shared_experts") if config.n_shared_experts else None,
        )

    def gate(self, s: State) -> None:
        config = self.config
        s.topk_ids, s.topk_weights = route(
            linear(s.x.float(), self.gate_w.float()),
            self.gate_bias,
            top_k=config.num_experts_per_tok,
            n_group=config.n_group,
            topk_group=config.topk_group,
            scoring=config.scoring_func,
            renormalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )

    def dispatch_send(self, s: State) -> None:
        s.handle = self.all_to_all.dispatch_send(s.x, s.topk_ids, s.topk_weights, has_work=s.batch.has_work)

    def shared_expert(self, s: State) -> None:
        s.shared = self.shared_mlp(s.x) if self.shared_mlp else torch.zeros_like(s.x)

    def dispatch_recv(self, s: State) -> None:
        s.rows, _, s.counts = self.all_to_all.dispatch_recv(s.handle)

    def gate_up(self, s: State) -> None:
        s.gate_up = grouped_gemm(s.rows, self.gate_up_w, s.counts)

    def silu_mul_quant(self, s: State) -> None:
        s.act = silu_mul(s.gate_up)

    def down(self, s: State) -> None:
        s.expert_out = grouped_gemm(s.act, self.down_w, s.counts)

    def combine_send(self, s: State) -> None:
        self.all_to_all.combine_send(s.handle, s.expert_out)

    def combine_recv(self, s: State) -> None:
        routed = self.all_to_all.combine_recv(s.handle, torch.empty_like(s.x))
        s.residual = s.residual + (routed + s.shared)
