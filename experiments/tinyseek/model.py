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
  the forward pass uses `w + delta`, where `delta = dequantise(quantise(w)) - w` is refreshed after each step
  and has no gradient (straight-through). Until then delta is zero, so the compiled graph is one and the same.

Symbols: B sequences, S positions, T = B·S tokens, H hidden, E experts, I expert width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 128  # block FP8: one scale per 128 x 128 weights
FP8_MAX = 448.0


@dataclass(frozen=True)
class Config:
    """The dimensions, in the names of the hub's config.json."""

    vocab_size: int = 384
    hidden_size: int = 256
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 1
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 4.0
    original_max_position_embeddings: int = 1024
    max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    bos_token_id: int = 256
    eos_token_id: int = 257

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-1/2 · m², m = 0.1 · mscale_all_dim · ln(factor) + 1 (YaRN)."""
        m = 0.1 * self.mscale_all_dim * math.log(self.rope_factor) + 1.0
        return self.qk_head_dim**-0.5 * m * m

    @classmethod
    def from_hf(cls, hf: dict) -> Config:
        """From the dictionary of a checkpoint's config.json in the hub's spelling."""
        flat = {**hf, **hf["rope_scaling"], "rope_factor": hf["rope_scaling"]["factor"]}
        return cls(**{f.name: flat[f.name] for f in fields(cls)})


SMOKE = Config(  # the same architecture, small enough for seconds on a CPU; ragged blocks kept (kv_a has 96 rows)
    hidden_size=128, intermediate_size=256, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
    q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, n_routed_experts=8,
    num_experts_per_tok=2, n_group=4, topk_group=2, original_max_position_embeddings=64, max_position_embeddings=256,
)  # fmt: skip


def quantise_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Block FP8 of w [..., N, K] -> (e4m3 [..., N, K], fp32 scale [..., ceil(N/128), ceil(K/128)]); w ≈ product."""
    n, k = w.shape[-2:]
    padded = F.pad(w.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N/128, 128, K/128, 128]
    scale = blocks.abs().amax(dim=(-3, -1)).clamp_min(1e-12) / FP8_MAX
    q = (blocks / scale[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return q.flatten(-4, -3).flatten(-2, -1)[..., :n, :k].contiguous(), scale


def dequantise_blocks(q: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., N, K] of `quantise_blocks`' pair."""
    n, k = q.shape[-2:]
    full = scale.repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]
    return q.float() * full


def yarn_inv_freq(c: Config) -> Tensor:
    """Inverse frequencies [rope/2], fp32: fast pairs kept, slow pairs divided by the factor, a ramp between."""
    dim = c.qk_rope_head_dim

    def pair_of(rotations: float) -> float:  # the pair that turns `rotations` times over the original context
        turns = c.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(c.rope_theta))

    low = max(math.floor(pair_of(c.beta_fast)), 0)
    high = min(math.ceil(pair_of(c.beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    freq = c.rope_theta ** -(2 * pairs / dim)
    return freq / c.rope_factor * ramp + freq * (1 - ramp)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs (2i, 2i+1) of x [B, heads, S, rope]; cos and sin are [S, rope/2], fp32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


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

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        heads = c.num_attention_heads
        self.q_a_proj = Weight(c.q_lora_rank, c.hidden_size)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = Weight(heads * c.qk_head_dim, c.q_lora_rank)
        self.kv_a_proj_with_mqa = Weight(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = Weight(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o_proj = Weight(c.hidden_size, heads * c.v_head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, H]."""
        c, heads = self.c, self.c.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (heads, -1)).transpose(1, 2)
        q_nope, q_pe = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        q = torch.cat((q_nope, rope(q_pe, cos, sin)), dim=-1)
        k_pe = rope(k_pe.unsqueeze(1), cos, sin).expand(-1, heads, -1, -1)
        k = torch.cat((k_nope, k_pe), dim=-1)
        if x.is_cuda:  # flash attention wants one head dimension for q, k and v
            v = F.pad(v, (0, c.qk_head_dim - c.v_head_dim))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.softmax_scale)[..., : c.v_head_dim]
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

    def __init__(self, c: Config):
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

    def __init__(self, c: Config):
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

    def __init__(self, c: Config, index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        dense = index < c.first_k_dense_replace
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)

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

    def __init__(self, c: Config):
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

    def __init__(self, c: Config, dtype: torch.dtype = torch.float32, dropout: float = 0.0):
        super().__init__()
        self.c, self.dtype, self.dropout = c, dtype, dropout
        self.compiled = run_layer  # what training runs its layers with
        self.embed_tokens = Weight(c.vocab_size, c.hidden_size, fp8=False)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Weight(c.vocab_size, c.hidden_size, fp8=False)
        self.mtp = MTP(c)
        angles = torch.outer(torch.arange(c.max_position_embeddings, dtype=torch.float32), yarn_inv_freq(c))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
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
            m.delta.copy_(dequantise_blocks(*quantise_blocks(m.weight)) - m.weight)

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
