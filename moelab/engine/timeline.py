"""When each stage of a step ran.

A `Timeline` observes a walk: it takes the time after every stage, where the next one begins. On a GPU a time is an
event in the stream, read when all is done, so recording adds no waiting to a step. It tells when the device came to
a stage's end; eager launches that keep it waiting count to the stage that it waits for.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from moelab.model.batch import State
from moelab.stages import Launch, Span


class Timeline:
    """What ran since the last `begin`; pass it as `observe`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self.begin()

    def begin(self) -> None:
        """A step begins: forget what was before."""
        self._launches: list[Launch] = []
        self._times = [self._now()]

    def __call__(self, launch: Launch, state: State) -> None:
        self._launches.append(launch)
        self._times.append(self._now())

    def spans(self) -> list[Span]:
        """In the order in which they ran. Waits for the device."""
        if self._on_gpu:
            self._times[-1].synchronize()
            at = [self._times[0].elapsed_time(event) * 1e3 for event in self._times]
        else:
            at = [(now - self._times[0]) * 1e6 for now in self._times]
        return [
            Span(launch.micro_batch, launch.layer, launch.stage.name, start, end)
            for launch, (start, end) in zip(self._launches, pairwise(at), strict=True)
        ]

    def _now(self):
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
