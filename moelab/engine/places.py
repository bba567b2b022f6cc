"""Where the requests of a step of fixed shape stand, on tensors that stay where they are.

A `Places` of size B has places for B requests of q tokens each. The host fills it before a step: tokens, positions and
slots by one copy, and attention's plan; nothing after that asks the host for anything, so whatever runs on it can be
captured once in a CUDA graph and replayed. Several bodies may run on the same places one after another, as the main
model and the MTP layer behind it do: then they are filled once.

**Filling up.** Places without a request are padding: slot −1, no cached rows, routed nowhere. A request that brings
fewer than q tokens is filled up too: those rows stand behind its own, at the positions that come next, and do write the
cache, for what attention reads must be numbers; they are routed nowhere, and whoever comes to those positions later
overwrites them. The cache needs room for them.

**Halves.** Where micro-batches alternate, B places are cut in two, and requests are spread evenly over both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from moelab.engine.batch import Piece
from moelab.engine.kv_cache import PAGE_SIZE
from moelab.model.batch import Batch
from moelab.ops.mla_decode import MlaDecode


class Inputs:
    """What the host tells the device of a step: one memory for all sizes, filled by one copy.

    `tokens`, `positions` and `slots` int64 [max_batch · q_len]; `real` bool likewise; `hidden` [max_batch · q_len, H],
    for a step that starts from hidden states (`hidden_size` H, 0: none do).
    """

    COLUMNS = 4  # tokens, positions, slots, real

    def __init__(
        self, max_batch: int, q_len: int, device: torch.device | str, hidden_size: int = 0, dtype: torch.dtype = None
    ) -> None:
        self.max_batch, self.q_len = max_batch, q_len
        rows, on_gpu = max_batch * q_len, torch.device(device).type == "cuda"
        self._host = torch.zeros(self.COLUMNS, rows, dtype=torch.int64, pin_memory=on_gpu)
        self._host_rows = self._host.numpy()  # the same memory
        self._device = torch.zeros_like(self._host, device=device)
        self.tokens, self.positions, self.slots, self._real = self._device
        self.real = torch.zeros(rows, dtype=torch.bool, device=device)
        self.hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None

    def write(self, columns: list[np.ndarray]) -> None:
        """tokens, positions, slots and real, of equally many rows."""
        if self._copied is not None:
            self._copied.synchronize()  # else the copy of the step before might take this one's numbers
        rows = columns[0].size
        for host, column in zip(self._host_rows, columns, strict=True):
            host[:rows] = column.ravel()
        self._device[:, :rows].copy_(self._host[:, :rows], non_blocking=True)
        torch.ne(self._real[:rows], 0, out=self.real[:rows])
        if self._copied is not None:
            self._copied.record()


class Places:
    """`size` places for requests of q_len tokens; size 0 is for a group that has nothing to do."""

    def __init__(self, inputs: Inputs, size: int, halves: bool, decode: Callable[[int], MlaDecode]) -> None:
        """`decode(n)` makes attention for n requests. `halves`: two micro-batches."""
        self.inputs, self.size, self.q_len = inputs, size, inputs.q_len
        self._make = decode
        self._plans: list[tuple[MlaDecode, range]] = []  # and the places it attends for
        self.batch = self._batch(range(size))
        self._first = -(-size // 2) if halves else size  # places of the first half
        if halves:
            self.batch.halves = self._batch(range(self._first)), self._batch(range(self._first, size))
        self._table = np.zeros((size, 1), dtype=np.int32)
        self._pages: list[list[int] | None] = [None] * size  # whose numbers stand in a row of the table

    def fill(self, pieces: list[Piece]) -> list[int]:
        """Lay out the step of these requests, 1 … q_len tokens of each; the first row of each. The pages of a request,
        a list that nobody changes, have room for q_len rows from its start on."""
        places, q_len = self._of(len(pieces)), self.q_len
        self._write_table(places, [piece.sequence.pages for piece in pieces])
        tokens, real, start, taken = (np.zeros((self.size, n), dtype=np.int64) for n in (q_len, q_len, 1, 1))
        kv_lens = [0] * self.size
        if pieces:
            missing = [q_len - len(piece.tokens) for piece in pieces]
            tokens[places] = [piece.tokens + [0] * n for piece, n in zip(pieces, missing, strict=True)]
            real[places] = np.arange(q_len) < q_len - np.array(missing)[:, None]
            start[places, 0], taken[places] = [piece.start for piece in pieces], 1
        for place, piece in zip(places, pieces, strict=True):
            kv_lens[place] = piece.start + q_len
        if self.size:
            positions = start + np.arange(q_len)
            pages = np.take_along_axis(self._table, positions // PAGE_SIZE, axis=1)
            slots = np.where(taken, pages.astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE, -1)
            self.inputs.write([tokens, positions, slots, real])
        table = torch.from_numpy(self._table)
        for decode, mine in self._plans:
            here = slice(mine.start, mine.stop)
            decode.plan(table[here], kv_lens[here], [q_len] * len(mine))
        return [place * q_len for place in places]

    def _write_table(self, places: list[int], pages: list[list[int]]) -> None:
        """Rows of requests that stood there before are there already."""
        width = max(map(len, pages), default=0)
        if width > self._table.shape[1]:
            self._table, self._pages = np.zeros((self.size, width), dtype=np.int32), [None] * self.size
        for place, mine in zip(places, pages, strict=True):
            if self._pages[place] is not mine:
                self._table[place, : len(mine)] = mine
                self._pages[place] = mine

    def _of(self, count: int) -> list[int]:
        """Where requests go: evenly to both halves, from the front of each."""
        first = -(-count // 2) if self._first < self.size else count
        return [*range(first), *range(self._first, self._first + count - first)]

    def _batch(self, places: range) -> Batch:
        rows, inputs = slice(places.start * self.q_len, places.stop * self.q_len), self.inputs
        decode = None
        if places:
            decode = self._make(len(places))
            self._plans.append((decode, places))
        return Batch(
            inputs.tokens[rows], inputs.positions[rows], inputs.slots[rows], chunks=[], absorbed=True,
            has_work=self.size > 0, real=inputs.real[rows], decode=decode,
        )  # fmt: skip
