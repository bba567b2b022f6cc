"""Receives wait for exactly what is missing, and no wait lasts for ever."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, wait

import pytest
import torch
import torch.distributed as dist

from moelab.comm import AllToAll, CommError, ExchangeTimeout, VirtualRanks
from moelab.comm.reference import expected_rows
from moelab.config import ConfigError, ParallelConfig
from tests.comm import cases
from tests.comm.scenario import Scenario
from tests.conftest import SEED
from tests.pool import Rank

WITHHELD_S = 0.6  # how long we watch the receives not return; far above the microseconds that an exchange takes
LIMIT_S = 1.0


def scenario(pool, **options) -> Scenario:
    dp = pool.up_to(4)
    return Scenario(**dict(dp=dp, tokens=(8, 5, 6, 7, 8, 8, 8, 8)[:dp], masked=0.0, seed=SEED) | options)


def construct(rank: Rank, s: Scenario, timeout_s: float) -> None:
    rank.state.clear()
    rank.state["a2a"] = s.construct(rank, timeout_s=timeout_s)


def until_rows(rank: Rank, s: Scenario) -> None:
    a2a = rank.state["a2a"]
    rank.state["h"] = h = cases.send(rank, a2a, s)
    rank.state["y"] = cases.receive(rank, a2a, s, h)


def until_out(rank: Rank, s: Scenario) -> None:
    a2a, h = rank.state["a2a"], rank.state["h"]
    a2a.combine_send(h, rank.state["y"])
    cases.finish(rank, a2a, s, h)


def close(rank: Rank) -> None:
    rank.state.pop("a2a").close()


@pytest.mark.parametrize("half", [until_rows, until_out])
@pytest.mark.parametrize("victim", [0, -1])
def test_receives_wait_for_the_one_send_that_is_withheld(pool, half, victim):
    s = scenario(pool)
    victim %= s.ep
    groups = [g.ids for g in s.groups()]
    sources = {group for rows in expected_rows(s.spec, victim, groups) for group, _ in rows}
    assert sources == set(range(s.dp)), "every rank must be waiting for outputs of the victim"
    pool.run(construct, s, 30.0, ranks=s.ep)
    if half is until_out:
        pool.run(until_rows, s, ranks=s.ep)
    others = [pool.submit(rank, half, s) for rank in range(s.ep) if rank != victim]
    returned, _ = wait(others, WITHHELD_S, FIRST_COMPLETED)
    assert not returned, "a receive returned before everything was sent"
    pool.gather([*others, pool.submit(victim, half, s)])
    if half is until_rows:
        pool.run(until_out, s, ranks=s.ep)
    pool.run(close, ranks=s.ep)


def fails(rank: Rank, s: Scenario, half) -> tuple[ExchangeTimeout, float]:
    start = time.monotonic()
    with pytest.raises(ExchangeTimeout) as info:
        half(rank, s)
    return info.value, time.monotonic() - start


def only_close(rank: Rank, s: Scenario) -> None:
    a2a = rank.state["a2a"]
    with pytest.raises(CommError, match="can no longer be used: it failed earlier .*construct a new one"):
        cases.send(rank, a2a, s)
    if "y" in rank.state:
        with pytest.raises(CommError, match="can no longer be used"):
            a2a.combine_send(rank.state["h"], rank.state["y"])
    a2a.close()
    a2a.close()
    rank.state.clear()


def default_group_works(rank: Rank) -> float:
    if not dist.is_initialized():  # ranks that are threads
        return 8.0
    t = torch.ones(1, device=rank.device)
    dist.all_reduce(t)
    return t.item() * 8 / dist.get_world_size()


@pytest.mark.parametrize("half", [until_rows, until_out])
def test_a_wait_ends_with_an_error_that_names_what_is_missing(pool, half):
    s = scenario(pool)
    victim = s.ep - 1
    pool.run(construct, s, LIMIT_S, ranks=s.ep)
    if half is until_out:
        pool.run(until_rows, s, ranks=s.ep)
    others = pool.gather([pool.submit(rank, fails, s, half) for rank in range(s.ep) if rank != victim])
    late_half = half
    if pool.kind == "nccl" and half is until_out:
        # NCCL had the victim's outputs in its memory before the others gave up: it finds all that it needs.
        pool.submit(victim, until_out, s).result(20)
        late_half = until_rows
    late, _ = pool.submit(victim, fails, s, late_half).result(20)  # the one that was late is told as well

    assert all(LIMIT_S * 0.9 < seconds < LIMIT_S + 10 for _, seconds in others), others
    named = "dispatch_recv" if half is until_rows else "combine_recv"
    expected = "counts of exchange 0" if half is until_rows else "outputs of exchange 0"
    if pool.kernels:
        expected = (
            "counts and tokens of exchange 1 of the slot" if half is until_rows else expected[:-1] + "1 of the slot"
        )
    if pool.kind.startswith("gpu-virtual"):  # where every call is a meeting of all ranks
        named = "dispatch_send" if half is until_rows else "combine_send"
        expected = f"its call of {named}"
    for rank, (error, _) in enumerate(others):
        assert error.rank == rank and error.half == named and error.expected == expected and error.seen
        for words in (f"rank {rank} in {named}", expected, error.seen, "can now only be closed"):
            assert words in str(error)
    # Whoever gave up first waited for the victim. The others may instead have seen that one leave.
    assert any(victim == e.peer or (isinstance(e.peer, tuple) and victim in e.peer) for e, _ in others), others
    assert late.rank == victim and late.half in (
        "dispatch_send",
        "dispatch_recv",
        "combine_send",
        "combine_recv",
    )

    pool.run(only_close, s, ranks=s.ep)
    assert pool.run(default_group_works) == [8.0] * pool.size
    pool.run(cases.check_exchange, s, ranks=s.ep)  # and a new one can be constructed over the same group


def leave(rank: Rank) -> None:
    rank.state.pop("a2a").close()


def test_a_peer_that_left_is_noticed_at_once(pool):
    if pool.kind == "nccl":
        pytest.skip("closing an exchange over NCCL is collective; a dead peer is seen at the limit")
    if pool.kernels and not pool.kind.startswith("gpu-virtual"):
        pytest.skip("a kernel that waits hears of its peers through their memory alone: it ends at the limit")
    s = scenario(pool)
    pool.run(construct, s, 30.0, ranks=s.ep)
    pool.submit(0, leave).result(10)
    for error, seconds in pool.gather([pool.submit(rank, fails, s, until_rows) for rank in range(1, s.ep)]):
        assert seconds < 5 and error.seen, error
    for rank in range(1, s.ep):
        pool.submit(rank, only_close, s).result(10)


def lonely(rank: Rank) -> str:
    group = dist.new_group([0, 1])
    if rank.index:
        return ""
    with pytest.raises(ExchangeTimeout) as info:
        AllToAll(ParallelConfig(dp=2), 4, 2, 64, 8, group=group, timeout_s=0.5)
    return str(info.value)


def test_construction_waits_no_longer_than_the_limit(gloo_pool):
    message = gloo_pool.run(lonely)[0]
    assert "rank 0 in construction: waited for rank 1" in message and "0.5 s" in message


def wrong_group(rank: Rank) -> None:
    with pytest.raises(ConfigError, match="group has 8 ranks but ep = dp·tp is 4"):
        AllToAll(ParallelConfig(dp=2, tp=2), 16, 2, 64, 8)


def test_group_of_another_size_is_refused(gloo_pool):
    gloo_pool.run(wrong_group)
    with pytest.raises(ConfigError, match="group has 2 ranks but ep = dp·tp is 1"):
        AllToAll(ParallelConfig(), 16, 2, 64, 8, group=VirtualRanks(2).rank(0))
    with pytest.raises(ConfigError, match="group is a str: legal are"):
        AllToAll(ParallelConfig(), 16, 2, 64, 8, group="gloo")
    with pytest.raises(CommError, match="torch.distributed is not initialised: call init_process_group"):
        AllToAll(ParallelConfig(), 16, 2, 64, 8)


def test_one_thread_may_play_all_ranks_and_a_missing_send_still_ends():
    world = VirtualRanks(2)
    a2as = [AllToAll(ParallelConfig(dp=2), 4, 2, 64, 8, group=world.rank(i), timeout_s=0.2) for i in range(2)]
    x, ids = torch.ones(1, 64, dtype=torch.bfloat16), torch.tensor([[0, 3]])
    h = a2as[0].dispatch_send(x, ids, torch.ones(1, 2))
    with pytest.raises(ExchangeTimeout, match="rank 0 in dispatch_recv: waited for rank 1; expected counts"):
        a2as[0].dispatch_recv(h)
