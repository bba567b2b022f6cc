"""What a step computes on: the batch's tokens, and the state that the stages of a layer pass along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moelab.comm.alltoall import Handle
from moelab.model.arithmetic import Rows
from moelab.ops.mla_cache import LatentCache
from moelab.ops.mla_decode import MlaDecode


@dataclass
class Chunk:
    """Consecutive new tokens of one sequence: `q_len` of them, after which its cache holds `kv_len` rows."""

    q_len: int
    kv_len: int
    pages: torch.Tensor  # int64, the sequence's pages in order; at least ⌈kv_len / page size⌉

    @property
    def context_len(self) -> int:
        return self.kv_len - self.q_len


@dataclass
class Batch:
    """The new tokens of one DP group in one step, chunk after chunk. Any number of chunks, none included.

    `absorbed` says how attention runs: on the latent cache itself (decode: few queries for each cached row), or as
    multi-head attention on keys and values expanded from it (prefill). The results agree but for rounding.

    With `decode`, planned for this batch, absorbed attention is a call of it, and nothing reads `chunks`: so it must be
    where a step is captured. Such a step has rows that are not `real`: nothing waits for them, they are routed nowhere.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64: where each token's row goes, page · page_size + offset; −1 for padding
    chunks: list[Chunk]
    absorbed: bool
    has_work: bool  # of the DP group: travels with every dispatch
    real: torch.Tensor | None = None  # bool [T] on the device: the others are padding; None: there is none
    decode: MlaDecode | None = None
    halves: tuple[Batch, Batch] | None = None  # of which two micro-batches are made, where they are laid out ahead

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]


@dataclass
class State:
    """Values between the stages of one layer, named as in `moelab.stages`, and the batch they belong to."""

    batch: Batch
    cache: Sequence[LatentCache]  # of each layer; one tensor [layers, pages, page_size, latent_dim] will do
    cos: torch.Tensor  # [T, rope_dim / 2]
    sin: torch.Tensor
    residual: torch.Tensor  # [T, H]; with `update`, which an arithmetic may leave to be added by the next norm
    update: tuple[torch.Tensor, ...] = ()
    x: Rows | None = None  # [T, H], normalised
    q_a: torch.Tensor | None = None  # [T, q_lora]
    kv_a: torch.Tensor | None = None  # [T, kv_lora + rope]
    q_c: Rows | None = None  # [T, q_lora], normalised
    latent: torch.Tensor | None = None  # [T, kv_lora], normalised
    k_pe: torch.Tensor | None = None  # [T, rope], not normalised
    q_nope: torch.Tensor | None = None  # [T, heads, nope]
    q_pe: torch.Tensor | None = None  # [T, heads, rope]
    q_latent: torch.Tensor | None = None  # [T, heads, kv_lora]; as MHA q_nope itself
    context: torch.Tensor | None = None  # [T, heads, kv_lora]; as MHA [T, heads, v]
    heads: torch.Tensor | None = None  # [T, heads · v]
    attention: torch.Tensor | None = None  # [T, H]
    topk_ids: torch.Tensor | None = None  # [T, K] int64
    topk_weights: torch.Tensor | None = None  # [T, K] float32
    shared: torch.Tensor | None = None  # [T, H]
    handle: Handle | None = None  # the exchange in flight, afterwards the last one
    rows: Rows | None = None  # [E/ep, dp · M, H]
    counts: torch.Tensor | None = None  # [E/ep] int32
    gate_up: torch.Tensor | None = None
    act: Rows | None = None
    expert_out: torch.Tensor | None = None  # [E/ep, dp · M, H]

    @property
    def idle(self) -> torch.Tensor | bool | None:
        """Whether no DP group has requests; None without an exchange. A tensor, int32 [1], where the device knows."""
        return None if self.handle is None else self.handle.idle
