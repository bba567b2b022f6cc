"""Two micro-batches out of one batch, and back.

A half is a batch in its own right: some of the requests with all their tokens of this step, so that attention never
looks from one half into the other's new rows. The tokens of a request stay together in order, halves are neighbours,
and what belongs to a token is cut at the same row: its position, its place in the cache, its residual stream.
"""

from __future__ import annotations

import torch

from moelab.model.batch import Batch, State


def cut(q_lens: list[int]) -> int:
    """How many requests, with so many new tokens each, go to the first half: the halves' tokens differ least.

    Of equal choices the larger first half wins, so one request alone is in the first half and the second is empty.
    """
    total = sum(q_lens)

    def difference(first: int) -> int:
        return abs(total - 2 * sum(q_lens[:first]))

    return min(range(len(q_lens), -1, -1), key=difference)


def split(state: State) -> tuple[State, State]:
    """The state of each half, either or both without tokens. `has_work` and the way to attend are the whole batch's:
    the group is idle in both halves or in none."""
    halves = state.batch.halves or halve(state.batch)
    row = halves[0].num_tokens
    return _part(state, halves[0], slice(0, row)), _part(state, halves[1], slice(row, None))


def halve(batch: Batch) -> tuple[Batch, Batch]:
    """The batch of each half."""
    first = cut([chunk.q_len for chunk in batch.chunks])
    row = sum(chunk.q_len for chunk in batch.chunks[:first])

    def half(rows: slice, chunks: slice) -> Batch:
        columns = (column[rows] for column in (batch.tokens, batch.positions, batch.slots))
        return Batch(*columns, batch.chunks[chunks], batch.absorbed, batch.has_work)

    return half(slice(0, row), slice(0, first)), half(slice(row, None), slice(first, None))


def _part(state: State, batch: Batch, rows: slice) -> State:
    update = tuple(term[rows] for term in state.update)
    return State(batch, state.cache, state.cos[rows], state.sin[rows], state.residual[rows], update)


def join(state: State, parts: tuple[State, State]) -> None:
    """Put the halves' residual streams back into the whole state, and the exchange that was last."""
    state.residual = torch.cat([part.residual for part in parts])
    state.update = tuple(torch.cat(terms) for terms in zip(*(part.update for part in parts), strict=True))
    state.handle = parts[-1].handle
