"""Waits of given length on a device, and a log of how long they were.

A kernel that begins something notes the time in device memory (`Hold.started`); the kernel that ends it keeps its SMs
until that time plus what was asked (`hold`). Both read `globaltimer`, the one clock that all SMs share, in ns; how
finely it ticks is the GPU's affair. Nothing is compared with the host's time, so a wait may be captured in a graph and
is measured at every replay.

On the CPU the same is done by the host between plain-torch calls, on `time.perf_counter_ns`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from moelab.config import ConfigError
from moelab.ops.jit import jit, tl

ENTRIES = 4096  # waits that are remembered


@dataclass(frozen=True)
class Holds:
    """Waits, in µs from the beginning of what they wait for; arrays [n], the last `ENTRIES` in no particular order."""

    asked_us: np.ndarray
    entered_us: np.ndarray  # when the waiting kernel was there
    held_us: np.ndarray  # when it went on

    @property
    def exposed_us(self) -> np.ndarray:
        """The time spent waiting; asked − exposed passed while something else ran."""
        return self.held_us - self.entered_us

    def by_asked(self) -> dict[float, np.ndarray]:
        """{asked_us: held_us of all that waited}: what of the asked was kept to."""
        waits = self.waited
        return {float(us): self.held_us[waits & (self.asked_us == us)] for us in np.unique(self.asked_us[waits])}

    @property
    def waited(self) -> np.ndarray:
        """Which of them came early enough to wait: only these are to be as long as asked."""
        return self.entered_us < self.asked_us


class Hold:
    """One kind of wait: how long it is for T tokens, when it began in each slot, and the log."""

    def __init__(self, us: Callable[[int], float], max_tokens: int, slots: int, device: torch.device) -> None:
        """`us`: T -> µs, asked for 0 … max_tokens tokens now. Raises ConfigError for a time below zero or no number."""
        asked = [us(tokens) for tokens in range(max_tokens + 1)]
        for tokens, value in enumerate(asked):
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"the time for {tokens} tokens is {value} µs: give a number from 0 on")
        ns = [math.ceil(1e3 * value) for value in asked]
        with torch.inference_mode(False):
            self.asked = torch.tensor(ns, dtype=torch.int64, device=device)
            self.started = torch.zeros(slots, dtype=torch.int64, device=device)
            self.log = torch.zeros(1 + 3 * ENTRIES, dtype=torch.int64, device=device)

    def read(self) -> Holds:
        """Waits for the device."""
        log = self.log.cpu().numpy()
        entries = log[1:].reshape(-1, 3)[: min(log[0], ENTRIES)] / 1e3
        return Holds(*entries.T)

    def clear(self) -> None:
        self.log.zero_()

    def begin(self, slot: int) -> None:
        """The CPU's part in a kernel that begins."""
        self.started[slot] = time.perf_counter_ns()

    def wait(self, slot: int, tokens: int) -> None:
        """The CPU's part in a kernel that waits."""
        begun, asked = int(self.started[slot]), int(self.asked[tokens])
        entered = now = time.perf_counter_ns() - begun
        while now < asked:
            if asked - now > 2_000_000:  # sleep may come back that much late
                time.sleep((asked - now) / 1e9 - 0.002)
            now = time.perf_counter_ns() - begun
        at = 1 + 3 * (int(self.log[0]) % ENTRIES)
        self.log[at : at + 3] = torch.tensor([asked, entered, now])
        self.log[0] += 1


@jit
def now_ns():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@jit
def hold(begun, asked, log, ENTRIES: tl.constexpr):
    """Return once `asked` ns have passed since `begun`. Every program waits; the first one keeps the log."""
    entered = now_ns()
    now = entered
    while now - begun < asked:
        now = now_ns()
    if tl.program_id(0) == 0:
        entry = log + 1 + tl.atomic_add(log, 1) % ENTRIES * 3
        tl.store(entry, asked.to(tl.int64))
        tl.store(entry + 1, entered - begun)
        tl.store(entry + 2, now - begun)
