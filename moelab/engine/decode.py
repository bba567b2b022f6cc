"""A step of one shape: so many requests with so many tokens each, on tensors that stay where they are.

Every step of decode has the same shape as the one before if requests bring the same number of tokens, one and its
drafts, and a batch is filled up to one of a few sizes. Then a step is: write tokens, positions and slots into tensors
that are there already, plan attention, and run the layers; nothing in the layers asks the host for anything. So a step
can be captured once in a CUDA graph and replayed (`moelab.engine.graphs`), and where there is no GPU, or for
comparison, the same step runs eagerly.

**Filling up.** A batch of size B has places for B requests of q tokens. Places without a request are padding: slot −1,
no cached rows, routed nowhere. A request that brings fewer than q tokens is filled up too: those rows stand behind its
own, at the positions that come next, and do write the cache, for what attention reads must be numbers; they are routed
nowhere, and whoever comes to those positions later overwrites them. The cache needs room for them.

**Halves.** Where micro-batches alternate, B places are cut in two, and requests are spread evenly over both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.engine.batch import Piece
from moelab.engine.executor import Observe, run_layers
from moelab.engine.kv_cache import PAGE_SIZE, LayerCaches
from moelab.engine.sampler import Opinion, opinions
from moelab.engine.sequence import Sequence
from moelab.model.batch import Batch
from moelab.model.deepseek import DeepSeek
from moelab.ops.mla_decode import MlaDecode


@dataclass
class Output:
    """What a step comes to; of a captured one, in memory that its next replay overwrites."""

    hidden: Tensor  # [T, H], normed
    idle: Tensor | bool | None = None  # whether no DP group has requests; a tensor, int32 [1]: the device knows
    best: Tensor | None = None  # int64 [T], the likeliest token; where it is not there it is found for what asks

    def opinions(self, model: DeepSeek, rows: list[tuple[Sequence, list[int]]]) -> list[Opinion]:
        """What `model` thinks after these rows of each sequence. Waits for the device."""
        if not rows:
            return []
        index = torch.tensor([row for _, mine in rows for row in mine], device=self.hidden.device)
        hidden = self.hidden[index]
        counts = [(sequence, len(mine)) for sequence, mine in rows]
        if self.best is not None:
            return opinions(self.best[index], counts, lambda drawn: model.logits(hidden[drawn]))
        logits = model.logits(hidden)
        return opinions(logits.argmax(-1), counts, lambda drawn: logits[drawn])

    @property
    def all_idle(self) -> bool | None:
        """`idle` on the host. Waits for the device."""
        return bool(self.idle) if isinstance(self.idle, Tensor) else self.idle


Body = Callable[[Batch, Observe | None], Output]


def run_model(
    model: DeepSeek, caches: LayerCaches, overlap: str, batch: Batch, observe: Observe | None = None
) -> Output:
    """A batch through the main model, from tokens to normed hidden states. Collective."""
    state = model.begin(batch, caches)
    run_layers(model, state, overlap, observe)
    # A copy: the exchanges of a draft pass write theirs to the same place, and an empty pass says that it is idle.
    idle = state.idle.clone() if isinstance(state.idle, Tensor) else state.idle
    return Output(model.finish(state), idle)


def decode_body(model: DeepSeek, caches: LayerCaches, overlap: str) -> Body:
    """The main model's step of known shape, to the likeliest next token of each row."""

    def body(batch: Batch, observe: Observe | None) -> Output:
        output = run_model(model, caches, overlap, batch, observe)
        output.best = model.logits(output.hidden).argmax(-1)
        return output

    return body


class Inputs:
    """What the host tells the device of a step: one memory for all sizes, filled by one copy.

    `tokens`, `positions` and `slots` int64 [max_batch · q_len]; `real` bool likewise; `hidden` [max_batch · q_len, H],
    for a step that starts from hidden states (`hidden_size` H, 0: none do).
    """

    COLUMNS = ("tokens", "positions", "slots", "real")

    def __init__(
        self, max_batch: int, q_len: int, device: torch.device | str, hidden_size: int = 0, dtype: torch.dtype = None
    ) -> None:
        self.max_batch, self.q_len = max_batch, q_len
        rows, on_gpu = max_batch * q_len, torch.device(device).type == "cuda"
        self._host = torch.zeros(len(self.COLUMNS), rows, dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.zeros_like(self._host, device=device)
        self.tokens, self.positions, self.slots, self._real = self._device
        self.real = torch.zeros(rows, dtype=torch.bool, device=device)
        self.hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None

    def write(self, columns: list[list[int]]) -> None:
        """COLUMNS, of equal length."""
        if self._copied is not None:
            self._copied.synchronize()  # else the copy of the step before might take this one's numbers
        rows = len(columns[0])
        self._host[:, :rows] = torch.tensor(columns, dtype=torch.int64)
        self._device[:, :rows].copy_(self._host[:, :rows], non_blocking=True)
        torch.ne(self._real[:rows], 0, out=self.real[:rows])
        if self._copied is not None:
            self._copied.record()


class DecodeStep:
    """`size` places of q_len tokens; size 0 is the step of a group that has nothing to do."""

    def __init__(self, body: Body, inputs: Inputs, size: int, halves: bool, decode: Callable[[int], MlaDecode]) -> None:
        """`decode(n)` makes attention for n requests. `halves`: two micro-batches."""
        self.body, self.inputs, self.size, self.q_len = body, inputs, size, inputs.q_len
        self._make = decode
        self._plans: list[tuple[MlaDecode, range]] = []  # and the places it attends for
        self.batch = self._batch(range(size))
        self._first = -(-size // 2) if halves else size  # places of the first half
        if halves:
            self.batch.halves = self._batch(range(self._first)), self._batch(range(self._first, size))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Output | None = None

    def fill(self, pieces: list[Piece]) -> list[int]:
        """Lay out the step of these requests, 1 … q_len tokens of each; the first row of each. The pages of a request
        have room for q_len rows from its start on."""
        places = self._places(len(pieces))
        tables, kv_lens = [[]] * self.size, [0] * self.size
        tokens, positions, slots, real = ([fill] * (self.size * self.q_len) for fill in (0, 0, -1, 0))
        for place, (sequence, start, new) in zip(places, pieces, strict=True):
            rows = slice(place * self.q_len, (place + 1) * self.q_len)
            span, missing = range(start, start + self.q_len), self.q_len - len(new)
            tokens[rows], positions[rows] = new + [0] * missing, span
            slots[rows] = [sequence.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in span]
            real[rows] = [1] * len(new) + [0] * missing
            tables[place], kv_lens[place] = sequence.pages, span.stop
        if self.size:
            self.inputs.write([tokens, positions, slots, real])
        width = max(map(len, tables), default=0)
        table = torch.tensor([pages + [0] * (width - len(pages)) for pages in tables], dtype=torch.int32)
        for decode, mine in self._plans:
            here = slice(mine.start, mine.stop)
            decode.plan(table[here], kv_lens[here], [self.q_len] * len(mine))
        return [place * self.q_len for place in places]

    def run(self, observe: Observe | None = None) -> Output:
        """The step as filled. Collective. A captured step is replayed, unless its stages are observed."""
        if self._graph is None or observe is not None:
            return self.body(self.batch, observe)
        self._graph.replay()
        return self._output

    def capture(self, stream: torch.cuda.Stream, pool: object) -> None:
        """Run once without requests, which compiles and allocates what is missing, then capture. Collective: it is run
        once for all that a peer can see."""
        self.fill([])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.body(self.batch, None)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self._output = self.body(self.batch, None)

    def _places(self, count: int) -> list[int]:
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
