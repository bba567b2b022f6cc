"""Timing kernels by replays of a CUDA graph: no host between them, and inputs that are not in the cache.

One graph holds many calls, on several sets of inputs in turn, so that by the time a set comes round again the others
have pushed it out of the L2. Events stand around each replay; a sample is the time of a replay over its calls. It
includes the gap between two kernels of a graph, as a step of an engine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from moelab.config import MoelabError

CALLS = 32  # at least, per replay: the start of a graph, some µs, then weighs little
WARMUP = 20  # replays; some ms, in which the clocks come up
REPLAYS = 50
MAX_SETS = 64


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


def graph_samples(
    calls: Sequence[Callable[[], object]], replays: int = REPLAYS, warmup: int = WARMUP, least_calls: int = CALLS
) -> list[float]:
    """µs per call, one sample for each of `replays`. `calls`: the same work on each set of inputs; each runs once
    before the capture, so what compiles or allocates then is not timed. `warmup` replays are thrown away."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    rounds = math.ceil(least_calls / len(calls))
    graph = torch.cuda.CUDAGraph()
    # Results are kept, so that a call which allocates its output writes to fresh memory, like one that is given some.
    results = []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            results += [call() for call in calls]
    for _ in range(warmup):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    del results
    return [start.elapsed_time(end) * 1e3 / (rounds * len(calls)) for start, end in zip(marks, marks[1:], strict=False)]
