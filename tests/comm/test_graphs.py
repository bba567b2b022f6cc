"""CUDA graphs, two streams and neighbours, over NVSHMEM: what a device that runs ahead of the host may get wrong."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from moelab.comm import AllToAll
from moelab.ops.early_launch import launches_early
from tests.comm import cases
from tests.comm.scenario import Scenario
from tests.conftest import SEED
from tests.pool import Rank

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu


def scenario(pool, **options) -> Scenario:
    ep = pool.up_to(4)
    tp = 2 if ep > 2 else 1
    return Scenario(**dict(dp=ep // tp, tp=tp, tokens=(5, 8)[: ep // tp], hidden=256, seed=SEED) | options)


class Buffers:
    """What a graph is captured over: room for M tokens, at addresses that stay."""

    def __init__(self, s: Scenario, device: torch.device) -> None:
        m = s.max_tokens
        self.x = torch.empty(m, s.hidden, dtype=torch.bfloat16, device=device)
        self.ids = torch.empty(m, s.top_k, dtype=torch.int64, device=device)
        self.weights = torch.empty(m, s.top_k, device=device)
        self.out = torch.empty(m, s.hidden, device=device)

    def fill(self, rank: Rank, s: Scenario) -> None:
        g = cases.mine(rank, s)
        self.ids.fill_(999)
        for mine, t in ((self.x, g.x), (self.ids, g.ids), (self.weights, g.weights)):
            if mine is not self.ids:
                mine.fill_(torch.nan)
            mine[: len(t)] = t
        self.out.fill_(torch.nan)


def experts(rank: Rank, s: Scenario, rows: torch.Tensor) -> torch.Tensor:
    """All rows, whatever stands beyond the counts: nothing is asked on the host."""
    first = rank.index * s.spec.local_experts
    return torch.stack([s.expert(first + e, rows[e].float()) for e in range(len(rows))])


def step(
    rank: Rank, a2a: AllToAll, s: Scenario, b: Buffers, n: int, fused: bool, count: torch.Tensor | None = None
) -> None:
    """An exchange of the first n tokens."""
    arguments = b.x[:n], b.ids[:n], b.weights[:n], None, count
    if fused:
        h, rows, _, _ = a2a.dispatch(*arguments)
        a2a.combine(h, experts(rank, s, rows), b.out[:n])
    else:
        h = a2a.dispatch_send(*arguments)
        rows, _, _ = a2a.dispatch_recv(h)
        a2a.combine_send(h, experts(rank, s, rows))
        a2a.combine_recv(h, b.out[:n])


def capture(*arguments) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*arguments)
    return graph


def check(rank: Rank, a2a: AllToAll, s: Scenario, b: Buffers, n: int) -> None:
    a2a.check()
    cases.check_out(s, s.groups()[rank.index // s.tp], b.out[:n])
    assert b.out[n:].isnan().all(), "rows beyond the tokens were written"


def graphs_and_calls(rank: Rank, s: Scenario) -> None:
    """Every round each DP group has other numbers of tokens, and each rank takes a graph for it or calls the halves."""
    b = Buffers(s, rank.device)
    b.x.zero_()
    experts(rank, s, torch.zeros(s.spec.rows_shape, dtype=torch.bfloat16, device=rank.device))  # torch's own kernels
    with s.construct(rank, slots=1) as a2a:
        sizes = (0, 1, 5, s.max_tokens)
        # The first exchanges of all are captured ones: nothing may be set up at first use.
        graphs = {(n, fused): capture(rank, a2a, s, b, n, fused) for n in sizes for fused in (False, True)}
        count = torch.zeros(1, dtype=torch.int32, device=rank.device)
        counted = capture(rank, a2a, s, b, s.max_tokens, True, count)
        ours = random.Random(f"{s.seed} {rank.index}")
        for round_ in range(16):
            draw = random.Random(f"{s.seed} {round_}")
            fused = draw.random() < 0.5  # of an exchange on all ranks
            si = s.replace(seed=s.seed + round_, tokens=tuple(draw.choice(sizes) for _ in s.tokens))
            n = si.tokens[rank.index // s.tp]
            b.fill(rank, si)
            count.fill_(n)
            how = ours.choice(["graph", "call", "count"] if fused else ["graph", "call"])
            if how == "graph":
                graphs[n, fused].replay()
            elif how == "count":
                counted.replay()
            else:
                step(rank, a2a, si, b, n, fused)
            check(rank, a2a, si, b, n)


def test_graphs_of_several_sizes_mix_with_calls(nvshmem_pool):
    s = scenario(nvshmem_pool)
    nvshmem_pool.run(graphs_and_calls, s, ranks=s.ep)


def many_replays(rank: Rank, s: Scenario, replays: int) -> int:
    """Replays whose outputs were wrong, counted on the device; the inputs change from one to the next."""
    b, inputs = Buffers(s, rank.device), 7
    with s.construct(rank, slots=1) as a2a:
        kept = []
        for i in range(inputs):
            si = s.replace(seed=s.seed + i, masked=0.0)
            b.fill(rank, si)
            n = len(cases.mine(rank, si).x)
            step(rank, a2a, si, b, n, fused=True)
            check(rank, a2a, si, b, n)
            kept.append([t.clone() for t in (b.x[:n], b.ids[:n], b.weights[:n], b.out[:n])])
        xs, all_ids, all_weights, wanted = map(torch.stack, zip(*kept, strict=True))
        turn = torch.zeros(1, dtype=torch.int64, device=rank.device)
        wrong = torch.zeros(1, dtype=torch.int64, device=rank.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for mine, source in ((b.x, xs), (b.ids, all_ids), (b.weights, all_weights)):
                mine[:n] = source.index_select(0, turn)[0]
            step(rank, a2a, s, b, n, fused=True)
            wrong += (b.out[:n] != wanted.index_select(0, turn)[0]).any()
            turn.copy_((turn + 1) % inputs)
        for i in range(replays):
            graph.replay()
            if i % 500 == 499:
                a2a.check()
        a2a.check()
        return int(wrong)


def test_ten_thousand_replays(nvshmem_pool):
    s = scenario(nvshmem_pool)
    # Ranks that share a GPU take turns on it, which costs milliseconds.
    replays = 10_000 if nvshmem_pool.size <= torch.cuda.device_count() else 200
    assert nvshmem_pool.run(many_replays, s, replays, ranks=s.ep) == [0] * s.ep


def two_streams(rank: Rank, s: Scenario) -> None:
    """Two micro-batches, each slot on a stream of its own, their halves in any order (the same on every rank)."""
    group = dataclasses.replace(rank.groups[s.ep], num_blocks=8)  # all that may spin at once fits on the GPU
    streams = [torch.cuda.Stream(rank.device) for _ in range(2)]
    with s.construct(rank, group=group) as a2a:
        for round_ in range(12):
            draw = random.Random(f"{s.seed} {round_}")
            scenarios = [s.replace(seed=s.seed + 2 * round_ + i) for i in range(2)]
            buffers = [Buffers(s, rank.device) for _ in scenarios]
            for b, si in zip(buffers, scenarios, strict=True):
                b.fill(rank, si)
            torch.cuda.synchronize()
            order = draw.sample([0] * 4 + [1] * 4, 8)
            handles: list = [None, None]
            rows: list = [None, None]
            done = [0, 0]
            for i in order:
                b, n = buffers[i], len(scenarios[i].groups()[rank.index // s.tp].x)
                slot = a2a._free[0] if handles[i] is None else handles[i].slot
                with torch.cuda.stream(streams[slot]):
                    if done[i] == 0:
                        handles[i] = a2a.dispatch_send(b.x[:n], b.ids[:n], b.weights[:n])
                        b.x.fill_(torch.nan)
                    elif done[i] == 1:
                        rows[i], _, _ = a2a.dispatch_recv(handles[i])
                    elif done[i] == 2:
                        y = experts(rank, s, rows[i])
                        a2a.combine_send(handles[i], y)
                        y.fill_(torch.nan)
                        y.record_stream(streams[slot])
                    else:
                        a2a.combine_recv(handles[i], b.out[:n])
                done[i] += 1
            for b, si in zip(buffers, scenarios, strict=True):
                check(rank, a2a, si, b, len(si.groups()[rank.index // s.tp].x))


def test_two_micro_batches_on_two_streams(nvshmem_pool):
    s = scenario(nvshmem_pool)
    nvshmem_pool.run(two_streams, s, ranks=s.ep)


@triton.jit
def _overwrite(target, n, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.full((BLOCK,), -1, tl.int32), mask=i < n)


def overwrite(t: torch.Tensor) -> None:
    """Ones in every bit, by a kernel that is on the GPU before its predecessor has ended."""
    flat = t.view(-1).view(torch.int32)
    early = launches_early(t)
    grid = (triton.cdiv(len(flat), 1024),)
    _overwrite[grid](flat, len(flat), EARLY=early, BLOCK=1024, launch_pdl=early)


def neighbours(rank: Rank, s: Scenario) -> None:
    with s.construct(rank, slots=1) as a2a:
        for round_ in range(20):
            si = s.replace(seed=s.seed + round_)
            b = Buffers(s, rank.device)
            b.fill(rank, si)
            n = len(cases.mine(rank, si).x)
            h = a2a.dispatch_send(b.x[:n], b.ids[:n], b.weights[:n])
            for t in (b.x, b.ids, b.weights):
                overwrite(t)
            rows, _, _ = a2a.dispatch_recv(h)
            y = experts(rank, s, rows)
            overwrite(rows)
            a2a.combine_send(h, y)
            overwrite(y)
            a2a.combine_recv(h, b.out[:n])
            check(rank, a2a, si, b, n)


def test_a_neighbour_that_starts_early_may_overwrite_what_was_sent(nvshmem_pool):
    s = scenario(nvshmem_pool)
    nvshmem_pool.run(neighbours, s, ranks=s.ep)


def allocations(rank: Rank, s: Scenario) -> int:
    b = Buffers(s, rank.device)
    y = torch.zeros(s.spec.rows_shape, dtype=torch.bfloat16, device=rank.device)
    b.fill(rank, s)
    with s.construct(rank) as a2a:
        before = torch.cuda.memory_stats(rank.device)["allocation.all.allocated"]
        free = torch.cuda.mem_get_info(rank.device)[0]
        h = a2a.dispatch_send(b.x[:5], b.ids[:5].clamp_(max=0), b.weights[:5])
        a2a.dispatch_recv(h)
        a2a.combine_send(h, y)
        a2a.combine_recv(h, b.out[:5])
        h, *_ = a2a.dispatch(b.x[:5], b.ids[:5], b.weights[:5])
        a2a.combine(h, y, b.out[:5])
        a2a.check()
        assert torch.cuda.mem_get_info(rank.device)[0] >= free - (1 << 20) or s.ep > torch.cuda.device_count()
        return torch.cuda.memory_stats(rank.device)["allocation.all.allocated"] - before


def test_no_allocation_after_construction(nvshmem_pool):
    s = scenario(nvshmem_pool, tokens=(5, 5)[: scenario(nvshmem_pool).dp])
    assert nvshmem_pool.run(allocations, s, ranks=s.ep) == [0] * s.ep
