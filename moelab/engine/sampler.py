"""From logits to a token.

A draw depends on the seed, the request's number, the token's place and what is drawn for alone, so a request gives the
same text whatever ranks and batches it shares.
"""

from __future__ import annotations

import torch

from moelab.engine.sequence import Sequence

DRAFT, VERIFY = 1, 2  # what else is drawn at a token's place, in speculative decoding


def sample(logits: torch.Tensor, sequence: Sequence, ahead: int = 0) -> int:
    """The next token of `sequence`, or the one that many places later, from float32 logits [vocab]. On ties the lower
    id wins."""
    if sequence.sampling.temperature == 0:
        return int(logits.argmax())
    return draw(distribution(logits, sequence), generator(sequence, ahead))


def distribution(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Probabilities [vocab] on the host, at the temperature of `sequence`, which must not be 0."""
    return (logits.cpu() / sequence.sampling.temperature).softmax(-1)


def generator(sequence: Sequence, ahead: int, purpose: int | None = None) -> torch.Generator:
    """What decides draws for the token `ahead` places after the next."""
    place = sequence.sampling.seed, sequence.id, len(sequence.tokens) + ahead
    return torch.Generator().manual_seed(hash(place if purpose is None else (*place, purpose)))


def draw(weights: torch.Tensor, source: torch.Generator) -> int:
    """An index of `weights` [n], each as often as it weighs."""
    return int(torch.multinomial(weights, 1, generator=source))
