"""Choosing a step's tokens, and laying them out as a batch."""

from __future__ import annotations

import torch

from moelab.engine.kv_cache import PAGE_SIZE
from moelab.engine.sequence import Sequence
from moelab.model.batch import Batch, Chunk


def choose(sequences: list[Sequence], max_tokens: int) -> list[tuple[Sequence, int]]:
    """(sequence, number of new tokens), in order of arrival, at most `max_tokens` together.

    A decoding sequence has one new token; a prompt has all that the cache lacks and is cut where the room ends.
    """
    chosen, room = [], max_tokens
    for sequence in sequences:
        count = min(len(sequence.tokens) - sequence.num_cached, room)
        if count == 0:
            break
        chosen.append((sequence, count))
        room -= count
    return chosen


def build(chosen: list[tuple[Sequence, int]], device: str, max_absorbed_q_len: int = 4) -> Batch:
    """Lay out the chosen tokens; attention is absorbed if every chunk is short, as in decode."""
    tokens, positions, slots, chunks = [], [], [], []
    for sequence, count in chosen:
        span = range(sequence.num_cached, sequence.num_cached + count)
        tokens += sequence.tokens[span.start : span.stop]
        positions += span
        slots += [sequence.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in span]
        chunks.append(Chunk(count, span.stop, torch.tensor(sequence.pages, device=device)))

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    absorbed = all(count <= max_absorbed_q_len for _, count in chosen)
    return Batch(column(tokens), column(positions), column(slots), chunks, absorbed, has_work=bool(chosen))
