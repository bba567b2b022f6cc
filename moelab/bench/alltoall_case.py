"""What a rank feeds an exchange, and what must come out: values that tell one token and one expert from another.

Every rank draws the tokens of all DP groups from one seed, so it knows what must arrive without asking. The output of
expert e for a token is the token times 2^(e mod 5 − 2), exact in bfloat16, so the right sum is the token times
Σ w·2^(…), which float64 computes without an exchange. A row in the wrong place, of another token or expert, or a weight
of another row shows.

Bounds on |out − exact|, relative to it since no term has another sign: a float32 sum of K products, (K + 1)·2^-24, and
one rounding to bfloat16, 2^-8; where each rank's partial sum is rounded to bfloat16 too, 8·2^-8 in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moelab.bench.alltoall_setting import Setting
from moelab.bench.timer import BenchError
from moelab.ops.quantize import quantize_reference

ROUNDED_TWICE = 8 * 2.0**-8


class WrongResult(BenchError):
    """An exchange moved something to where it does not belong; its times are worth nothing."""


def rounded_once(top_k: int) -> float:
    return summed(top_k) + 2.0**-8


def summed(top_k: int) -> float:
    return (top_k + 1) * 2.0**-24


class Case:
    """Inputs of `rank`: x [T, H], scales [T, S] or None, ids [T, K] int32, weights [T, K]. `pairs`, [3, n] int64: DP
    group, token and expert of every row that this rank's experts must get, by expert, group, token."""

    def __init__(
        self, setting: Setting, rank: int, device: torch.device, ids: Sequence[np.ndarray] | None = None
    ) -> None:
        """`ids`: the routing of each DP group, where it is not the setting's own."""
        self.setting, self.rank, self.device = setting, rank, device
        self.group = setting.parallel().dp_group(rank)
        self.first = rank * setting.local_experts
        generator = torch.Generator().manual_seed(setting.seed)
        shape = setting.tokens, setting.hidden
        drawn = [torch.randn(shape, generator=generator).to(device) for _ in range(setting.dp)]
        weights = torch.rand(setting.dp, setting.tokens, setting.top_k, generator=generator) + 0.1
        self.weights = weights[self.group].to(device)
        self.all_ids = [torch.from_numpy(x).to(device) for x in (setting.ids() if ids is None else ids)]
        self.ids = self.all_ids[self.group]
        if setting.payload == "fp8":
            self.values, self.scales_of = zip(*map(quantize_reference, drawn), strict=True)
            self.plain = [
                (v.float() * s.repeat_interleave(128, 1)[:, : setting.hidden]).bfloat16()
                for v, s in zip(self.values, self.scales_of, strict=True)
            ]
        else:
            self.values = self.plain = [x.bfloat16() for x in drawn]
            self.scales_of = [None] * setting.dp
        self.x, self.scales = self.values[self.group], self.scales_of[self.group]
        self.pairs = self.sorted_pairs("expert", "group", "token")

    @property
    def padded_shape(self) -> tuple[int, int, int]:
        """Of the expert side: [L, dp·M, H]."""
        return self.setting.local_experts, self.setting.dp * self.setting.tokens, self.setting.hidden

    def sorted_pairs(self, *order: str) -> Tensor:
        """`pairs` in another order of group, token, expert; "bundle": of a 16th of the rank's experts."""
        columns = []
        for group, ids in enumerate(self.all_ids):
            token, k = ((ids >= self.first) & (ids < self.first + self.setting.local_experts)).nonzero().T
            columns.append(torch.stack([torch.full_like(token, group), token, ids[token, k].long()]))
        pairs = torch.cat(columns, 1)
        keys = {"group": pairs[0], "token": pairs[1], "expert": pairs[2]}
        keys["bundle"] = (pairs[2] - self.first) // self.bundle
        for name in reversed(order):
            turn = keys[name].argsort(stable=True)
            pairs, keys = pairs[:, turn], {n: v[turn] for n, v in keys.items()}
        return pairs

    @property
    def bundle(self) -> int:
        """Experts in a 16th of the rank's, or 1."""
        return self.setting.local_experts // math.gcd(self.setting.local_experts, 16)

    def counts(self) -> Tensor:
        """[L] int64, rows of each local expert."""
        return (self.pairs[2] - self.first).bincount(minlength=self.setting.local_experts)

    def places(self) -> Tensor:
        """[n] int64: where `pairs` stand in the padded layout, as rows of [L·dp·M, H]."""
        expert, counts = self.pairs[2] - self.first, self.counts()
        before = counts.cumsum(0) - counts
        return expert * self.padded_shape[1] + torch.arange(len(expert), device=self.device) - before[expert]

    def images(self, pairs: Tensor) -> Tensor:
        """[n, row_bytes] uint8: values and scales of each pair's token, side by side; experts do not matter."""
        sources = [
            x.view(torch.uint8) if s is None else torch.cat([x.view(torch.uint8), s.view(torch.uint8)], 1)
            for x, s in zip(self.values, self.scales_of, strict=True)
        ]
        return torch.cat(sources)[pairs[0] * self.setting.tokens + pairs[1]]

    def outputs(self, pairs: Tensor) -> Tensor:
        """[n, H] bfloat16: what the experts give for pairs."""
        plain = torch.cat(self.plain)[pairs[0] * self.setting.tokens + pairs[1]]
        return plain * factor(pairs[2])[:, None].bfloat16()

    def padded_outputs(self) -> Tensor:
        """[L, dp·M, H] bfloat16; NaN where there is no row, since nobody may read it."""
        y = torch.full(self.padded_shape, math.nan, dtype=torch.bfloat16, device=self.device)
        y.view(-1, self.setting.hidden)[self.places()] = self.outputs(self.pairs)
        return y

    def check_rows(self, rows: Tensor, scales: Tensor | None, counts: Tensor) -> None:
        """rows [L, dp·M, H], scales [L, dp·M, S] with any strides, counts [L]. Raises WrongResult."""
        same_counts(counts, self.counts())
        place, row = self.places(), self.pairs[0] * self.setting.tokens + self.pairs[1]
        got = rows.view(torch.uint8).view(-1, rows.shape[-1] * rows.element_size())[place]
        same(got, torch.cat([x.view(torch.uint8) for x in self.values])[row], "a row")
        if scales is not None:
            expert, position = place // self.padded_shape[1], place % self.padded_shape[1]
            same(scales[expert, position], torch.cat(list(self.scales_of))[row], "the scales of a row")

    def check_out(self, out: Tensor, bound: float) -> None:
        """out [T, H] against the sum in float64; `bound` is relative. Raises WrongResult."""
        share = (self.weights.double() * factor(self.ids)).sum(1, keepdim=True)
        for first in range(0, len(out), 512):
            part = slice(first, first + 512)
            exact = self.plain[self.group][part].double() * share[part]
            error = (out[part].double() - exact).abs()
            if not bool((error <= bound * exact.abs()).all()):  # a NaN is caught too
                worst = float((error / exact.abs().clamp(min=1e-30)).nan_to_num(math.inf).max())
                raise WrongResult(f"a sum is off by {worst:.1e} of itself; at most {bound:.1e} is right")


def factor(experts: Tensor) -> Tensor:
    """What expert e multiplies by: 1/4, 1/2, 1, 2 or 4; float64."""
    return torch.exp2((experts % 5 - 2).double())


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Bit for bit, row by row."""
    if got.shape != want.shape or not torch.equal(got, want):
        bad = "" if got.shape != want.shape else f" ({int((got != want).any(1).sum())} of {len(want)})"
        raise WrongResult(f"{what} did not arrive as it was sent{bad}")


def same_counts(got: Tensor, want: Tensor) -> None:
    if not torch.equal(got.long().to(want.device), want):
        raise WrongResult(f"counts of rows are wrong: {got.tolist()[:8]}…, expected {want.tolist()[:8]}…")
