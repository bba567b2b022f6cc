"""What moves bytes between ranks, as narrow as it can be: `Wire`. Packing and unpacking know nothing of transports.

A message is named by its `Tag`: the number of the exchange and what it carries. Per tag a rank calls, in this order,
`send` (once), `post` (once, with the sizes it will get), `wait`; and `drain` when the exchange ends. Messages of zero
bytes do not exist: neither side mentions them. Nothing goes through the wire from a rank to itself.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

PARTS = ("counts", "rows", "outputs")


class Tag(NamedTuple):
    exchange: int
    part: str

    @property
    def number(self) -> int:
        """A transport tag, unique among the exchanges that can be in flight (it wraps at 2^30)."""
        return (self.exchange * len(PARTS) + PARTS.index(self.part)) % (1 << 30)


class Wire(Protocol):
    """Moves uint8 tensors of the wire's device between ranks. Errors are `WireError`, naming the peer."""

    rank: int
    size: int
    name: str
    sent_bytes: int  # to other ranks, so far

    def agree(self, settings: str, deadline: float) -> None:
        """Collective: raise `ConfigError` unless every rank gives the same settings, a JSON object."""

    def send(self, tag: Tag, messages: dict[int, Tensor]) -> None:
        """Hand over {peer: message} and return at once. The wire keeps the tensors alive until they have left."""

    def post(self, tag: Tag, sizes: dict[int, int]) -> None:
        """Say what will come: {peer: bytes}. Returns at once."""

    def wait(self, tag: Tag, deadline: float) -> dict[int, Tensor]:
        """{peer: message} for every posted size, all arrived; or `WireError` once `deadline` (monotonic) has passed."""

    def drain(self, tag: Tag, deadline: float) -> None:
        """Wait until our own messages of this tag have left, so that their memory is free again."""

    def close(self, failed: bool) -> None:
        """Free the transport. With `failed`, at once, without the peers; they then see that we are gone."""
