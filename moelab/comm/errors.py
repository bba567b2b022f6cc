"""What can go wrong in an exchange. All are `MoelabError`: one line that names the value, the limit and the fix."""

from __future__ import annotations

from moelab.config import MoelabError


class CommError(MoelabError):
    """A call that this exchange cannot serve: halves out of order, no free slot, already closed or failed."""


class InputError(CommError, ValueError):
    """An argument of a half is wrong. Nothing was sent; the half may be called again with the right one."""


class ExchangeTimeout(CommError):
    """A wait outlasted its limit, or the peer went away while we waited. The exchange is dead on this rank.

    `rank` waited in `half` for `peer` (a tuple of ranks where the transport cannot tell them apart), for what
    `expected` says; `seen` is what came instead.
    """

    def __init__(self, rank: int, peer: int | tuple[int, ...], half: str, expected: str, seen: str) -> None:
        self.rank, self.peer, self.half, self.expected, self.seen = rank, peer, half, expected, seen
        who = f"rank {peer}" if isinstance(peer, int) else f"one of ranks {list(peer)}"
        super().__init__(
            f"rank {rank} in {half}: waited for {who}; expected {expected}; seen: {seen}. "
            "Every rank must make the same calls in the same order: look at that rank first. "
            "This AllToAll can now only be closed"
        )

    def __reduce__(self):
        return type(self), (self.rank, self.peer, self.half, self.expected, self.seen)


class WireError(Exception):
    """Raised by a wire, which knows the peer but not which half waits; the backend turns it into `ExchangeTimeout`."""

    def __init__(self, peer: int | tuple[int, ...], seen: str) -> None:
        super().__init__(f"peer {peer}: {seen}")
        self.peer, self.seen = peer, seen
