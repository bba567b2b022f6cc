"""Counters by which the programs of one launch find out who of them is last.

A kernel that splits a sum lets each program add one to a counter; the last one finishes the sum and puts the counter
back to zero, so that the next launch finds zeros without a launch of their own to write them. Two launches that run at
the same time must not share counters. Launches of one stream follow each other and share. What is captured into a graph
may be replayed beside anything, so every captured launch gets counters of its own, for good: 4 KB each.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

SLICE = 1024  # counters of one launch at most: 4 KB
SLICES = 1024  # put aside for captures at a time: 4 MB

_lock = threading.Lock()
_of_stream: dict[tuple[torch.device, int], Tensor] = {}
_for_captures: dict[torch.device, list[Tensor]] = {}


def zero_counters(device: torch.device, number: int) -> Tensor:
    """int32 [number ≤ SLICE], zeros; the kernel must leave zeros behind. Call it for every launch.

    A capture takes from what earlier calls outside of captures put aside. Where nothing is left, or nothing ran before,
    the counters are set to zero by a launch of their own in the graph."""
    if device.type != "cuda":
        return torch.zeros(number, dtype=torch.int32, device=device)
    with _lock:
        spare = _for_captures.setdefault(device, [])
        if torch.cuda.is_current_stream_capturing():
            return (spare.pop() if spare else torch.zeros(SLICE, dtype=torch.int32, device=device))[:number]
        if len(spare) < SLICES // 2:
            spare.extend(torch.zeros(SLICES, SLICE, dtype=torch.int32, device=device))
            torch.cuda.current_stream(device).synchronize()  # a graph may run on another stream
        key = device, torch.cuda.current_stream(device).cuda_stream
        if key not in _of_stream:
            _of_stream[key] = torch.zeros(SLICE, dtype=torch.int32, device=device)
        return _of_stream[key][:number]
