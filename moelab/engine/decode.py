"""A step of one shape: so many requests with so many tokens each, on tensors that stay where they are.

Every step of decode has the same shape as the one before if requests bring the same number of tokens, one and its
drafts, and a batch is filled up to one of a few sizes. Then a step is: fill its places (`moelab.engine.places`) and run
the layers; nothing in the layers asks the host for anything. So a step can be captured once in a CUDA graph and
replayed (`moelab.engine.graphs`), and where there is no GPU, or for comparison, the same step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.engine.batch import Piece
from moelab.engine.executor import Observe, run_layers
from moelab.engine.kv_cache import LayerCaches
from moelab.engine.places import Places
from moelab.engine.sampler import Opinion, opinions
from moelab.engine.sequence import Sequence
from moelab.model.batch import Batch
from moelab.model.deepseek import DeepSeek


@dataclass
class Output:
    """What a step comes to; of a captured one, in memory that its next replay overwrites."""

    hidden: Tensor  # [T, H], normed
    idle: Tensor | bool | None = None  # whether no DP group has requests; a tensor, int32 [1]: the device knows
    best: Tensor | None = None  # int64 [T], the likeliest token; where it is not there it is found for what asks

    def fetch(self) -> Output:
        """Itself, with `idle` and `best` on their way to the host: who asks there waits for them, and for nothing that
        was launched since."""

        def on_host(value: Tensor | bool | None) -> Tensor | bool | None:
            return value.to("cpu", non_blocking=True) if isinstance(value, Tensor) else value

        self._on_host = on_host(self.idle), on_host(self.best)
        self._arrived = torch.cuda.current_stream().record_event() if self.hidden.is_cuda else None
        return self

    def opinions(self, model: DeepSeek, rows: list[tuple[Sequence, list[int]]]) -> list[Opinion]:
        """What `model` thinks after these rows of each sequence. Fetched; waits for the device."""
        if not rows:
            return []
        index = torch.tensor([row for _, mine in rows for row in mine])
        counts = [(sequence, len(mine)) for sequence, mine in rows]
        if self.best is None:
            logits = model.logits(self.hidden[index.to(self.hidden.device)])
            return opinions(logits.argmax(-1), counts, lambda drawn: logits[drawn])
        self._wait()
        best = self._on_host[1][index]
        return opinions(best, counts, lambda drawn: model.logits(self.hidden[index[drawn].to(self.hidden.device)]))

    @property
    def all_idle(self) -> bool | None:
        """`idle` on the host. Fetched; waits for the device."""
        self._wait()
        idle = self._on_host[0]
        return bool(idle) if isinstance(idle, Tensor) else idle

    def _wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()


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


class DecodeStep:
    """A body on its places: run eagerly, or captured and replayed. Filled as the places are."""

    def __init__(self, body: Body, places: Places) -> None:
        self.body, self.places = body, places
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Output | None = None

    @property
    def size(self) -> int:
        return self.places.size

    @property
    def batch(self) -> Batch:
        return self.places.batch

    def fill(self, pieces: list[Piece]) -> list[int]:
        """`Places.fill`."""
        return self.places.fill(pieces)

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
        torch.cuda.empty_cache()  # what that run took: the capture has its own
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self._output = self.body(self.batch, None)
