"""Choosing a step's tokens, and laying them out as a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moelab.engine.kv_cache import PAGE_SIZE
from moelab.engine.sequence import Sequence
from moelab.model.batch import Batch, Chunk

MAX_ABSORBED_Q_LEN = 4  # tokens of one sequence up to which attending to the latent cache itself is the shorter way


class Piece(NamedTuple):
    """Consecutive tokens of a sequence, the first at position `start`."""

    sequence: Sequence
    start: int
    tokens: list[int]


def choose(sequences: list[Sequence], max_tokens: int, max_requests: int | None = None) -> list[tuple[Sequence, int]]:
    """(sequence, number of new tokens), in order of arrival, at most `max_tokens` together, of `max_requests`.

    A decoding sequence has one new token and its drafts; a prompt has all that the cache lacks. What goes beyond the
    room is cut: drafts are then not tried, a prompt goes on in the next step.
    """
    chosen, room = [], max_tokens
    for sequence in sequences[:max_requests]:
        count = min(len(sequence.tokens) + len(sequence.drafts) - sequence.num_cached, room)
        if count == 0:
            break
        chosen.append((sequence, count))
        room -= count
    return chosen


def build(
    chosen: list[tuple[Sequence, int]], device: torch.device | str, max_absorbed_q_len: int = MAX_ABSORBED_Q_LEN
) -> Batch:
    """Lay out the chosen tokens; attention is absorbed if every chunk is short, as in decode."""
    return lay_out(pieces_of(chosen), device, bool(chosen), max_absorbed_q_len)


def pieces_of(chosen: list[tuple[Sequence, int]]) -> list[Piece]:
    """The tokens that were chosen, drafts last."""
    return [
        Piece(sequence, sequence.num_cached, [*sequence.tokens[sequence.num_cached :], *sequence.drafts][:count])
        for sequence, count in chosen
    ]


def lay_out(
    pieces: list[Piece],
    device: torch.device | str,
    has_work: bool,
    max_absorbed_q_len: int = MAX_ABSORBED_Q_LEN,
) -> Batch:
    """One chunk for each piece. `has_work`: whether the DP group has requests, with tokens in this batch or not."""
    tokens, positions, slots, chunks = [], [], [], []
    for sequence, start, new in pieces:
        span = range(start, start + len(new))
        tokens += new
        positions += span
        slots += [sequence.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in span]
        chunks.append(Chunk(len(new), span.stop, torch.tensor(sequence.pages, device=device)))

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    absorbed = all(len(piece.tokens) <= max_absorbed_q_len for piece in pieces)
    return Batch(column(tokens), column(positions), column(slots), chunks, absorbed, has_work)
