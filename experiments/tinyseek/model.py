"""tinyseek, shaped for training: DeepSeek-V3's architecture, every expert computed, attention as plain MHA.

The mathematics is exactly the checkpoint's (moelab.model and transformers read it and agree); the shape of the
computation is the one that trains fastest at this size:

* 16 experts of width 128 make one wide MLP of width 2048. Computing all of them as three dense GEMMs and
  multiplying the hidden activations of expert e by its routing weight (zero where the token did not choose e)
  costs 4x the FLOP of the top-4 and no gather, scatter or synchronisation. Gradients are those of the sparse
  computation.
* MLA is expanded to ordinary multi-head attention over the whole sequence, so that one fused causal kernel runs
  it.
* Weights that the checkpoint holds in block FP8 see their own quantisation in the last part of the training:
  the forward pass uses `w + delta`, where `delta = dequantize(quantize(w)) - w` is refreshed after each step
  and has no gradient (straight-through). Until then delta is zero, so the compiled graph is one and the same.

Symbols: B sequences, S positions, T = B·S tokens, H hidden, E experts, I expert width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.config import ModelConfig, preset
from moelab.ops.fp8 import dequantize_block, quantize_block
from moelab.ops.rope import cos_sin, softmax_scale, turn_pairs

TINYSEEK = preset("tinyseek")
# The same architecture, small enough for seconds on a CPU; ragged blocks kept (kv_a has 96 rows).
SMOKE = TINYSEEK.replace(
    hidden_size=128, intermediate_size=256, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
    q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, n_routed_experts=8,
    num_experts_per_tok=2, n_group=4, topk_group=2, max_position_embeddings=256,
    rope=dataclasses.replace(TINYSEEK.rope, original_max_position_embeddings=64),
)  # fmt: skip


class RMSNorm(nn.Module):
    """RMS norm with a weight; statistics in fp32, output in `dtype` (the input's if None)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(dtype or x.dtype)


class Weight(nn.Module):
    """A matrix (or a stack of them) [..., out, in]; with `fp8`, its FP8 rounding error rides along as `delta`."""

    def __init__(self, *shape: int, fp8: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)
        self.fp8 = fp8
        if fp8:
            self.register_buffer("delta", torch.zeros(shape), persistent=False)

    def get(self, dtype: torch.dtype) -> Tensor:
        w = self.weight + self.delta if self.fp8 else self.weight
        return w.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.get(x.dtype))


class Attention(nn.Module):
    """Multi-head latent attention, expanded; causal over each sequence."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.scale = softmax_scale(c)
        heads = c.num_attention_heads
        self.q_a_proj = Weight(c.q_lora_rank, c.hidden_size)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = Weight(heads * c.qk_head_dim, c.q_lora_rank)
        self.kv_a_proj_with_mqa = Weight(c.latent_dim, c.hidden_size)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = Weight(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o_proj = Weight(c.hidden_size, heads * c.v_head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, H], cos and sin [S, rope/2] -> [B, S, H]."""
        c, heads = self.c, self.c.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (heads, -1)).transpose(1, 2)
        q_nope, q_pe = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        q = torch.cat((q_nope, turn_pairs(q_pe, cos, sin)), dim=-1)
        k_pe = turn_pairs(k_pe.unsqueeze(1), cos, sin).expand(-1, heads, -1, -1)
        k = torch.cat((k_nope, k_pe), dim=-1)
        if x.is_cuda:  # flash attention wants one head dimension for q, k and v
            v = F.pad(v, (0, c.qk_head_dim - c.v_head_dim))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)[..., : c.v_head_dim]
        return self.o_proj(o.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = Weight(width, hidden), Weight(width, hidden)
        self.down_proj = Weight(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def largest(x: Tensor, k: int) -> Tensor:
    """bool, x's shape: the k largest of the last dimension; on ties the lower index wins. Counting who is ahead costs
    n² compares a row, which the compiler fuses into its neighbours; topk and scatter are kernels of their own."""
    index = torch.arange(x.shape[-1], device=x.device)
    mine, other = x.unsqueeze(-1), x.unsqueeze(-2)
    ahead = (other > mine) | ((other == mine) & (index < index.unsqueeze(-1)))
    return ahead.sum(-1) < k


class Gate(nn.Module):
    """Sigmoid router with a selection bias and group limits, fp32 throughout."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.randn(c.n_routed_experts, c.hidden_size) * c.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, H] fp32 -> (weights [B, S, E], zero where not chosen; load [E], tokens per expert)."""
        c = self.c
        scores = F.linear(x, self.weight).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        groups = choice.unflatten(-1, (c.n_group, -1))
        open_groups = largest((groups * largest(groups, 2)).sum(-1), c.topk_group)
        choice = groups.masked_fill(~open_groups.unsqueeze(-1), -math.inf).flatten(-2)
        chosen = largest(choice, c.num_experts_per_tok).float()
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        return weights, chosen.flatten(0, -2).sum(0)


class MoE(nn.Module):
    """Routed experts as one wide masked MLP, plus the shared expert (which the 2.5 does not scale)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        e, i = c.n_routed_experts, c.moe_intermediate_size
        self.gate = Gate(c)
        self.gate_up = Weight(e, 2, i, c.hidden_size)  # [E, (gate, up), I, H]
        self.down = Weight(e, c.hidden_size, i)
        self.shared_experts = MLP(c.hidden_size, i * c.n_shared_experts)

    def forward(self, x: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, H] in the compute dtype and the same in fp32 for the router -> ([B, S, H], load [E])."""
        weights, load = self.gate(exact)
        h = F.linear(x, self.gate_up.get(x.dtype).flatten(0, 2)).unflatten(-1, self.gate_up.weight.shape[:3])
        act = F.silu(h[..., 0, :]) * h[..., 1, :] * weights.unsqueeze(-1).to(x.dtype)  # [B, S, E, I]
        down = self.down.get(x.dtype).transpose(0, 1).flatten(1)  # [H, E·I]
        return F.linear(act.flatten(-2), down) + self.shared_experts(x), load


class Layer(nn.Module):
    """x += attention(norm(x)); x += ffn(norm(x)). The residual stream is fp32, the branches the compute dtype."""

    def __init__(self, c: ModelConfig, index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c) if c.is_moe(index) else MLP(c.hidden_size, c.intermediate_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, S, H] fp32 -> (x, load [E] or None for a dense layer)."""
        attn = self.self_attn(self.input_layernorm(x, dtype), cos, sin)
        x = x + F.dropout(attn, dropout, self.training)
        h = self.post_attention_layernorm(x)
        y, load = self.mlp(h.to(dtype), h) if isinstance(self.mlp, MoE) else (self.mlp(h.to(dtype)), None)
        return x + F.dropout(y, dropout, self.training), load


def run_layer(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, dropout: float):
    """`layer(...)` as a plain function: compiled, it is compiled once for all layers of a kind, not for each."""
    return layer(x, cos, sin, dtype, dropout)


class MTP(nn.Module):
    """The multi-token-prediction layer: from h_i and the embedding of t_{i+1}, the state that predicts t_{i+2}."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = Weight(c.hidden_size, 2 * c.hidden_size, fp8=False)
        self.layer = Layer(c, c.num_hidden_layers)
        self.shared_head_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def join(self, h: Tensor, following: Tensor, dtype: torch.dtype) -> Tensor:
        """h [B, S, H] after model.norm, following [B, S, H] embeddings of t_{i+1} -> the layer's input, fp32."""
        return self.eh_proj(torch.cat((self.enorm(following, dtype), self.hnorm(h, dtype)), dim=-1)).float()


class TinySeek(nn.Module):
    """The whole model. `dtype` is the compute dtype of matrices and attention (parameters stay fp32)."""

    def __init__(self, c: ModelConfig, dtype: torch.dtype = torch.float32, dropout: float = 0.0):
        super().__init__()
        self.c, self.dtype, self.dropout = c, dtype, dropout
        self.compiled = run_layer  # what training runs its layers with
        self.embed_tokens = Weight(c.vocab_size, c.hidden_size, fp8=False)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Weight(c.vocab_size, c.hidden_size, fp8=False)
        self.mtp = MTP(c)
        cos, sin = cos_sin(c, torch.arange(c.max_position_embeddings))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        with torch.no_grad():  # each layer adds two branches to the residual stream: start them small
            for layer in [*self.layers, self.mtp.layer]:
                out = [layer.self_attn.o_proj]
                out += [layer.mlp.down, layer.mlp.shared_experts.down_proj] if isinstance(layer.mlp, MoE) else []
                out += [layer.mlp.down_proj] if isinstance(layer.mlp, MLP) else []
                for w in out:
                    w.weight.mul_((2 * c.num_hidden_layers) ** -0.5)
            self.embed_tokens.weight.normal_(0, 0.5)
            self.lm_head.weight.mul_(0.1)

    def gates(self) -> list[Gate]:
        """The routers, main layers first, the MTP layer's last."""
        return [m for m in self.modules() if isinstance(m, Gate)]

    def fp8_weights(self) -> list[Weight]:
        """All matrices that the checkpoint holds in block FP8."""
        return [m for m in self.modules() if isinstance(m, Weight) and m.fp8]

    @torch.no_grad()
    def refresh_fp8(self) -> None:
        """Make the forward pass see the weights as the FP8 checkpoint would hold them now."""
        for m in self.fp8_weights():
            m.delta.copy_(dequantize_block(*quantize_block(m.weight)) - m.weight)

    def _layer(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None]:
        run = self.compiled if self.training else run_layer
        return run(layer, x, self.cos[: x.shape[1]], self.sin[: x.shape[1]], self.dtype, self.dropout)

    def trunk(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, S] -> (h [B, S, H] after model.norm, loads of the MoE layers)."""
        x = F.dropout(F.embedding(tokens, self.embed_tokens.weight), self.dropout, self.training)
        loads = []
        for layer in self.layers:
            x, load = self._layer(layer, x)
            loads += [load] if load is not None else []
        return self.norm(x), loads

    def draft(self, h: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """h [B, S, H] and the tokens t_{i+1} [B, S] -> (u [B, S, H], load)."""
        embedded = F.embedding(following, self.embed_tokens.weight)
        z, load = self._layer(self.mtp.layer, self.mtp.join(h, embedded, self.dtype))
        return self.mtp.shared_head_norm(z), load

    def head(self, h: Tensor) -> Tensor:
        """Logits fp32 [..., V]."""
        return self.lm_head(h.to(self.dtype)).float()

    def forward(self, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """chunk [B, S+2] -> (main loss, MTP loss, both mean nats per token; load [MoE layers + 1, E])."""
        tokens, following = chunk[:, :-2], chunk[:, 1:-1]
        h, loads = self.trunk(tokens)
        u, load = self.draft(h, following)
        main = F.cross_entropy(self.head(h).flatten(0, 1), following.flatten())
        mtp = F.cross_entropy(self.head(u).flatten(0, 1), chunk[:, 2:].flatten())
        return main, mtp, torch.stack([*loads, load])
