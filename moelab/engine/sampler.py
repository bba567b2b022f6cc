"""From logits to a token.

A draw depends on the seed, the request's number, the token's place and what is drawn for alone, so a request gives the
same text whatever ranks and batches it shares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moelab.engine.sequence import Sequence

DRAFT, VERIFY = 1, 2  # what else is drawn at a token's place, in speculative decoding


class Opinion(NamedTuple):
    """What the model thinks comes next, after each of n rows."""

    best: list[int]  # the likeliest token; on ties the lower id
    logits: torch.Tensor | None = None  # float32 [n, vocab] on the host, where something is drawn from them


def opinions(
    best: torch.Tensor, rows: list[tuple[Sequence, int]], logits: Callable[[torch.Tensor], torch.Tensor]
) -> list[Opinion]:
    """One for each sequence, which has so many of the N rows, in this order.

    best int64 [N]; `logits` gives float32 [n, vocab] of the rows that a mask bool [N] names. The device is waited for
    once, or twice if something is drawn; only logits that are drawn from leave it.
    """
    likeliest = best.tolist()
    drawn = [is_drawn for s, count in rows for is_drawn in [s.sampling.temperature > 0] * count]
    host = logits(torch.tensor(drawn, device=best.device)).cpu() if any(drawn) else None
    found, at, at_host = [], 0, 0
    for sequence, count in rows:
        mine = None
        if sequence.sampling.temperature > 0:
            mine = host[at_host : at_host + count]
            at_host += count
        found.append(Opinion(likeliest[at : at + count], mine))
        at += count
    return found


def sample(opinion: Opinion, row: int, sequence: Sequence, ahead: int = 0) -> int:
    """The next token of `sequence`, or the one that many places later, by a row of an opinion."""
    if sequence.sampling.temperature == 0:
        return opinion.best[row]
    return draw(distribution(opinion.logits[row], sequence), generator(sequence, ahead))


def distribution(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Probabilities [vocab] from logits on the host, at the temperature of `sequence`, which must not be 0."""
    return (logits / sequence.sampling.temperature).softmax(-1)


def generator(sequence: Sequence, ahead: int, purpose: int | None = None) -> torch.Generator:
    """What decides draws for the token `ahead` places after the next."""
    place = sequence.sampling.seed, sequence.id, len(sequence.tokens) + ahead
    return torch.Generator().manual_seed(hash(place if purpose is None else (*place, purpose)))


def draw(weights: torch.Tensor, source: torch.Generator) -> int:
    """An index of `weights` [n], each as often as it weighs."""
    return int(torch.multinomial(weights, 1, generator=source))
