"""Timing kernels by replays of a CUDA graph: no host between them, and inputs that are not in the cache.

One graph holds many calls, on several sets of inputs in turn, so that by the time a set comes round again the others
have pushed it out of the L2. Events stand around each replay; a sample is the time of a replay over its calls. It
includes the gap between two kernels of a graph, as a step of an engine does.

A GPU's clock drifts by more than backends differ. So the graphs of all backends that are to be compared are captured
first and replayed in turns, there and back (A B C C B A …): each one's samples are spread over the same time.
"""

from __future__ import annotations

import math
import traceback
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
    (samples,) = samples_in_turns([calls])
    if isinstance(samples, Exception):
        raise samples
    return samples


def samples_in_turns(backends: Sequence[Sequence[Callable[[], object]]]) -> list[Samples | Exception]:
    """`graph_samples` of several backends over the same time; for one that raises, what it raised, and the others go
    on. The graphs share their memory: that of outputs which calls allocate is that of one backend, not of all."""
    found: list[_Captured | Exception] = []
    pool = torch.cuda.graph_pool_handle()
    for calls in backends:
        try:
            found.append(_Captured(calls, pool))
        except Exception as error:  # reported by who asked
            traceback.clear_frames(error.__traceback__)  # which hold what it had allocated
            found.append(error)
            pool = torch.cuda.graph_pool_handle()  # torch may take the old one for still being captured into
    ready = [one for one in found if isinstance(one, _Captured)]
    warmups = [_within(WARMUP_US / one.first_us, WARMUPS) for one in ready]
    times = [_within(TIMED_US / one.first_us, REPLAYS) for one in ready]
    _replay_us(ready, in_turns(warmups))
    samples = _replay_us(ready, in_turns(times))
    timed = iter(
        Samples([us / one.calls for us in of], warmup + 1)
        for one, of, warmup in zip(ready, samples, warmups, strict=True)
    )
    return [one if isinstance(one, Exception) else next(timed) for one in found]


def in_turns(counts: Sequence[int]) -> list[int]:
    """The order in which i has counts[i] turns, each one's spread over the whole; there and back, so that a steady
    drift adds the same to all that have as many."""
    turns = [((k + 0.5) / n, i if k % 2 == 0 else -i, i) for i, n in enumerate(counts) for k in range(n)]
    return [i for *_, i in sorted(turns)]


class _Captured:
    """A backend's graph, and what one replay took."""

    def __init__(self, calls: Sequence[Callable[[], object]], pool: tuple[int, int]) -> None:
        rounds = _rounds(len(calls), _eager_us(calls))
        self.calls = rounds * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        # Results are kept while it is captured, so that a call which allocates its output writes to fresh memory, like
        # one that is given some. Nobody reads them: afterwards the next backend's may have their place.
        results = []
        with torch.cuda.graph(self.graph, pool=pool):
            for _ in range(rounds):
                results += [call() for call in calls]
        del results
        ((self.first_us,),) = _replay_us([self], [0])


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


def _replay_us(captured: Sequence[_Captured], order: Sequence[int]) -> list[list[float]]:
    """What each replay took, of each of `captured` in the order of its turns."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
    marks[0].record()
    for i, mark in zip(order, marks[1:], strict=True):
        captured[i].graph.replay()
        mark.record()
    torch.cuda.synchronize()
    us: list[list[float]] = [[] for _ in captured]
    for i, start, end in zip(order, marks, marks[1:], strict=False):
        us[i].append(start.elapsed_time(end) * 1e3)
    return us


def _within(count: float, limits: tuple[int, int]) -> int:
    return int(min(limits[1], max(limits[0], count)))
