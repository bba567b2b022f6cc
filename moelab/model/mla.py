"""Multi-head Latent Attention (arXiv 2405.04434, section 2.1): a cache row of 576 values serves 128 heads.

A token's keys and values are linear in its latent c (512 values): k = [W_UK·c, k_pe], v = W_UV·c, where k_pe, 64 values
under RoPE, is shared by the heads. So there are two equal ways to attend:

*MHA*, for prefill: expand c to every head's k and v. Costs 2·(192 + 128) FLOP a query, key and head.
*Absorbed*, for decode: move W_UK to the query's side and W_UV behind the sum,

    q·k = (W_UKᵀ·q_nope)·c + q_pe·k_pe,    Σ p·v = W_UV·Σ p·c

and attend to the cache rows as they lie. 2·(576 + 512) FLOP, 3.4 times as many, but nothing is expanded.

Under TP each rank has a share of the heads: rows of q_b and kv_b, columns of o_proj. q_a, kv_a and the cache are whole
on every rank, since the latent belongs to all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelab.config import ModelConfig, ParallelConfig
from moelab.model.arithmetic import Arithmetic, Weight
from moelab.model.batch import Chunk, State
from moelab.model.weights import Source
from moelab.ops.attention import attend, merge
from moelab.ops.mla_cache import PAGE_SIZE, Fp8Cache, LatentCache, read_rows
from moelab.ops.rope import softmax_scale


@dataclass
class Attention:
    """The attention of one layer on one rank, from qkv_a to o_proj; `layer` is its place in the cache."""

    config: ModelConfig
    arithmetic: Arithmetic
    layer: int
    num_heads: int  # on this rank
    qkv_a_w: Weight  # [q_lora + kv_lora + rope, H]: both projections of x are one product
    q_a_norm: torch.Tensor
    q_b_w: Weight  # this rank's heads
    kv_a_norm: torch.Tensor
    w_uk: Weight  # [heads, kv_lora, nope]
    w_uv: Weight  # [heads, v, kv_lora]
    o_w: Weight  # [H, heads · v]

    @classmethod
    def load(
        cls,
        source: Source,
        arithmetic: Arithmetic,
        prefix: str,
        layer: int,
        parallel: ParallelConfig,
        rank: int,
    ) -> Attention:
        config = source.config
        num_heads = config.num_attention_heads // parallel.tp
        first = parallel.tp_rank(rank) * num_heads

        def share(dim: int) -> slice:  # this rank's heads, `dim` values each
            return slice(first * dim, (first + num_heads) * dim)

        kv_b_rows = share(config.qk_nope_head_dim + config.v_head_dim)
        w_uk, w_uv = arithmetic.heads(source, f"{prefix}.kv_b_proj", kv_b_rows)
        return cls(
            config,
            arithmetic,
            layer,
            num_heads,
            qkv_a_w=arithmetic.weight(source, f"{prefix}.q_a_proj", f"{prefix}.kv_a_proj_with_mqa"),
            q_a_norm=source.tensor(f"{prefix}.q_a_layernorm.weight"),
            q_b_w=arithmetic.weight(source, f"{prefix}.q_b_proj", rows=share(config.qk_head_dim)),
            kv_a_norm=source.tensor(f"{prefix}.kv_a_layernorm.weight"),
            w_uk=w_uk,
            w_uv=w_uv,
            o_w=arithmetic.weight(source, f"{prefix}.o_proj", cols=share(config.v_head_dim)),
        )

    def qkv_a(self, s: State) -> None:
        qkv = self.arithmetic.linear(s.x, self.qkv_a_w)
        s.q_a, s.kv_a = qkv.split([self.config.q_lora_rank, self.config.latent_dim], dim=-1)

    def qkv_norm(self, s: State) -> None:
        s.q_c = self.arithmetic.norm_rows(s.q_a, self.q_a_norm, self.config.rms_norm_eps)
        latent, s.k_pe = s.kv_a.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        s.latent = self.arithmetic.rms_norm(latent, self.kv_a_norm, self.config.rms_norm_eps)

    def q_b(self, s: State) -> None:
        q = self.arithmetic.linear(s.q_c, self.q_b_w).unflatten(-1, (self.num_heads, self.config.qk_head_dim))
        s.q_nope, s.q_pe = q.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)

    def rope_append(self, s: State) -> None:
        self.arithmetic.rope_append(s, s.cache[self.layer])

    def bmm_k(self, s: State) -> None:
        s.q_latent = self.arithmetic.bmm(s.q_nope, self.w_uk) if s.batch.absorbed else s.q_nope

    def mla(self, s: State) -> None:
        cache = s.cache[self.layer]
        if s.batch.decode is not None:
            s.context = s.batch.decode.run(s.q_latent, s.q_pe, cache)
            return
        run = self._absorbed if s.batch.absorbed else self._mha
        width = self.config.kv_lora_rank if s.batch.absorbed else self.config.v_head_dim
        out = s.q_latent.new_empty(*s.q_latent.shape[:2], width)
        start = 0
        for chunk in s.batch.chunks:
            here = slice(start, start + chunk.q_len)
            query = torch.cat((s.q_latent[here], s.q_pe[here]), dim=-1)
            out[here] = run(query, _cached_rows(cache, chunk), chunk)
            start = here.stop
        s.context = out

    def bmm_v(self, s: State) -> None:
        heads = self.arithmetic.bmm(s.context, self.w_uv) if s.batch.absorbed else s.context
        s.heads = heads.flatten(1)

    def o_proj(self, s: State) -> None:
        s.attention = self.arithmetic.linear(self.arithmetic.rows(s.heads), self.o_w)

    def _absorbed(self, query: torch.Tensor, rows: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        values = rows[:, None, : self.config.kv_lora_rank]
        return attend(query, rows[:, None], values, softmax_scale(self.config), causal=True)[0]

    def _mha(self, query: torch.Tensor, rows: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The context, which every new token sees whole, and the new tokens among themselves, merged."""
        scale = softmax_scale(self.config)
        context, new = rows.to(query.dtype).split([chunk.context_len, chunk.q_len])
        parts = [attend(query, *self._expand(context), scale, causal=False)]
        parts.append(attend(query, *self._expand(new), scale, causal=True))
        return merge(parts)[0]

    def _expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache rows [L, 576] -> keys [L, heads, 192], values [L, heads, 128]."""
        latent, k_pe = rows.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        k_nope = torch.einsum("lc,hcn->lhn", latent, self.arithmetic.dense(self.w_uk))
        k = torch.cat((k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)), dim=-1)
        return k, torch.einsum("lc,hvc->lhv", latent, self.arithmetic.dense(self.w_uv))


def _cached_rows(cache: LatentCache, chunk: Chunk) -> torch.Tensor:
    """[kv_len, latent_dim]"""
    if not isinstance(cache, Fp8Cache):
        return cache[chunk.pages].flatten(0, 1)[: chunk.kv_len]
    slots = chunk.pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=chunk.pages.device)
    return read_rows(cache, slots.flatten()[: chunk.kv_len])
