"""How a model computes: the operations that stages are made of, in two ways.

`Plain` is the definition, plain torch in one dtype. `BlockFp8` (`moelab.model.block_fp8`) is the way it is served. The
stages of a layer are written once, over either. What lies between two of them differs in form only:

- a *weight* is whatever `weight`, `experts` and `heads` return: a tensor, or FP8 values with scales;
- *rows* are what a matrix product reads: a tensor, or FP8 values with scales. `norm`, `rows`, `silu_mul` and `received`
  make them.

`add` says what a stage adds to the residual stream. Only the next `norm` needs the sum, so a way that has both in one
kernel leaves it until then; `settled` is the stream with all that was added.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from moelab.config import ConfigError, ModelConfig
from moelab.model.scratch import Scratch
from moelab.model.weights import ALL, Source
from moelab.ops.activation import silu_mul
from moelab.ops.grouped_gemm import grouped_gemm
from moelab.ops.mla_cache import LatentCache
from moelab.ops.norm import rms_norm
from moelab.ops.rope import apply_rope
from moelab.ops.router import route

if TYPE_CHECKING:
    from moelab.comm.spec import ExchangeSpec
    from moelab.model.batch import State

PAYLOAD = {torch.float32: "f32", torch.bfloat16: "bf16"}

Weight = Any
Rows = Any


class Arithmetic(Protocol):
    """T tokens, H hidden, N and K a weight's rows and columns."""

    dtype: torch.dtype  # of the residual stream, the embeddings and what is not multiplied in FP8
    exchange: dict[str, str]  # arguments of `AllToAll`: what it carries, in which form

    def check(self, config: ModelConfig) -> None:
        """Raise `ConfigError` for a model whose sizes cannot be computed so."""

    def weight(self, source: Source, *names: str, rows: slice = ALL, cols: slice = ALL) -> Weight:
        """The linear layers of these names, one below the other: [Σ N, K]; of each these rows and columns."""

    def experts(self, weights: list[Weight]) -> Weight:
        """One weight for each expert, all of one shape -> one weight [E/ep, N, K]."""

    def heads(self, source: Source, name: str, rows: slice) -> tuple[Weight, Weight]:
        """The rows of kv_b, those of whole heads -> (W_UK [heads, kv_lora, nope], W_UV [heads, v, kv_lora])."""

    def dense(self, weight: Weight) -> Tensor:
        """A weight in `dtype`."""

    def rows(self, x: Tensor) -> Rows: ...

    def linear(self, x: Rows, weight: Weight) -> Tensor:
        """[T, K] -> [T, N]"""

    def bmm(self, x: Tensor, weight: Weight) -> Tensor:
        """x [T, heads, K], weight [heads, N, K] -> [T, heads, N]"""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def norm_rows(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        """The norm of x [T, K], for a matrix product."""

    def add(self, s: State, *terms: Tensor) -> None:
        """Add (terms[0] + terms[1] …) to the residual stream of `s`."""

    def norm(self, s: State, weight: Tensor, eps: float, routed: bool = False) -> Rows:
        """The norm of the residual stream; `routed`: a router will read it."""

    def settled(self, s: State, weight: Tensor, eps: float) -> Tensor:
        """The norm of the residual stream as a tensor."""

    def rope_append(self, s: State, cache: LatentCache) -> None:
        """Turn `s.q_pe`; write latent and turned k_pe of each token into a layer's cache. Slot −1 is padding."""

    def route(self, config: ModelConfig, x: Rows, weight: Tensor, bias: Tensor | None, real: Tensor | None):
        """(topk_ids [T, K], topk_weights float32 [T, K]); tokens that are not `real` are routed nowhere."""

    def payload(self, x: Rows) -> tuple[Tensor, Tensor | None]:
        """x and scales for dispatch_send."""

    def received(self, rows: Tensor, scales: Tensor | None) -> Rows: ...

    def scratch(self, config: ModelConfig, spec: ExchangeSpec, device: torch.device | str) -> Scratch:
        """What `silu_mul` and `grouped` take for `out`, for the rows that the exchange may bring."""

    def silu_mul(self, gate_up: Tensor, counts: Tensor | None = None, out: Rows | None = None) -> Rows: ...

    def grouped(self, x: Rows, weight: Weight, counts: Tensor, expected_m: int, out: Tensor | None = None) -> Tensor:
        """x [E/ep, M, K] with counts[e] rows -> [E/ep, M, N]; `expected_m`: about how many those are."""

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[N, H] -> float32 [N, vocab]"""


class Plain:
    """Plain torch, weights dequantised to `dtype`: float32 or bfloat16 (float16 overflows in DeepSeek-V3)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in PAYLOAD:
            raise ConfigError(f"dtype is {dtype}: legal are {', '.join(map(str, PAYLOAD))}")
        self.dtype, self.exchange = dtype, {"payload": PAYLOAD[dtype]}

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def check(self, config: ModelConfig) -> None:
        pass

    def weight(self, source: Source, *names: str, rows: slice = ALL, cols: slice = ALL) -> Tensor:
        parts = [source.linear(name, rows, cols) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def experts(self, weights: list[Tensor]) -> Tensor:
        return torch.stack(weights)

    def heads(self, source: Source, name: str, rows: slice) -> tuple[Tensor, Tensor]:
        config = source.config
        per_head = config.qk_nope_head_dim + config.v_head_dim
        kv_b = source.linear(name, rows).unflatten(0, (-1, per_head))
        return kv_b[:, : config.qk_nope_head_dim].mT.contiguous(), kv_b[:, config.qk_nope_head_dim :].contiguous()

    def dense(self, weight: Tensor) -> Tensor:
        return weight

    def rows(self, x: Tensor) -> Tensor:
        return x

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight)

    def bmm(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("thk,hnk->thn", x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    norm_rows = rms_norm

    def add(self, s: State, *terms: Tensor) -> None:
        s.residual = s.residual + reduce(add, terms)

    def norm(self, s: State, weight: Tensor, eps: float, routed: bool = False) -> Tensor:
        return rms_norm(s.residual, weight, eps)

    settled = norm

    def rope_append(self, s: State, cache: Tensor) -> None:
        s.q_pe = apply_rope(s.q_pe, s.cos, s.sin)
        row = torch.cat((s.latent, apply_rope(s.k_pe, s.cos, s.sin)), dim=-1)
        real = s.batch.slots >= 0
        cache.flatten(0, 1).index_copy_(0, s.batch.slots[real], row[real])

    def route(self, config: ModelConfig, x: Tensor, weight: Tensor, bias: Tensor | None, real: Tensor | None):
        logits = linear(x.float(), weight.float())
        return route(logits, bias, real=real, **routing(config))

    def payload(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None

    def received(self, rows: Tensor, scales: None) -> Tensor:
        return rows

    def scratch(self, config: ModelConfig, spec: ExchangeSpec, device: torch.device | str) -> Scratch:
        return Scratch()

    def silu_mul(self, gate_up: Tensor, counts: Tensor | None = None, out: None = None) -> Tensor:
        return silu_mul(gate_up)

    def grouped(self, x: Tensor, weight: Tensor, counts: Tensor, expected_m: int, out: None = None) -> Tensor:
        return grouped_gemm(x, weight, counts)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return linear(hidden, weight).float()


def routing(config: ModelConfig) -> dict[str, Any]:
    """The router's settings, as `moelab.ops.router` takes them."""
    return dict(
        top_k=config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        scoring=config.scoring_func,
        renormalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
