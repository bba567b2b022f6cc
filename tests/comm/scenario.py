"""`Scenario`: one exchange of all ranks, drawn from a seed, with its expected results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.comm.layout import dequantize_rows, unpack_ue8m0
from moelab.comm.spec import ExchangeSpec
from moelab.config import ParallelConfig


@dataclass(frozen=True)
class Group:
    """What the ranks of one DP group pass to dispatch_send."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None


@dataclass(frozen=True)
class Scenario:
    """Sizes and routing; picklable, so every rank draws the same data from it."""

    dp: int = 2
    tp: int = 1
    num_experts: int = 16
    top_k: int = 4
    hidden: int = 64
    max_tokens: int = 8
    tokens: tuple[int, ...] = (5, 8)  # of each DP group
    payload: str = "bf16"
    layout: str = "expert_padded"
    scales: str = "row"
    masked: float = 0.1  # share of ids that are -1
    repeats: bool = False  # whether a token may name an expert twice
    hot: float = 0.0  # share of ids moved to expert 0
    seed: int = 0

    def replace(self, **changes) -> Scenario:
        return dataclasses.replace(self, **changes)

    @property
    def ep(self) -> int:
        return self.dp * self.tp

    @property
    def spec(self) -> ExchangeSpec:
        return ExchangeSpec(
            ParallelConfig(self.dp, self.tp), self.num_experts, self.top_k, self.hidden, self.max_tokens,
            self.payload, 2, self.layout, self.scales,
        )  # fmt: skip

    def construct(self, rank, **options):
        return rank.exchange(
            self.dp, self.tp, self.num_experts, self.top_k, self.hidden, self.max_tokens,
            **{"payload": self.payload, "layout": self.layout, "scales": self.scales} | options,
        )  # fmt: skip

    def groups(self) -> list[Group]:
        """The same on every rank, on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)
        assert len(self.tokens) == self.dp
        return [self._draw(n, generator) for n in self.tokens]

    def _draw(self, n: int, generator: torch.Generator) -> Group:
        if self.repeats:
            ids = torch.randint(self.num_experts, (n, self.top_k), generator=generator)
        else:
            ids = torch.rand(n, self.num_experts, generator=generator).argsort(1)[:, : self.top_k]
        chance = torch.rand(ids.shape, generator=generator)
        if self.hot:
            ids[:, 0] = torch.where(chance[:, 0] < self.hot, 0, ids[:, 0])
        ids = torch.where(torch.rand(ids.shape, generator=generator) < self.masked, -1, ids)
        if n and self.masked:
            ids[torch.randint(n, (), generator=generator)] = -1
        weights = torch.randn(n, self.top_k, generator=generator) * 2.5
        weights[ids < 0] = torch.nan  # of an id that goes nowhere nothing may be read
        x = torch.randn(n, self.hidden, generator=generator)
        if self.payload == "fp8":
            blocks = -(-self.hidden // 128)
            scales = torch.rand(n, blocks, generator=generator) + 0.5
            if self.scales == "ue8m0":
                scales = torch.exp2(torch.randint(-12, 9, (n, blocks), generator=generator).float())
            return Group(x.to(torch.float8_e4m3fn), ids, weights, scales)
        return Group(x.to(self.spec.payload_dtype), ids, weights, None)

    def values(self, x: Tensor, scales: Tensor | None) -> Tensor:
        """What the rows mean, float32: the input side's way to say it."""
        if scales is None:
            return x.float()
        return x.float() * scales.repeat_interleave(128, dim=-1)[..., : self.hidden]

    def received(self, rows: Tensor, row_scales: Tensor | None) -> Tensor:
        return dequantize_rows(rows, row_scales, self.spec)

    def plain_scales(self, row_scales: Tensor) -> Tensor:
        """Received scales of any format as float32 [..., S]."""
        packed = self.scales == "ue8m0"
        return unpack_ue8m0(row_scales, self.spec.num_scales) if packed else row_scales

    def expert(self, e: int, values: Tensor) -> Tensor:
        """Stands in for expert e: mixes places, depends on e. float32 [..., H] -> the outputs' dtype."""
        mixed = values.roll(e + 1, dims=-1) * (0.5 + e / self.num_experts) + values * 0.25
        return mixed.to(self.spec.output_dtype)


def nan_(t: Tensor | None) -> None:
    """Fill with NaN, fp8 and packed scales included."""
    if t is None:
        return
    if t.dtype == torch.int32:
        t.fill_(-1)  # four exponents 255, which UE8M0 reads as NaN
    elif t.dtype == torch.float8_e4m3fn:
        t.view(torch.uint8).fill_(0x7F)
    else:
        t.fill_(torch.nan)


def is_nan(t: Tensor) -> Tensor:
    return t == -1 if t.dtype == torch.int32 else t.float().isnan()


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # A clone and not contiguous(), which leaves the odd stride of a dimension of size 1.
    a, b = (t.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)
