"""The feed-forward half of a layer: routed experts with a shared one, or a dense MLP.

    y = Σ_k w_k · E_k(x) + Shared(x),    E(x) = down(silu(gate(x)) · up(x))

The weights come from the router with the routed scaling factor in them and are applied once, by combine. The shared
expert is not scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelab.comm import AllToAll
from moelab.config import ModelConfig, ParallelConfig
from moelab.model.arithmetic import Arithmetic, Rows, Weight
from moelab.model.batch import State
from moelab.model.scratch import Scratch
from moelab.model.weights import Source


@dataclass
class MLP:
    """gate_up [2·I, H], gate first; down [H, I]."""

    arithmetic: Arithmetic
    gate_up: Weight
    down: Weight

    @classmethod
    def load(cls, source: Source, arithmetic: Arithmetic, prefix: str) -> MLP:
        gate_up = arithmetic.weight(source, f"{prefix}.gate_proj", f"{prefix}.up_proj")
        return cls(arithmetic, gate_up, arithmetic.weight(source, f"{prefix}.down_proj"))

    def __call__(self, x: Rows) -> torch.Tensor:
        gate_up = self.arithmetic.linear(x, self.gate_up)
        return self.arithmetic.linear(self.arithmetic.silu_mul(gate_up), self.down)


@dataclass
class Dense:
    """The feed-forward of the first layers, whole on every rank."""

    arithmetic: Arithmetic
    mlp: MLP

    def dense_gate_up(self, s: State) -> None:
        s.gate_up = self.arithmetic.linear(s.x, self.mlp.gate_up)

    def dense_silu_mul(self, s: State) -> None:
        s.act = self.arithmetic.silu_mul(s.gate_up)
        s.gate_up = None

    def dense_down(self, s: State) -> None:
        self.arithmetic.add(s, self.arithmetic.linear(s.act, self.mlp.down))
        s.act = None


@dataclass
class MoE:
    """This rank's experts of one layer, the router and the shared expert, and the exchange between the ranks."""

    config: ModelConfig
    arithmetic: Arithmetic
    all_to_all: AllToAll
    scratch: Scratch
    gate_w: torch.Tensor  # [E, H]
    gate_bias: torch.Tensor | None  # float32 [E]; Mixtral-style routing has none
    gate_up_w: Weight  # [E/ep, 2·I, H]
    down_w: Weight  # [E/ep, H, I]
    shared_mlp: MLP | None

    @classmethod
    def load(
        cls,
        source: Source,
        arithmetic: Arithmetic,
        prefix: str,
        parallel: ParallelConfig,
        rank: int,
        all_to_all: AllToAll,
        scratch: Scratch,
    ) -> MoE:
        config = source.config
        experts = [
            MLP.load(source, arithmetic, f"{prefix}.experts.{expert}")
            for expert in parallel.experts(rank, config.n_routed_experts)
        ]
        has_bias = config.scoring_func == "sigmoid"
        return cls(
            config,
            arithmetic,
            all_to_all,
            scratch,
            gate_w=source.tensor(f"{prefix}.gate.weight"),
            gate_bias=source.tensor(f"{prefix}.gate.e_score_correction_bias", torch.float32) if has_bias else None,
            gate_up_w=arithmetic.experts([expert.gate_up for expert in experts]),
            down_w=arithmetic.experts([expert.down for expert in experts]),
            shared_mlp=MLP.load(source, arithmetic, f"{prefix}.shared_experts") if config.n_shared_experts else None,
        )

    def gate(self, s: State) -> None:
        s.topk_ids, s.topk_weights = self.arithmetic.route(self.config, s.x, self.gate_w, self.gate_bias, s.batch.real)

    def dispatch_send(self, s: State) -> None:
        x, scales = self.arithmetic.payload(s.x)
        s.handle = self.all_to_all.dispatch_send(x, s.topk_ids, s.topk_weights, scales, has_work=s.batch.has_work)

    def shared_expert(self, s: State) -> None:
        s.shared = self.shared_mlp(s.x) if self.shared_mlp else torch.zeros_like(s.residual)

    def dispatch_recv(self, s: State) -> None:
        rows, scales, s.counts = self.all_to_all.dispatch_recv(s.handle)
        s.rows = self.arithmetic.received(rows, scales)

    def gate_up(self, s: State) -> None:
        s.gate_up = self.arithmetic.grouped(s.rows, self.gate_up_w, s.counts, self._expected_m(s), self.scratch.gate_up)

    # The experts' values are a step's largest by far: each goes as soon as it is read.

    def silu_mul_quant(self, s: State) -> None:
        s.act = self.arithmetic.silu_mul(s.gate_up, s.counts, self.scratch.act)
        s.gate_up = None

    def down(self, s: State) -> None:
        s.expert_out = self.arithmetic.grouped(s.act, self.down_w, s.counts, self._expected_m(s), self.scratch.out)
        s.act = None

    def combine_send(self, s: State) -> None:
        self.all_to_all.combine_send(s.handle, s.expert_out)
        s.expert_out = None

    def combine_recv(self, s: State) -> None:
        routed = self.all_to_all.combine_recv(s.handle, torch.empty_like(s.residual))
        self.arithmetic.add(s, routed, s.shared)

    def _expected_m(self, s: State) -> int:
        """Rows of an expert if every DP group has as many tokens as this one, evenly spread."""
        config = self.config
        rows = self.all_to_all.spec.parallel.dp * s.batch.num_tokens * config.num_experts_per_tok
        return max(1, round(rows / config.n_routed_experts))
