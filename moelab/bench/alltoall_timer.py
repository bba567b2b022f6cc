"""Timing an exchange, which ends on no rank before the slowest has sent.

Nothing is agreed between ranks while it is timed: every rank runs the same calls, the exchanges themselves keep them in
step, and each rank's samples are put side by side afterwards, where the largest of each repetition counts
(`alltoall_setting.slowest`).
Four clocks:

- `pair_samples`: a CUDA graph of ten pairs, dispatch and combine in turn; events around each replay; a sample is the
  replay's time over its pairs. The period of a pair, with the gaps between kernels and without the host.
- `half_samples`: dispatch and combine apart. They have to alternate, so a graph holds several dispatches one after the
  other, as many as may be in flight, then their combines, and event nodes where one changes to the other; a sample is
  the time between two event nodes over the calls between them. What two event nodes take with nothing between
  (`empty_samples`) is printed with the floor and not taken off: divided by the calls, it is in every sample.
- `eager_samples`: the host launches each call; before it, the L2 is swept and an all-reduce brings the ranks together.
  Events stand around a single call. Below some 30 us it is the host that is timed.
- `enqueue_samples`: what the host spends on a pair, on its own clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moelab.bench.timer import Samples

Call = Callable[[], object]

# Few pairs and few replays in a row: on two H200s NCCL's pair at one token took 45 us, from 31 to 77, in graphs of 32
# pairs replayed a hundred times without a pause, while its halves took 14 and 15. Why is not known, and whether short
# bursts suit it is to be measured; our kernels did not mind either.
PAIRS, LEAST_PAIRS, GRAPH_US = 10, 2, 2000.0  # pairs in a graph, fewer if they take longer than this together
WARMUPS, BURST, BURSTS, TIMED_US = 3, 20, (3, 12), 60e3  # replays in a row, and how often; BURST is timed
ROUNDS, HALF_REPLAYS = 6, (6, 40)  # of a graph of halves; the first round of each replay brings the ranks together
EAGER_WARMUPS, EAGERS = 5, 40
LIMIT_S = 120.0  # a rank that has failed alone is not waited for longer
ENQUEUES = 8  # pairs at once, so few that the queue to the GPU never fills


class Ranks:
    """What ranks agree on between measurements, over the host alone. Construction is collective, so is every call."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S))

    def align(self) -> None:
        """All ranks have finished what they launched."""
        torch.cuda.synchronize()
        dist.barrier(group=self.group)

    def most(self, value: float) -> float:
        shared = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return float(shared)

    def first(self, trouble: str | None) -> str | None:
        """What the first rank in trouble says, on all ranks; None if there is none."""
        of_ranks: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, trouble, group=self.group)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(of_ranks) if text), None)

    def attempt(self, doing: Callable[[], object]) -> object:
        """`doing()` on all ranks. Raises Failed on all of them if it raised on one."""
        result, trouble = None, None
        try:
            result = doing()
        except Exception as error:
            trouble = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if trouble := self.first(trouble):
            raise Failed(trouble)
        return result


class Failed(Exception):
    """Something raised on some rank; the same text on all of them."""


def graph_of(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """NCCL's own threads may call CUDA meanwhile, hence the capture of this thread only."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph


def once_us(pair: Call, ranks: Ranks) -> float:
    """About how long a pair takes; the same on all ranks. What compiles or allocates at first use does so here."""
    for _ in range(3):
        pair()
    ranks.align()
    start, end = _events(2)
    start.record()
    for _ in range(4):
        pair()
    end.record()
    torch.cuda.synchronize()
    return ranks.most(start.elapsed_time(end) * 250)


def pair_samples(pair: Call, pair_us: float, ranks: Ranks) -> Samples:
    """us of a pair, one for each replay. `pair_us`, from `once_us`, decides how many there are."""
    pairs = int(min(PAIRS, max(LEAST_PAIRS, GRAPH_US / pair_us)))
    graph = ranks.attempt(lambda: graph_of(lambda: [pair() for _ in range(pairs)]))
    us = []
    for _ in range(_within(TIMED_US / (BURST * pairs * pair_us), BURSTS)):
        ranks.align()
        for _ in range(WARMUPS):
            graph.replay()
        marks = _events(BURST + 1)
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        us += [time / pairs for time in _between(marks)]
    ranks.align()
    return Samples(us, WARMUPS)


def half_samples(
    dispatch: Callable[[int], object], combine: Callable[[int], object], depth: int, pair_us: float, ranks: Ranks
) -> tuple[Samples, Samples]:
    """us of a dispatch and of a combine, `depth` of each in a row: `dispatch(i)` and `combine(i)`, i < depth."""
    marks = _events(2 * ROUNDS + 1, external=True)

    def body() -> None:
        for i in range(ROUNDS):
            marks[2 * i].record()
            for slot in range(depth):
                dispatch(slot)
            marks[2 * i + 1].record()
            for slot in range(depth):
                combine(slot)
        marks[-1].record()

    graph = ranks.attempt(lambda: graph_of(body))
    replays = _within(TIMED_US / (ROUNDS * depth * pair_us), HALF_REPLAYS)
    halves: tuple[list[float], list[float]] = [], []
    ranks.align()
    for replay in range(replays + 1):
        graph.replay()
        torch.cuda.synchronize()
        if replay:
            times = [us / depth for us in _between(marks)][2:]
            halves[0].extend(times[::2])
            halves[1].extend(times[1::2])
    ranks.align()
    return Samples(halves[0], ROUNDS), Samples(halves[1], ROUNDS)


def empty_samples(ranks: Ranks, replays: int = 40) -> Samples:
    """us between two event nodes of a graph, nothing between them."""
    marks = _events(3, external=True)
    graph = ranks.attempt(lambda: graph_of(lambda: [mark.record() for mark in marks]))
    us = []
    for _ in range(replays + 1):
        graph.replay()
        torch.cuda.synchronize()
        us.append(_between(marks)[1])
    return Samples(us[1:], 1)


def eager_samples(dispatch: Call, combine: Call, device: torch.device, ranks: Ranks) -> tuple[Samples, Samples]:
    """us of a single dispatch and a single combine, launched by the host."""
    sweep = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    meet = torch.zeros(1, device=device)
    halves: tuple[list, list] = [], []
    ranks.align()
    for _ in range(EAGER_WARMUPS + EAGERS):
        for call, marks in ((dispatch, halves[0]), (combine, halves[1])):
            start, end = _events(2)
            sweep.zero_()
            dist.all_reduce(meet)
            start.record()
            call()
            end.record()
            marks.append((start, end))
    ranks.align()
    us = [[start.elapsed_time(end) * 1e3 for start, end in marks[EAGER_WARMUPS:]] for marks in halves]
    return Samples(us[0], EAGER_WARMUPS), Samples(us[1], EAGER_WARMUPS)


def enqueue_samples(pair: Call, ranks: Ranks, repeats: int = 20) -> Samples:
    """us of the host for a pair, which it does not wait for."""
    us = []
    for _ in range(repeats + 1):
        ranks.align()
        start = time.perf_counter()
        for _ in range(ENQUEUES):
            pair()
        us.append((time.perf_counter() - start) * 1e6 / ENQUEUES)
    ranks.align()
    return Samples(us[1:], 1)


def _events(count: int, external: bool = False) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True, external=external) for _ in range(count)]


def _between(marks: Sequence[torch.cuda.Event]) -> list[float]:
    return [start.elapsed_time(end) * 1e3 for start, end in zip(marks, marks[1:], strict=False)]


def _within(count: float, limits: tuple[int, int]) -> int:
    return int(min(limits[1], max(limits[0], math.ceil(count))))
