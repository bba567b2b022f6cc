"""What an exchange must deliver, said with whole tensors on the ranks' device: for sizes and rounds that the loops of
`moelab.comm.reference` would take hours over.

Expert e multiplies by `factor(e)` and rounds to bfloat16, so everybody knows its outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.comm.spec import ExchangeSpec


@dataclass(frozen=True)
class Inputs:
    """Of all DP groups, one after another: x [G, T, H], ids [G, T, K], weights, scales [G, T, S] or None."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None

    def of(self, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.x[group], self.ids[group], self.weights[group], None if self.scales is None else self.scales[group]


def draw(spec: ExchangeSpec, tokens: int, seed: int, device: torch.device, masked: float = 0.05) -> Inputs:
    """The same on every rank: all ids of a token distinct, a share of them -1."""
    g = torch.Generator(device).manual_seed(seed)
    groups, k = spec.parallel.dp, spec.top_k
    ids = torch.rand(groups, tokens, spec.num_experts, generator=g, device=device).argsort(-1)[..., :k].contiguous()
    ids = torch.where(torch.rand(ids.shape, generator=g, device=device) < masked, -1, ids)
    weights = torch.rand(ids.shape, generator=g, device=device) + 0.5
    scales = None
    if spec.payload == "fp8":
        # Bytes, since drawing normal values for all ranks takes longer than exchanging them. No NaN: 0x7F, 0xFF.
        x = torch.randint(0, 256, (groups, tokens, spec.hidden), dtype=torch.uint8, generator=g, device=device)
        x = torch.where((x & 0x7F) == 0x7F, x - 1, x).view(torch.float8_e4m3fn)
        scales = torch.rand(groups, tokens, spec.num_scales, generator=g, device=device) + 0.5
    else:
        x = torch.randn(groups, tokens, spec.hidden, generator=g, device=device).to(spec.payload_dtype)
    return Inputs(x, ids, weights, scales)


def factor(e: Tensor) -> Tensor:
    """Of expert e; few enough bits that bfloat16 values stay apart."""
    return (e % 13 + 1).to(torch.bfloat16) * 0.125


def rows_of(spec: ExchangeSpec, rank: int, inputs: Inputs) -> list[Tensor]:
    """For each local expert the flat indices g·T + t of its rows, in order."""
    flat = inputs.ids.flatten(0, 1)
    first = rank * spec.local_experts
    return [(flat == e).any(1).nonzero().flatten() for e in range(first, first + spec.local_experts)]


def check_received(
    spec: ExchangeSpec, rank: int, inputs: Inputs, rows: Tensor, row_scales: Tensor | None, counts: Tensor,
    starts: Tensor | None,
) -> None:  # fmt: skip
    """Every row and scale, bit for bit."""
    wanted = rows_of(spec, rank, inputs)
    assert counts.tolist() == [len(w) for w in wanted]
    x = inputs.x.flatten(0, 1).view(torch.uint8)
    for e, flat in enumerate(wanted):
        here = segment(rows, e, len(flat), starts)
        assert torch.equal(here.view(torch.uint8), x[flat]), f"rows of local expert {e}"
        if row_scales is not None:
            assert torch.equal(segment(row_scales, e, len(flat), starts), inputs.scales.flatten(0, 1)[flat])


def segment(t: Tensor, e: int, n: int, starts: Tensor | None) -> Tensor:
    """Expert e's n rows of a padded or contiguous tensor."""
    return t[e, :n] if starts is None else t[int(starts[e]) : int(starts[e]) + n]


def outputs(spec: ExchangeSpec, rank: int, rows: Tensor, counts: Tensor, starts: Tensor | None) -> Tensor:
    """What the experts make of the rows; NaN where there are none."""
    y = torch.full(spec.rows_shape, torch.nan, dtype=torch.bfloat16, device=rows.device)
    for e, n in enumerate(counts.tolist()):
        number = torch.tensor(rank * spec.local_experts + e, device=rows.device)
        segment(y, e, n, starts).copy_(segment(rows, e, n, starts).to(torch.bfloat16) * factor(number))
    return y


def expected(inputs: Inputs, group: int) -> tuple[Tensor, Tensor]:
    """(the sum in order of k in float32, as return mode "rows" makes it bit for bit; Σ|w·y|)."""
    x, ids, weights, _ = inputs.of(group)
    x = x.to(torch.bfloat16)
    total = torch.zeros(x.shape, device=x.device)
    magnitude = torch.zeros_like(total)
    for k in range(ids.shape[1]):
        there = ids[:, k, None] >= 0
        term = weights[:, k, None] * (x * factor(ids[:, k, None])).float()
        total = torch.where(there, total + term, total)
        magnitude = torch.where(there, magnitude + term.abs(), magnitude)
    return total, magnitude
