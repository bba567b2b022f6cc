"""`StandInReduce`: the all-reduce of a DP group's attention with no other rank there.

It has the interface of `TensorParallelGroup`. One kernel copies (n − 1)/n of x away and back, which are the bytes that
a rank of a ring of n sends: once to have its share summed, once to get the others'. It then keeps its SMs until its
own start plus the time that a law gives. x keeps its values: this rank's share of the sum, for the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moelab.comm.errors import CommError
from moelab.comm.stand_in_clock import ENTRIES, Hold, Holds, hold, now_ns
from moelab.config import ConfigError
from moelab.ops.early_launch import launches_early
from moelab.ops.jit import jit, runs_on, tl

COLS, WARPS = 8192, 16


class StandInReduce:
    """For groups of `tp` ranks and x of up to `max_tokens` rows of `row_bytes`. `us`: tokens -> µs. `num_sms`: programs
    of the kernel, 0 for as many as there are SMs. `law`: where `us` comes from."""

    on_host = False  # as `TensorParallelGroup` says

    def __init__(
        self,
        tp: int,
        us: Callable[[int], float],
        max_tokens: int,
        row_bytes: int,
        device: torch.device | str,
        num_sms: int = 0,
        law: str = "",
    ) -> None:
        if tp < 2:
            raise ConfigError(f"tp is {tp}: there is nothing to sum below 2")
        if row_bytes % 4:
            raise ConfigError(f"row_bytes is {row_bytes}: give a multiple of 4")
        device = torch.empty(0, device=device).device
        self.tp, self.max_tokens, self.row_bytes, self.law = tp, max_tokens, row_bytes, law
        self._hold = Hold(us, max_tokens, 1, device)
        with torch.inference_mode(False):
            self._away = torch.zeros(max_tokens * row_bytes // 4, dtype=torch.int32, device=device)
            self._tally = torch.zeros(2, dtype=torch.int64, device=device)  # calls, words
        on_gpu = device.type == "cuda"
        sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else num_sms or 1
        if not 0 <= num_sms <= sms:
            raise ConfigError(f"num_sms is {num_sms}: {device} has {sms}; 0 takes all")
        self.programs, self._on_gpu, self._early = num_sms or sms, on_gpu, launches_early(self._away)

    def all_reduce(self, x: Tensor) -> Tensor:
        """x [T, …], contiguous; the same tensor. Raises CommError for one that was not reckoned with."""
        if x.numel() == 0:
            return x
        if len(x) > self.max_tokens or x.nbytes != len(x) * self.row_bytes or not x.is_contiguous():
            raise CommError(
                f"x is {list(x.shape)} of {x.element_size()} bytes, strides {x.stride()}: this takes up to "
                f"{self.max_tokens} contiguous rows of {self.row_bytes} bytes"
            )
        words = x.detach().view(torch.int32).view(-1)
        sent = words.numel() * (self.tp - 1) // self.tp
        if not self._on_gpu:
            self._hold.begin(0)
        if runs_on(_reduce_kernel, x):
            _reduce_kernel[(self.programs,)](
                words, self._away, self._hold.asked, self._hold.log, self._tally, sent, len(x), COLS=COLS,
                ENTRIES=ENTRIES, EARLY=self._early, CUDA=self._on_gpu, launch_pdl=self._early, num_warps=WARPS,
            )  # fmt: skip
        else:
            self._away[:sent] = words[:sent]
            words[:sent] = self._away[:sent]
            self._tally += torch.tensor([1, 2 * sent])
        if not self._on_gpu:
            self._hold.wait(0, len(x))
        return x

    def held(self) -> Holds:
        """How long each lasted. Waits for the device."""
        return self._hold.read()

    def moved(self) -> tuple[int, int]:
        """(calls, bytes written), since construction or `clear`. Waits for the device."""
        calls, words = self._tally.tolist()
        return calls, 4 * words

    def clear(self) -> None:
        self._tally.zero_()
        self._hold.clear()


@jit
def _reduce_kernel(
    x, away, asked, log, tally, words, tokens, COLS: tl.constexpr, ENTRIES: tl.constexpr, EARLY: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
    program, step = tl.program_id(0), tl.num_programs(0)
    begun = program.to(tl.int64)
    if CUDA:
        begun = now_ns()
    item = program
    while item * COLS < words:
        where = item.to(tl.int64) * COLS + tl.arange(0, COLS)
        tl.store(away + where, tl.load(x + where, mask=where < words, other=0), mask=where < words)
        item += step
    item = program  # the same places by the same threads: nobody has to be waited for
    while item * COLS < words:
        where = item.to(tl.int64) * COLS + tl.arange(0, COLS)
        tl.store(x + where, tl.load(away + where, mask=where < words, other=0), mask=where < words)
        item += step
    if CUDA:
        hold(begun, tl.load(asked + tokens), log, ENTRIES)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if program == 0:
        tl.atomic_add(tally, 1)
        tl.atomic_add(tally + 1, 2 * words)
