"""Timing in turns: who is replayed when, what is counted as whose, and what a failure leaves alone."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch

from moelab.bench import timer
from moelab.bench.timer import REPLAYS, WARMUPS, graph_samples, in_turns, samples_in_turns


@pytest.mark.parametrize("counts", [[], [1], [50], [50, 50, 50], [15, 50], [50, 17, 15, 33], [3, 20]])
def test_turns_are_spread_over_the_whole(counts):
    order = in_turns(counts)
    assert Counter(order) == Counter(dict(enumerate(counts)))
    for i, n in enumerate(counts):
        for k, at in enumerate(place for place, who in enumerate(order) if who == i):
            assert abs((at + 0.5) / len(order) - (k + 0.5) / n) <= 1 / n


def test_a_steady_drift_adds_the_same_to_all():
    order = in_turns([20, 20, 20])
    places = [[place for place, who in enumerate(order) if who == i] for i in range(3)]
    assert order[:6] == [0, 1, 2, 2, 1, 0] and len({sum(of) for of in places}) == 1


class Clock:
    """A GPU that does nothing but take time: `now` is what its events read, in ms."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.replayed, self.pools = 0.0, [], []
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: self.pools.append(None) or len(self.pools))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: graph.captured_in(pool))
        monkeypatch.setattr(timer, "_eager_us", self.eager_us)

    def eager_us(self, calls) -> float:
        return sum(call() for call in calls)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at = self.clock.now

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Graph:
    """Takes what the calls that were captured said that they take, in us."""

    captures: Graph | None = None

    def __init__(self, clock: Clock) -> None:
        self.clock, self.us = clock, 0.0

    def captured_in(self, pool: int) -> Graph:
        self.pool = pool
        return self

    def __enter__(self) -> None:
        Graph.captures = self

    def __exit__(self, *error) -> None:
        Graph.captures = None

    def replay(self) -> None:
        self.clock.replayed.append(self)
        self.clock.now += self.us / 1e3


def call(us: float, fails_at: str = ""):
    def run() -> float:
        if fails_at == "once" or (fails_at == "capture" and Graph.captures):
            raise ValueError(f"at {fails_at}")
        if Graph.captures:
            Graph.captures.us += us
        return us

    return run


def test_samples_are_each_ones_own(monkeypatch):
    clock = Clock(monkeypatch)
    quick, slow = samples_in_turns([[call(4.0), call(6.0)], [call(900.0), call(1100.0)]])
    assert quick.us == pytest.approx([5.0] * REPLAYS[1]) and slow.us == pytest.approx([1000.0] * 37)
    assert quick.warmup == WARMUPS[1] + 1 and slow.warmup == 7 + 1  # a replay of these takes 4 ms
    assert sorted(Counter(clock.replayed).values()) == [1 + 7 + 37, 1 + 20 + 50]
    assert {graph.pool for graph in clock.replayed} == {1}
    assert len(set(clock.replayed[-4:])) == 2  # in turns to the end
    (long,) = samples_in_turns([[call(40e3)]])
    assert long.us == pytest.approx([40e3] * REPLAYS[0]) and long.warmup == WARMUPS[0] + 1


@pytest.mark.parametrize("where", ["once", "capture"])
def test_one_that_raises_leaves_the_others_alone(monkeypatch, where):
    clock = Clock(monkeypatch)
    first, error, last = samples_in_turns([[call(4.0)], [call(5.0, where)], [call(6.0)]])
    assert isinstance(error, ValueError) and str(error) == f"at {where}"
    assert first.us == pytest.approx([4.0] * 50) and last.us == pytest.approx([6.0] * 50)
    assert {graph.pool for graph in clock.replayed} == {1, 2}
    with pytest.raises(ValueError, match=f"at {where}"):
        graph_samples([call(5.0, where)])
    assert samples_in_turns([[call(5.0, where)]])[0].args == (f"at {where}",)


def test_what_a_failure_had_allocated_is_free_for_the_others(monkeypatch):
    Clock(monkeypatch)
    held = []

    def broken() -> float:
        output = torch.empty(3)
        held.append(weakref.ref(output))
        raise ValueError("no more memory")

    error, _ = samples_in_turns([[broken], [call(6.0)]])
    assert isinstance(error, ValueError) and held[0]() is None


@pytest.mark.gpu
def test_backends_in_turns_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; none here")
    sets = [torch.randn(1 << 24, device="cuda") for _ in range(4)]  # 64 MiB each, as much as is allocated by a call

    def broken(x):
        raise ValueError("never")

    def calls(function):
        return [lambda x=x: function(x) for x in sets]

    def reserved(*functions) -> tuple[int, list]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found = samples_in_turns([calls(function) for function in functions])
        return torch.cuda.max_memory_reserved(), found

    alone, (once,) = reserved(torch.neg)
    together, found = reserved(torch.neg, torch.abs, broken, torch.exp)
    assert isinstance(found[2], ValueError)
    for samples in (once, found[0], found[1], found[3]):
        assert len(samples.us) >= REPLAYS[0] and all(5 < us < 1000 for us in samples.us)  # 128 MiB at some TB/s
    assert together < 2 * alone  # three graphs, and not three times the outputs
