"""From logits to a token."""

from __future__ import annotations

import torch

from moelab.engine.sequence import Sequence


def sample(logits: torch.Tensor, sequence: Sequence) -> int:
    """The next token of `sequence`, from float32 logits [vocab]. On ties the lower id wins.

    A draw depends on the seed, the request's number and the token's place alone, so a request gives the same text
    whatever ranks and batches it shares.
    """
    temperature = sequence.sampling.temperature
    if temperature == 0:
        return int(logits.argmax())
    generator = torch.Generator().manual_seed(hash((sequence.sampling.seed, sequence.id, len(sequence.tokens))))
    probabilities = (logits.cpu() / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
