"""A roll call ends in time, and for all ranks alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from moelab.comm.errors import WireError
from moelab.comm.roll_call import RollCall


def call(open_store: Callable[[], dist.Store], delays: tuple[float, ...], limits: tuple[float, ...]) -> list:
    """Each rank's result or error; rank i comes after delays[i] and waits limits[i]. None: it does not come."""
    results: list = [None] * len(delays)

    def come(rank: int) -> None:
        time.sleep(delays[rank])
        roll = RollCall(dist.PrefixStore("some/", open_store()), rank, len(delays))
        try:
            results[rank] = roll.gather("name", f"rank {rank}", time.monotonic() + limits[rank])
        except WireError as error:
            results[rank] = error

    threads = [threading.Thread(target=come, args=(r,)) for r, delay in enumerate(delays) if delay is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.fixture(params=["hash", "file"])
def store(request, tmp_path):
    """Opens it, as every process does for itself."""
    if request.param == "file":
        return lambda: dist.FileStore(str(tmp_path / "store"), 3)
    shared = dist.HashStore()
    return lambda: shared


def test_everybody_hears_everybody(store):
    assert call(store, (0, 0.05, 0.1), (5, 5, 5)) == [["rank 0", "rank 1", "rank 2"]] * 3


def test_who_does_not_come_is_named(store):
    errors = call(store, (0, 0, None), (0.3, 0.3, 0.3))
    assert errors[2] is None and all(isinstance(error, WireError) for error in errors[:2])
    assert 2 in (error.peer for error in errors[:2])


def test_who_comes_late_does_not_go_on_alone(store):
    """Rank 0 gives up before rank 2 comes; ranks 1 and 2 would find everything there."""
    errors = call(store, (0, 0, 1.6), (0.3, 9, 9))  # a file store looks at its clock once a second
    assert all(isinstance(error, WireError) for error in errors), errors
    assert errors[0].peer == 2 and "did not wait" in errors[2].seen
