"""A decoder layer: two norms, attention and a feed-forward, run stage by stage.

`run(stage, state)` calls the method that bears the stage's name, here, on the attention or on the feed-forward. What
order they come in is not the layer's business: `moelab.stages` holds the orders, `moelab.engine.executor` walks them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelab.comm import AllToAll
from moelab.comm.tensor_parallel import TensorParallelGroup
from moelab.config import ParallelConfig
from moelab.model.arithmetic import Arithmetic
from moelab.model.batch import State
from moelab.model.mla import Attention
from moelab.model.moe import MLP, Dense, MoE
from moelab.model.scratch import Scratch
from moelab.model.weights import Source
from moelab.stages import DENSE_LAYER, MOE_LAYER, Stage


@dataclass
class DecoderLayer:
    """x += attention(norm(x)); x += feed_forward(norm(x)), cut into stages."""

    arithmetic: Arithmetic
    eps: float
    input_norm_w: torch.Tensor
    post_norm_w: torch.Tensor
    attention: Attention
    feed_forward: Dense | MoE
    tp_group: TensorParallelGroup

    @classmethod
    def load(
        cls,
        source: Source,
        arithmetic: Arithmetic,
        layer: int,
        parallel: ParallelConfig,
        rank: int,
        all_to_all: AllToAll,
        scratch: Scratch,
        tp_group: TensorParallelGroup,
    ) -> DecoderLayer:
        prefix = f"model.layers.{layer}"
        attention = Attention.load(source, arithmetic, f"{prefix}.self_attn", layer, parallel, rank)
        if source.config.is_moe(layer):
            feed_forward = MoE.load(source, arithmetic, f"{prefix}.mlp", parallel, rank, all_to_all, scratch)
        else:
            feed_forward = Dense(arithmetic, MLP.load(source, arithmetic, f"{prefix}.mlp"))
        return cls(
            arithmetic,
            source.config.rms_norm_eps,
            source.tensor(f"{prefix}.input_layernorm.weight"),
            source.tensor(f"{prefix}.post_attention_layernorm.weight"),
            attention,
            feed_forward,
            tp_group,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        return MOE_LAYER if isinstance(self.feed_forward, MoE) else DENSE_LAYER

    def run(self, stage: Stage, state: State) -> None:
        owner = next(part for part in (self, self.attention, self.feed_forward) if hasattr(type(part), stage.name))
        getattr(owner, stage.name)(state)

    def input_norm(self, s: State) -> None:
        s.x = self.arithmetic.norm(s, self.input_norm_w, self.eps)

    def tp_reduce(self, s: State) -> None:
        s.attention = self.tp_group.all_reduce(s.attention)

    def post_norm(self, s: State) -> None:
        self.arithmetic.add(s, s.attention)
        s.x = self.arithmetic.norm(s, self.post_norm_w, self.eps, routed=isinstance(self.feed_forward, MoE))
