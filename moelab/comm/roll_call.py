"""`RollCall`: what ranks say to each other outside of an exchange, through a store, with a limit on every wait."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from moelab.comm.errors import WireError
from moelab.comm.spec import ExchangeSpec, check_same
from moelab.config import ConfigError


def reason_of(error: Exception) -> str:
    """The first sentence of a transport's message, without its source position."""
    text = str(error).splitlines()[0]
    return text.rpartition("] ")[2].partition(". This is")[0] if text.startswith("[") else text


def seconds_until(deadline: float) -> timedelta:
    """What is left until `deadline` (monotonic). Never 0, which gloo reads as "no limit"."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


class RollCall:
    """Of ranks 0…size−1 over `store`, which is theirs alone. Errors are `WireError`, naming who is missing."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size, self.store = rank, size, store
        self._agreed = 0

    def tell(self, what: str, value: bytes | str) -> None:
        self.store.set(f"{what}/{self.rank}", value)

    def hear(self, what: str, peer: int, deadline: float) -> bytes:
        """What `peer` tells, once it does; or `WireError` once `deadline` (monotonic) has passed."""
        key = f"{what}/{peer}"
        try:
            self.store.wait([key], seconds_until(deadline))
            return self.store.get(key)
        except RuntimeError as error:  # DistStoreError of a lost store, or its timeout
            raise WireError(peer, f"nothing in time ({reason_of(error)})") from error

    def gather(self, what: str, value: str, deadline: float) -> list[str]:
        """What each rank says to it, in order. Collective, once for each `what`. Raises on every rank, or on none.

        The first to be through, or to give up, decides for all: were some to go on alone into something collective that
        has no limit, they would wait there for ever.
        """
        late = None
        others = tuple(peer for peer in range(self.size) if peer != self.rank)
        try:
            self.tell(what, value)
            for peer in range(self.size):
                self.hear(what, peer, deadline)
        except WireError as error:
            late = error
        try:
            verdict = self.store.compare_set(f"{what}/verdict", "", "go" if late is None else "stop")
            if verdict == b"go":  # so all are there by now, whatever we thought
                return [self.store.get(f"{what}/{peer}").decode() for peer in range(self.size)]
        except RuntimeError as error:  # the store has gone with its process
            raise late or WireError(others, f"no store any more ({reason_of(error)})") from error
        raise late or WireError(others, "one of them did not wait for another")

    def agree(self, settings: str, deadline: float) -> None:
        """Show the others our settings, a JSON object. Collective; all ranks agree equally often.

        Where two ranks differ, every rank raises `ConfigError`, naming a peer that differs from it.
        """
        what, self._agreed = f"settings {self._agreed}", self._agreed + 1
        self.tell(what, settings)
        theirs = [self.hear(what, peer, deadline).decode() for peer in range(self.size)]
        try:
            for peer, text in enumerate(theirs):
                check_same(self.rank, settings, peer, text)
        except ConfigError:
            # A rank that raises may end, and the store with its process: not before the others have read.
            with suppress(WireError):
                self.gather(f"{what}, read", "", deadline)
            raise


def meet(group: dist.ProcessGroup, spec: ExchangeSpec, timeout_s: float) -> RollCall:
    """Collective over `group`: every rank shows the others its spec. A roll call of this exchange's own.

    Raises `ConfigError` naming the argument that differs, `WireError` naming the rank that does not come.
    """
    store = group.get_group_store()
    rank, size = group.rank(), group.size()
    # How many exchanges this rank has opened over this group, counted where the group lives; the same on all ranks.
    number = store.add(f"moelab/opened/{rank}", 1)
    roll = RollCall(dist.PrefixStore(f"moelab/{number}/", store), rank, size)
    try:
        roll.agree(spec.to_json(), time.monotonic() + timeout_s)
    except WireError as error:
        raise WireError(error.peer, f"no construction within {timeout_s:g} s ({error.seen})") from error
    return roll
