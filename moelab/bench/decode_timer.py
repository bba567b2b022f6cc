"""Timing a decode step and its parts on ranks that must all do the same.

A call with an exchange in it ends on no rank before all have made it, so every rank makes as many: how many is decided
by the rank that was slowest in a first one. `Ranks` is what they agree by, over the host, between measurements.

On a GPU a call is a replay of a CUDA graph, or launches by the host, and events stand around each; on the CPU it is
the host's clock. Samples are of one rank; the largest of each repetition counts (`alltoall_setting.slowest`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from moelab.bench.timer import Samples

Call = Callable[[], object]

WARMUP_US, TIMED_US = 30e3, 300e3  # of a step; a tenth of it for each part
WARMUPS = {"cuda": (2, 20), "cpu": (1, 3)}
CALLS = {"cuda": (10, 50), "cpu": (3, 15)}
LIMIT_S = 300.0  # a rank that has failed alone is not waited for longer


class Ranks:
    """All ranks of a run, or one alone. Construction and calls are collective."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.size = device, size
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S)) if size > 1 else None

    def align(self) -> None:
        """All ranks have finished what they launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._group is not None:
            dist.barrier(group=self._group)

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self._group is None:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return float(shared)


def time_calls(call: Call, ranks: Ranks, share: float = 1.0) -> Samples:
    """us of a call, several in a row. `share`: of the time that a step gets. Collective."""
    call()
    ranks.align()
    us = max(1e-3, ranks.most(_timed(call, 1, ranks.device)[0]))
    kind = ranks.device.type
    warmup = _within(share * WARMUP_US / us, WARMUPS[kind])
    ranks.align()
    _timed(call, warmup, ranks.device)
    samples = _timed(call, _within(share * TIMED_US / us, CALLS[kind]), ranks.device)
    ranks.align()
    return Samples(samples, 2 + warmup)


def as_graph(body: Call, ranks: Ranks) -> Call:
    """A call that replays `body`, which has run before; on the CPU `body` itself. NCCL's own threads may call CUDA
    meanwhile, hence the capture of this thread only."""
    if ranks.device.type != "cuda":
        return body
    ranks.align()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph.replay


def split_calls(pairs: Sequence[tuple[Call, Call]], ranks: Ranks, captured: bool) -> tuple[float, float]:
    """Shares of the time that the first and the second calls of `pairs`, which take turns, have in all of it.

    On a GPU in one graph with event nodes between them, which weigh on both alike. Collective.
    """
    marks: list = []
    external = captured and ranks.device.type == "cuda"

    def body() -> None:
        marks.clear()
        marks.append(_mark(ranks.device, external))
        for pair in pairs:
            for call in pair:
                call()
                marks.append(_mark(ranks.device, external))

    replay = as_graph(body, ranks) if external else body
    sums = [0.0, 0.0]
    for repeat in range(6):
        replay()
        ranks.align()
        if repeat:
            times = _between(marks)
            sums[0] += sum(times[::2])
            sums[1] += sum(times[1::2])
    return sums[0] / sum(sums), sums[1] / sum(sums)


def _timed(call: Call, times: int, device: torch.device) -> list[float]:
    marks = [_mark(device)]
    for _ in range(times):
        call()
        marks.append(_mark(device))
    return _between(marks)


def _mark(device: torch.device, external: bool = False):
    """Now, on the host's clock or as an event in the stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=external)
    event.record()
    return event


def _between(marks: Sequence) -> list[float]:
    """us from each mark to the next; waits for the last."""
    if isinstance(marks[0], float):
        return [(end - start) * 1e6 for start, end in pairwise(marks)]
    marks[-1].synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairwise(marks)]


def _within(count: float, limits: tuple[int, int]) -> int:
    return int(min(limits[1], max(limits[0], math.ceil(count))))
