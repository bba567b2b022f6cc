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
from moelab.model.batch import State
from moelab.model.mla import Attention
from moelab.model.moe import MLP, Dense, MoE
from moelab.model.weights import Checkpoint
from moelab.ops.norm import rms_norm
from moelab.stages import DENSE_LAYER, MOE_LAYER, Stage


@dataclass
class DecoderLayer:
    """x += attention(norm(x)); x += feed_forward(norm(x)), cut into stages."""

    eps: float
    input_norm_w: torch.Tensor
    post_norm_w: torch.Tensor
    attention: Attention
    feed_forward: Dense | MoE
    tp_group: TensorParallelGroup

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        layer: int,
        parallel: ParallelConfig,
        rank: int,
        all_to_all: AllToAll,
        tp_group: TensorParallelGroup,
    ) -> DecoderLayer:
        prefix = f"model.layers.{layer}"
        attention = Attention.load(checkpoint, f"{prefix}.self_attn", layer, parallel, rank)
        if checkpoint.config.is_moe(layer):
            feed_forward = MoE.load(checkpoint, f"{prefix}.mlp", parallel, rank, all_to_all)
        else:
            feed_forward = Dense(MLP.load(checkpoint, f"{prefix}.mlp"))
        return cls(
            checkpoint.config.rms_norm_eps,
            checkpoint.tensor(f"{prefix}.input_layernorm.weight"),
            checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight"),
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
        s.x = rms_norm(s.residual, self.input_norm_w, self.eps)

    def tp_reduce(self, s: State) -> None:
        s.attention = self.tp_group.all_reduce(s.attention)

    def post_norm(self, s: State) -> None:
        s.residual = s.residual + s.attention
        s.x = rms_norm(s.residual, self.post_norm_w, self.eps)
