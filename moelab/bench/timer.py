"""Timing kernels by replays of a CUDA graph: no host between them, and inputs that are not in the cache.

One graph holds many calls, on several sets of inputs in turn, so that by the time a set comes round again the others
have pushed it out of the L2. Events stand around each replay; a sample is the time of a replay over its calls. It
includes the gap between two kernels of a graph, as a step of an engine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from moelab.config import MoelabError

# A replay is long enough that the start of a graph, some µs, weighs little; the replays of a call that takes
# milliseconds are few, so that a grid of hundreds of settings ends.
CALLS, REPLAY_US = 32, 3000.0  # so many calls a replay, fewer if they take longer than this
WARMUP_US, WARMUPS = 30e3, (3, 20)  # the clocks come up
TIMED_US, REPLAYS = 150e3, (15, 50)
MAX_SETS = 64


class Samples(NamedTuple):
    us: list[float]  # per call, one for each replay
    warmup: int  # replays thrown away before


class BenchError(MoelabError):
    """A benchmark that cannot run here."""


def require_gpu(what: str) -> torch.device:
    if not torch.cuda.is_available():
        raise BenchError(f"{what} needs a GPU, and torch sees none here: `moelab doctor` says what is missing")
    return torch.device("cuda", torch.cuda.current_device())


def num_sets(set_bytes: float, device: torch.device) -> int:
    """How many input sets of `set_bytes` a rotation needs to pass twice the L2, from 2 to MAX_SETS. Sets below some
    2 MB on an H200 stay in its L2 all the same; so small an op waits for latencies, not for bytes."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_SETS, max(2, 1 + math.ceil(2 * l2 / set_bytes)))


def graph_samples(calls: Sequence[Callable[[], object]]) -> Samples:
    """Time the same work on each set of inputs, an entry of `calls` each. Every call runs twice before the capture, so
    what compiles or allocates then is not timed."""
    rounds = _rounds(len(calls), _eager_us(calls))
    graph = torch.cuda.CUDAGraph()
    # Results are kept, so that a call which allocates its output writes to fresh memory, like one that is given some.
    results = []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            results += [call() for call in calls]
    (first,) = _replay_us(graph, 1)
    warmup = _within(WARMUP_US / first, WARMUPS)
    _replay_us(graph, warmup)
    samples = _replay_us(graph, _within(TIMED_US / first, REPLAYS))
    del results
    return Samples([us / (rounds * len(calls)) for us in samples], warmup + 1)


def _eager_us(calls: Sequence[Callable[[], object]]) -> float:
    """A pass over all calls after one that is not timed, on the stream that a capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        for call in calls:
            call()
        start.record()
        for call in calls:
            call()
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def _rounds(num_calls: int, pass_us: float) -> int:
    """Passes in one replay."""
    return max(1, min(math.ceil(CALLS / num_calls), math.ceil(REPLAY_US / max(pass_us, 1e-3))))


def _replay_us(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in zip(marks, marks[1:], strict=False)]


def _within(count: float, limits: tuple[int, int]) -> int:
    return int(min(limits[1], max(limits[0], count)))
