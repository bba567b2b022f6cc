"""Counters by which programs that share a tile know who finishes it, and the rule under which they may be shared.

With split-K several programs leave float32 partial sums of one tile and count themselves. Either the last to arrive
adds the sums and sets its counter back to 0 (`counters`: nobody waits for anybody), or all wait until all are there and
each adds a share of the tile (`rounds`: for kernels all of whose programs run at once). Always in the order of K, so
the result does not depend on who was last. Counters are left as the next launch wants them, which a CUDA graph repeats
at every replay.

Two kernels that run at the same time must not count on the same counters. So there is one row of them per device and
stream; a graph keeps the row of the stream it was captured on. What follows for the caller: graphs that were captured
on one stream do not run side by side on two.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moelab.ops.checks import require

COUNTERS = 4096  # tiles of one launch that can be shared
ROUND = 4096  # what the programs of a tile add to its counter of rounds, together
STREAMS = 64


def counters(device: torch.device) -> Tensor:
    """int32 [COUNTERS], zeros between launches, for kernels of the current stream of `device`. Raises OpError for the
    first call of all within a capture, since a captured fill would not run now, and beyond STREAMS streams."""
    return _row(device, 0)


def rounds(device: torch.device) -> Tensor:
    """As `counters`, but multiples of ROUND between launches: counters that are never set back. The programs of a tile
    add ROUND together, in any shares; when its counter has passed the next multiple, all have arrived. Compare
    differences, since it wraps around."""
    return _row(device, 1)


def _row(device: torch.device, kind: int) -> Tensor:
    if device.type != "cuda":
        return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    bank, rows = _bank(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    if stream not in rows:
        require(len(rows) < STREAMS, "the stream", f"one more than {STREAMS}", f"at most {STREAMS} streams of a device")
        rows[stream] = len(rows)
    return bank[kind, rows[stream]]


@functools.cache
def _bank(device: torch.device) -> tuple[Tensor, dict[int, int]]:
    """The counters of all streams, of both kinds, and which stream has which row."""
    capturing = torch.cuda.is_current_stream_capturing()
    require(not capturing, "the first call", "within a CUDA graph capture", "one call before the capture")
    bank = torch.zeros(2, STREAMS, COUNTERS, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # so that every stream sees the zeros
    return bank, {}
