"""Tests that move data fail when the kernels do not wait: built with MOELAB_BREAK_WAIT, every wait returns at once."""

from __future__ import annotations

import pytest

from tests.comm import cases
from tests.comm.emulation import emulation, missing
from tests.comm.scenario import Scenario
from tests.comm.test_stress import rounds_of
from tests.conftest import SEED
from tests.pool import Rank, RankError, ThreadPool


@pytest.fixture(scope="module")
def hasty():
    """name -> ranks over kernels that do not wait."""
    if why := missing():
        pytest.skip(why)
    library = emulation("MOELAB_BREAK_WAIT")
    pools = {name: ThreadPool(name, (1, 2, 4), library) for name in ("emulated", "emulated-flags")}
    yield pools
    for pool in pools.values():
        pool.stop()


def twice(rank: Rank, s: Scenario) -> None:
    with s.construct(rank, timeout_s=2) as a2a:
        for _ in range(2):
            cases.whole(rank, a2a, s)


@pytest.mark.parametrize("protocol", ["emulated", "emulated-flags"])
@pytest.mark.parametrize("dp, tp", [(2, 1), (1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("payload", ["bf16", "fp8"])
def test_without_its_waits_an_exchange_is_wrong(hasty, protocol, dp, tp, payload):
    s = Scenario(dp=dp, tp=tp, tokens=(8, 7, 6, 8)[:dp], hidden=144, payload=payload, seed=SEED)
    with pytest.raises(RankError):
        for _ in range(5):  # it may be lucky once
            hasty[protocol].run(twice, s, ranks=s.ep)


@pytest.mark.parametrize("protocol", ["emulated", "emulated-flags"])
def test_without_its_waits_the_stress_run_counts_differences(hasty, protocol):
    with pytest.raises((RankError, AssertionError)):  # RankError where the very first exchange was wrong
        for _ in range(3):
            assert hasty[protocol].run(rounds_of, 2, 1, "rows", 5, 40, ranks=2) == [0, 0]
