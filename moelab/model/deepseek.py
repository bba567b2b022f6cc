"""One rank's share of a DeepSeek-V3-style model: its heads and experts, everything else whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from moelab.comm import AllToAll, VirtualRanks
from moelab.comm.tensor_parallel import TensorParallelGroup
from moelab.config import ModelConfig, ParallelConfig
from moelab.model.arithmetic import Arithmetic, Plain
from moelab.model.batch import Batch, State
from moelab.model.layer import DecoderLayer
from moelab.model.mtp import MTP
from moelab.model.scratch import Scratch
from moelab.model.weights import Checkpoint, Source
from moelab.ops.rope import cos_sin


@dataclass
class DeepSeek:
    """Embedding, layers, final norm, head, and the MTP layer where the checkpoint has one."""

    config: ModelConfig
    parallel: ParallelConfig
    arithmetic: Arithmetic
    all_to_all: AllToAll
    scratch: Scratch
    embed_w: torch.Tensor
    layers: list[DecoderLayer]
    norm_w: torch.Tensor
    head_w: torch.Tensor
    mtp: MTP | None

    @classmethod
    def load(
        cls,
        source: str | Path | Source,
        parallel: ParallelConfig,
        max_tokens: int,
        *,
        rank: int = 0,
        arithmetic: Arithmetic | None = None,
        device: str = "cpu",
        group: object | None = None,
        tp_group: TensorParallelGroup | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> DeepSeek:
        """Load this rank's share. Collective over the default process group where `parallel.ep` > 1.

        `source`: a checkpoint's folder, or another source of weights, on `device`. `max_tokens` is the most tokens that
        one DP group may bring to a step, the same on all ranks. `arithmetic`: how to compute, by default plain torch in
        float32. `group` is where the experts' exchange happens, as `AllToAll` takes it; by default the default process
        group, or this process alone. `tp_group` sums attention over the ranks of a DP group; by default it is made from
        `group`. `progress` is told after each layer how many of how many are loaded.
        """
        arithmetic = arithmetic or Plain()
        if isinstance(source, str | Path):
            source = Checkpoint(source, arithmetic.dtype, device)
        config = source.config
        parallel.check(config)
        arithmetic.check(config)
        if group is None:
            group = dist.group.WORLD if parallel.ep > 1 else VirtualRanks(1).rank(0)
        all_to_all = AllToAll(
            parallel,
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            max_tokens,
            group=group,
            device=device,
            **arithmetic.exchange,
        )
        scratch = arithmetic.scratch(config, all_to_all.spec, device)
        if tp_group is None:
            tp_group = TensorParallelGroup.create(parallel, rank, group)
        layers, total = [], config.num_hidden_layers + config.num_nextn_predict_layers
        for layer in range(total):
            layers.append(DecoderLayer.load(source, arithmetic, layer, parallel, rank, all_to_all, scratch, tp_group))
            if torch.device(device).type == "cuda":
                torch.cuda.empty_cache()  # else small tensors of later layers settle in what loading took, and keep it
            progress(len(layers), total)
        mtp = MTP.load(source, layers.pop()) if config.num_nextn_predict_layers else None
        return cls(
            config,
            parallel,
            arithmetic,
            all_to_all,
            scratch,
            embed_w=source.tensor("model.embed_tokens.weight"),
            layers=layers,
            norm_w=source.tensor("model.norm.weight"),
            head_w=source.tensor("lm_head.weight"),
            mtp=mtp,
        )

    @property
    def dense_layers(self) -> list[DecoderLayer]:
        return self.layers[: self.config.first_k_dense_replace]

    @property
    def moe_layers(self) -> list[DecoderLayer]:
        return self.layers[self.config.first_k_dense_replace :]

    @property
    def num_caches(self) -> int:
        """Layers that keep a cache: all, and MTP's as the last."""
        return len(self.layers) + (self.mtp is not None)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_w[tokens]

    def begin(self, batch: Batch, cache: torch.Tensor, residual: torch.Tensor | None = None) -> State:
        """The state in which a batch enters its first layer: `residual`, or the embeddings of its tokens."""
        cos, sin = cos_sin(self.config, batch.positions)
        return State(batch, cache, cos, sin, self.embed(batch.tokens) if residual is None else residual)

    def finish(self, state: State) -> torch.Tensor:
        """The residual stream after the last layer -> normed hidden states [T, H]."""
        return self.arithmetic.settled(state, self.norm_w, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [N, H] -> float32 [N, vocab]."""
        return self.arithmetic.logits(hidden, self.head_w)

    def close(self) -> None:
        """Collective: end the exchange between the ranks. May be called twice."""
        self.all_to_all.close()
