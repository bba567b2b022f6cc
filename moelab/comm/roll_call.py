"""`RollCall`: what ranks say to each other outside of an exchange, through a store, with a limit on every wait."""

from __future__ import annotations

import torch.distributed as dist

from moelab.comm.errors import WireError
from moelab.comm.torch_wire import reason_of, seconds_until


class RollCall:
    """Of ranks 0…size−1 over `store`, which is theirs alone. Errors are `WireError`, naming who is missing."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size, self._store = rank, size, store

    def tell(self, what: str, value: bytes | str) -> None:
        self._store.set(f"{what}/{self.rank}", value)

    def hear(self, what: str, peer: int, deadline: float) -> bytes:
        """What `peer` tells, once it does; or `WireError` once `deadline` (monotonic) has passed."""
        key = f"{what}/{peer}"
        try:
            self._store.wait([key], seconds_until(deadline))
            return self._store.get(key)
        except RuntimeError as error:
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
            verdict = self._store.compare_set(f"{what}/verdict", "", "go" if late is None else "stop")
            if verdict == b"go":  # so all are there by now, whatever we thought
                return [self._store.get(f"{what}/{peer}").decode() for peer in range(self.size)]
        except RuntimeError as error:  # the store has gone with its process
            raise late or WireError(others, f"no store any more ({reason_of(error)})") from error
        raise late or WireError(others, "one of them did not wait for another")
