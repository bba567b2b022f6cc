"""What the halves of a stand-in move: the memory, and two ways to do it.

`KernelMoves` launches the kernels of stand_in_kernels.py, which wait by themselves on a GPU. `PlainMoves` does the same
in plain torch, waiting on the host: what runs on the CPU, and what the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moelab.comm import stand_in_kernels as kernels
from moelab.comm.checks import quantizes
from moelab.comm.layout import empty_rows, empty_scales, write_scales
from moelab.comm.spec import ExchangeSpec
from moelab.comm.stand_in_clock import ENTRIES, Hold
from moelab.config import ConfigError
from moelab.ops.early_launch import launches_early
from moelab.ops.quantize import quantize_rows
from moelab.perf.rank_load import RankLoad

SUM_SIGMA = 0.35  # of a sum that comes home: eight of them have variance one
WARPS = 16  # of a program: an SM has room for several, so that an idle GPU spreads programs before it stacks them


class Slot:
    """What belongs to one exchange in flight."""

    def __init__(self, spec: ExchangeSpec, index: int, device: torch.device) -> None:
        self.index = index
        self.rows, self.scales = empty_rows(spec, device), empty_scales(spec, device)
        self.counts = torch.zeros(spec.local_experts, dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)  # tokens of the group
        self.places = torch.zeros(spec.max_tokens, dtype=torch.int32, device=device)  # ranks that each of them goes to


@dataclass(frozen=True)
class StandInExchange:
    """One exchange in flight, with the draw of the load that is its own."""

    slot: Slot
    tokens: int  # rows of x
    draw: int
    load: Tensor  # [M + 1, L] int32
    arrivals: Tensor  # [M + 1] int32
    all_idle: bool

    starts = None  # rows are padded

    @property
    def idle(self) -> bool:
        return self.all_idle


class Windows:
    """Memory that peers would own or write, one for all slots: room for M tokens with K ranks each, sent and got. What
    comes from peers is filled once. And the tally."""

    def __init__(self, spec: ExchangeSpec, rank: int, device: torch.device) -> None:
        self.spec, self.rank, self.device = spec, rank, device
        k, s, words = spec.top_k, spec.num_scales, spec.row_bytes // 4
        share, home = _window_rows(spec)
        self.sent = torch.zeros(share, words, dtype=torch.int32, device=device)
        self.sent_scales = torch.zeros(share, s, device=device)
        self.notes = torch.zeros(share, 2 * k + 1, dtype=torch.int32, device=device)  # ids, weights, token
        self.arrived = torch.zeros(share, words, dtype=torch.int32, device=device)
        self.arrived_scales = torch.zeros(share, s, device=device)
        self.returned = torch.zeros(home, spec.hidden, dtype=spec.output_dtype, device=device)
        self.home = torch.zeros(home, spec.hidden, dtype=spec.output_dtype, device=device)
        self.tally = torch.zeros(8, dtype=torch.int64, device=device)  # of each half: calls, rows
        draws = torch.Generator(device).manual_seed(0)
        for rows, scales in zip(self.arrived.split(1024), self.arrived_scales.split(1024), strict=True):
            values = torch.empty(len(rows), spec.hidden, device=device).normal_(generator=draws)
            if s:
                values, drawn = quantize_rows(values, power_of_two=spec.scales == "ue8m0")
                scales.copy_(drawn)
            rows.copy_(values.to(spec.payload_dtype).view(torch.int32))
        self.home.normal_(0, SUM_SIGMA, generator=draws)


def window_bytes(spec: ExchangeSpec) -> int:
    """Of a stand-in's windows, beside the rows that every backend has for each slot."""
    share, home = _window_rows(spec)
    return share * (2 * (spec.row_bytes + 4 * spec.num_scales) + 8 * spec.top_k + 4) + 2 * home * spec.output_row_bytes


def _window_rows(spec: ExchangeSpec) -> tuple[int, int]:
    """Of dispatched tokens, of which the TP ranks share the sending, and of sums, which go to each of them."""
    return -(-spec.max_tokens // spec.parallel.tp) * spec.top_k, spec.max_tokens * spec.top_k


class Moves(Protocol):
    def send(
        self, e: StandInExchange, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None, num: Tensor | None
    ) -> None: ...

    def receive(self, e: StandInExchange) -> None: ...

    def give_back(self, e: StandInExchange, y: Tensor) -> None: ...

    def gather(self, e: StandInExchange, out: Tensor) -> None: ...


class PlainMoves:
    def __init__(self, windows: Windows, holds: Mapping[str, Hold]) -> None:
        self.w, self.spec, self.holds = windows, windows.spec, holds

    @torch.no_grad()
    def send(
        self, e: StandInExchange, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None, num: Tensor | None
    ) -> None:
        self.holds["dispatch"].begin(e.slot.index)
        spec, w = self.spec, self.w
        n = len(x) if num is None else min(max(int(num), 0), len(x))
        e.slot.count.fill_(n)
        ids = ids[:n].long()
        place = torch.where((ids >= 0) & (ids < spec.num_experts), ids // spec.local_experts, -1)
        earlier = (place[:, :, None] == place[:, None, :]).tril(-1).any(-1)
        first = (place >= 0) & ~earlier
        e.slot.places[:n] = first.sum(1)
        mine = slice(spec.parallel.tp_rank(w.rank), n, spec.parallel.tp)
        x, token = x[mine], torch.arange(n)[mine]
        if quantizes(spec, x, scales):
            x, scales = quantize_rows(x.contiguous(), power_of_two=spec.scales == "ue8m0")
        elif scales is not None:
            scales = scales[mine]
        row, choice = first[mine].nonzero(as_tuple=True)
        at = row * spec.top_k + choice
        w.sent[at] = x.contiguous().view(torch.int32)[row]
        if scales is not None:
            w.sent_scales[at] = scales[row]
        notes = (ids[mine].int(), weights[:n][mine].contiguous().view(torch.int32), token[:, None].int())
        w.notes[at] = torch.cat(notes, dim=1)[row]
        self._tally(0, len(at))

    @torch.no_grad()
    def receive(self, e: StandInExchange) -> None:
        self.holds["dispatch"].wait(e.slot.index, int(e.slot.count))
        rows, source = self._rows(e)
        source %= len(self.w.arrived)
        e.slot.counts.copy_(e.load[int(e.slot.count)])
        e.slot.rows.view(torch.int32).flatten(0, 1)[rows] = self.w.arrived[source]
        if e.slot.scales is not None:
            write_scales(e.slot.scales, rows, self.w.arrived_scales[source], self.spec)
        self._tally(1, len(rows))

    @torch.no_grad()
    def give_back(self, e: StandInExchange, y: Tensor) -> None:
        self.holds["combine"].begin(e.slot.index)
        rows, source = self._rows(e)
        arrived = int(e.arrivals[int(e.slot.count)])
        sums = torch.zeros(arrived, self.spec.hidden).index_add_(0, source, y.flatten(0, 1)[rows].float())
        sums = sums.to(self.spec.output_dtype).repeat(self.spec.parallel.tp, 1)  # to each TP rank
        for first in range(0, len(sums), len(self.w.returned)):
            piece = sums[first : first + len(self.w.returned)]
            self.w.returned[: len(piece)] = piece
        self._tally(2, len(sums))

    @torch.no_grad()
    def gather(self, e: StandInExchange, out: Tensor) -> None:
        n = int(e.slot.count)
        self.holds["combine"].wait(e.slot.index, n)
        places = e.slot.places[:n]
        there = torch.arange(self.spec.top_k) < places[:, None]
        sums = self.w.home.view(-1, self.spec.top_k, self.spec.hidden)[:n].float()
        out[:n] = (sums * there[..., None]).sum(1)
        self._tally(3, int(places.sum()))

    def _rows(self, e: StandInExchange) -> tuple[Tensor, Tensor]:
        """Of the counted rows, one expert after another: where it stands among [L·room], which arrived token it is."""
        n = int(e.slot.count)
        counts = e.load[n].long()
        total, arrived = int(counts.sum()), int(e.arrivals[n])
        i = torch.arange(total)
        owner = torch.arange(len(counts)).repeat_interleave(counts)
        place = i - (counts.cumsum(0) - counts)[owner]
        return owner * self.spec.expert_rows + place, i * arrived // max(total, 1)

    def _tally(self, half: int, rows: int) -> None:
        self.w.tally[2 * half] += 1
        self.w.tally[2 * half + 1] += rows


class KernelMoves:
    """`num_sms`: programs of a launch, 0 for as many as there are SMs."""

    def __init__(self, windows: Windows, holds: Mapping[str, Hold], load: RankLoad, num_sms: int) -> None:
        self.w, self.spec, self.holds, self.load = windows, windows.spec, holds, load
        self._on_gpu = windows.device.type == "cuda"
        sms = torch.cuda.get_device_properties(windows.device).multi_processor_count if self._on_gpu else num_sms or 3
        if num_sms > sms:
            raise ConfigError(f"num_sms is {num_sms}: {windows.device} has {sms}")
        self.programs = num_sms or sms
        spec, early = self.spec, launches_early(windows.tally)
        self._common = {"EARLY": early, "CUDA": self._on_gpu, "launch_pdl": early, "num_warps": WARPS}
        self._sizes = {"K": spec.top_k, "KS": _power_of_2(spec.top_k), "S": max(4, _power_of_2(spec.num_scales))}
        self._experts = _power_of_2(spec.local_experts)

    def send(
        self, e: StandInExchange, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None, num: Tensor | None
    ) -> None:
        spec, w, slot, hold = self.spec, self.w, e.slot, self.holds["dispatch"]
        if not self._on_gpu:
            hold.begin(slot.index)
        quantize = quantizes(spec, x, scales)
        if quantize:
            sent, width, cols = (
                w.sent.view(spec.payload_dtype),
                spec.hidden,
                max(128, min(512, _power_of_2(spec.hidden))),
            )
        else:
            x, sent, width = x.view(torch.int32), w.sent, w.sent.shape[1]
            cols = min(512, _power_of_2(width))
        kernels.send_kernel[(self.programs,)](
            x, scales, ids, weights, num, sent, w.sent_scales, w.notes, slot.places, slot.count,
            hold.started[slot.index :], w.tally, x.stride(0), *(scales.stride() if scales is not None else (0, 0)),
            *ids.stride(), *weights.stride(), len(x), width, spec.num_scales, spec.num_experts, spec.local_experts,
            spec.parallel.tp, spec.parallel.tp_rank(w.rank), **self._sizes, **self._tile(len(x), width, cols),
            QUANTIZE=quantize, POWER_OF_TWO=spec.scales == "ue8m0", **self._common,
        )  # fmt: skip

    def receive(self, e: StandInExchange) -> None:
        spec, w, slot, hold = self.spec, self.w, e.slot, self.holds["dispatch"]
        if not self._on_gpu:
            hold.wait(slot.index, int(slot.count))
        width = w.arrived.shape[1]
        rows = int(self.load.counts[e.draw, e.tokens].sum())
        kernels.receive_kernel[(self.programs,)](
            w.arrived, w.arrived_scales, slot.rows.view(torch.int32), slot.scales, slot.counts, e.load, e.arrivals,
            slot.count, hold.started[slot.index :], hold.asked, hold.log, w.tally,
            *(slot.scales.stride() if slot.scales is not None else (0, 0, 0)), spec.expert_rows,
            len(w.arrived), width, spec.num_scales, spec.local_experts, EXPERTS=self._experts, S=self._sizes["S"],
            **self._tile(rows, width, min(512, _power_of_2(width))), PACKED=spec.scales == "ue8m0", ENTRIES=ENTRIES,
            **self._common,
        )  # fmt: skip

    def give_back(self, e: StandInExchange, y: Tensor) -> None:
        spec, w, slot, hold = self.spec, self.w, e.slot, self.holds["combine"]
        if not self._on_gpu:
            hold.begin(slot.index)
        arrived = int(self.load.arrivals[e.draw, e.tokens])
        kernels.return_kernel[(self.programs,)](
            y, w.returned, e.load, e.arrivals, slot.count, hold.started[slot.index :], w.tally, spec.expert_rows,
            len(w.returned), spec.hidden, spec.parallel.tp, spec.local_experts, EXPERTS=self._experts,
            **self._tile(arrived, spec.hidden, min(512, _power_of_2(spec.hidden))), **self._common,
        )  # fmt: skip

    def gather(self, e: StandInExchange, out: Tensor) -> None:
        spec, w, slot, hold = self.spec, self.w, e.slot, self.holds["combine"]
        if not self._on_gpu:
            hold.wait(slot.index, int(slot.count))
        kernels.gather_kernel[(self.programs,)](
            w.home, slot.places, out, slot.count, hold.started[slot.index :], hold.asked, hold.log, w.tally,
            spec.hidden, K=spec.top_k, **self._tile(e.tokens, spec.hidden, min(512, _power_of_2(spec.hidden))),
            ENTRIES=ENTRIES, **self._common,
        )  # fmt: skip

    def _tile(self, rows: int, width: int, cols: int) -> dict[str, int]:
        """16 rows where that still gives every program one: four loads of 16 bytes a thread are in flight; else 4."""
        return {"ROWS": 16 if rows * -(-width // cols) >= 16 * self.programs else 4, "COLS": cols}


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
