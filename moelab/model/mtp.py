"""The multi-token-prediction layer (arXiv 2412.19437, section 2.2): one decoder layer that drafts the token after next.

    z = eh_proj([enorm(embed(t_{i+1})), hnorm(h_i)]),    u = shared_head.norm(layer(z)),    logits = lm_head(u)

h_i is the main model's output after its final norm. The next draft step recycles u, *after* the norm: recycling the
hidden state before it costs acceptance with every step of depth. The layer keeps a KV cache of its own, the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from moelab.model.batch import State
from moelab.model.layer import DecoderLayer
from moelab.model.weights import Source


@dataclass
class MTP:
    """What the MTP layer has beside a decoder layer; embedding and head are the main model's."""

    layer: DecoderLayer
    eps: float
    enorm_w: torch.Tensor
    hnorm_w: torch.Tensor
    eh_proj_w: torch.Tensor  # [H, 2·H]
    head_norm_w: torch.Tensor

    @classmethod
    def load(cls, source: Source, layer: DecoderLayer) -> MTP:
        prefix = f"model.layers.{source.config.num_hidden_layers}"
        return cls(
            layer,
            source.config.rms_norm_eps,
            enorm_w=source.tensor(f"{prefix}.enorm.weight"),
            hnorm_w=source.tensor(f"{prefix}.hnorm.weight"),
            eh_proj_w=source.tensor(f"{prefix}.eh_proj.weight"),
            head_norm_w=source.tensor(f"{prefix}.shared_head.norm.weight"),
        )

    def project(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings of the tokens after, and normed hidden states, [T, H] each -> the layer's residual stream."""
        norm = self.layer.arithmetic.rms_norm
        joined = (norm(embedding, self.enorm_w, self.eps), norm(hidden, self.hnorm_w, self.eps))
        return linear(torch.cat(joined, dim=-1), self.eh_proj_w)

    def finish(self, state: State) -> torch.Tensor:
        """The layer's residual stream -> u [T, H], for the head and for the next draft step."""
        return self.layer.arithmetic.settled(state, self.head_norm_w, self.eps)
