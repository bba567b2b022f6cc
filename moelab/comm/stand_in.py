"""`StandIn`: one rank of an expert-parallel deployment with nobody else there, to pass as `AllToAll(group=…)`.

    stand_in = StandIn(load, dispatch_us, combine_us)
    a2a = AllToAll(ParallelConfig(dp=128), 256, 8, 7168, 256, "fp8", scales="column_tma", group=stand_in)

The halves launch kernels that move on this GPU what the real ones would move over the fabric (stand_in_kernels.py), a
token once for each rank that it goes to, a sum for each token on the way back. A send returns after its kernel. A
receive keeps its SMs until the send's start plus the time that a law of the fabric gives, by the GPU's own clock, and
then does its part; in between the stream is free, so what would hide behind a real exchange hides here too. Everything
may be captured in a CUDA graph; nothing is allocated or asked of the device in a half.

What is made up: the rows that arrive, their number for each expert (`RankLoad`: exactly what it says for as many tokens
as this rank's group has, a draw for each exchange in turn), and the sums that come home. All are finite, of variance
near one. What is real: where this rank's own tokens go, by its router. So `out` has nothing to do with what the experts
computed, and a model on a stand-in says nothing.

What differs from a real exchange: the windows hold what all ranks send if they send alike, and serve all slots
(`window_bytes`), where real ones hold the worst case for each; a fused half is two launches; `all_idle` is this rank's
own word; on the GPU, ids out of range go nowhere in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.comm.errors import CommError
from moelab.comm.spec import ExchangeSpec
from moelab.comm.stand_in_clock import Hold, Holds
from moelab.comm.stand_in_kernels import send_kernel
from moelab.comm.stand_in_moves import KernelMoves, Moves, PlainMoves, Slot, StandInExchange, Windows, window_bytes
from moelab.config import ConfigError
from moelab.ops.jit import runs_on
from moelab.perf.rank_load import RankLoad

__all__ = ["Moved", "StandIn", "StandInBackend", "window_bytes"]


@dataclass(frozen=True)
class Moved:
    """Since construction or `clear`."""

    calls: int
    bytes: int  # written by the kernels (combine_recv: read, it writes only `out`)


class StandIn:
    """What stands in for the other ranks of one AllToAll.

    - `load`: what arrives, for the rank that it was made for.
    - `dispatch_us`, `combine_us`: tokens of this rank's DP group -> µs from the send's start to the receive's release.
    - `rank`: which of the `ep` ranks this is; its TP rank decides which tokens it sends.
    - `num_sms`: programs of each kernel, which an idle GPU puts on one SM each; 0: all SMs.
    - `law`: where the times come from, in words.
    """

    def __init__(
        self,
        load: RankLoad,
        dispatch_us: Callable[[int], float],
        combine_us: Callable[[int], float],
        rank: int = 0,
        num_sms: int = 0,
        law: str = "",
    ) -> None:
        if num_sms < 0:
            raise ConfigError(f"num_sms is {num_sms}: give 0 for all SMs, or a number of them")
        self.load, self.dispatch_us, self.combine_us, self.rank = load, dispatch_us, combine_us, rank
        self.num_sms, self.law = num_sms, law
        self._backend: StandInBackend | None = None

    def open(self, spec: ExchangeSpec, device: torch.device | None) -> StandInBackend:
        """For AllToAll. Raises ConfigError where load, rank and exchange do not fit each other."""
        if self._backend is not None:
            raise ConfigError("this StandIn already serves an AllToAll: make another for a second one")
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._backend = StandInBackend(self, spec, torch.empty(0, device=device).device)
        return self._backend

    def held(self) -> dict[str, Holds]:
        """{"dispatch", "combine"}: how long receives waited. Waits for the device."""
        return {name: hold.read() for name, hold in self._opened().holds.items()}

    def moved(self) -> dict[str, Moved]:
        """What each half moved. Waits for the device."""
        return self._opened().moved()

    def clear(self) -> None:
        """Forget what was held and moved so far, on the current stream."""
        self._opened().clear()

    @property
    def programs(self) -> int:
        """SMs that each kernel takes."""
        return self._opened().programs

    def _opened(self) -> StandInBackend:
        if self._backend is None:
            raise CommError("this StandIn serves no AllToAll yet: pass it as group=")
        return self._backend


class StandInBackend:
    """A `Backend`. All memory is there once it is constructed."""

    name = "stand-in"

    def __init__(self, stand_in: StandIn, spec: ExchangeSpec, device: torch.device) -> None:
        _check(stand_in, spec)
        self.spec, self.device, self.rank = spec, device, stand_in.rank
        self.reads_values = device.type == "cpu"
        times = {"dispatch": stand_in.dispatch_us, "combine": stand_in.combine_us}
        with torch.inference_mode(False):  # buffers born in inference mode could not be written outside it
            self.holds = {name: Hold(us, spec.max_tokens, spec.slots, device) for name, us in times.items()}
            self._slots = [Slot(spec, index, device) for index in range(spec.slots)]
            self._load = [torch.from_numpy(t).to(device) for t in (stand_in.load.counts, stand_in.load.arrivals)]
            windows = Windows(spec, stand_in.rank, device)
        self._windows, self.tally = windows, windows.tally
        self._moves: Moves = PlainMoves(windows, self.holds)
        self.programs = 1
        if runs_on(send_kernel, windows.tally):
            self._moves = KernelMoves(windows, self.holds, stand_in.load, stand_in.num_sms)
            self.programs = self._moves.programs

    @property
    def sent_bytes(self) -> int:
        raise CommError("a stand-in sends nothing: StandIn.moved() says what it moved instead")

    def dispatch_send(
        self,
        number: int,
        slot: int,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        scales: Tensor | None,
        num_tokens: Tensor | None,
        has_work: bool,
    ) -> StandInExchange:
        counts, arrivals = self._load
        draw = number % len(counts)
        exchange = StandInExchange(self._slots[slot], x.shape[0], draw, counts[draw], arrivals[draw], not has_work)
        self._moves.send(exchange, x.contiguous(), topk_ids, topk_weights, scales, num_tokens)
        return exchange

    def dispatch_recv(self, exchange: StandInExchange) -> tuple[Tensor, Tensor | None, Tensor]:
        self._moves.receive(exchange)
        slot = exchange.slot
        return slot.rows, slot.scales, slot.counts

    def combine_send(self, exchange: StandInExchange, y: Tensor) -> None:
        self._moves.give_back(exchange, y.contiguous())

    def combine_recv(self, exchange: StandInExchange, out: Tensor) -> Tensor:
        straight = out.contiguous()
        self._moves.gather(exchange, straight)
        if straight is not out:
            with torch.no_grad():
                out.copy_(straight)
        return out

    def dispatch(self, *arguments) -> tuple[StandInExchange, tuple[Tensor, Tensor | None, Tensor]]:
        exchange = self.dispatch_send(*arguments)
        return exchange, self.dispatch_recv(exchange)

    def combine(self, exchange: StandInExchange, y: Tensor, out: Tensor) -> Tensor:
        self.combine_send(exchange, y)
        return self.combine_recv(exchange, out)

    def check(self, wait: bool) -> None:
        if wait and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agree(self, settings: str) -> None:
        """Nobody else is there to differ."""

    def abandon(self) -> None:
        """Nobody waits for this rank."""

    def close(self, failed: bool) -> None:
        """What was held and moved stays readable."""
        self.check(wait=True)
        self._slots.clear()
        del self._moves, self._windows

    def moved(self) -> dict[str, Moved]:
        spec = self.spec
        scale_bytes = 4 * (-(-spec.num_scales // 4) if spec.scales == "ue8m0" else spec.num_scales)
        sizes = {
            "dispatch_send": spec.wire_row_bytes + 8 * spec.top_k, "dispatch_recv": spec.row_bytes + scale_bytes,
            "combine_send": spec.output_row_bytes, "combine_recv": spec.output_row_bytes,
        }  # fmt: skip
        found = self.tally.cpu().view(-1, 2).tolist()
        return {
            half: Moved(calls, rows * size) for (half, size), (calls, rows) in zip(sizes.items(), found, strict=True)
        }

    def clear(self) -> None:
        self.tally.zero_()
        for hold in self.holds.values():
            hold.clear()


def _check(stand_in: StandIn, spec: ExchangeSpec) -> None:
    load, ep = stand_in.load, spec.parallel.ep
    if spec.layout != "expert_padded":
        raise ConfigError(f"layout is {spec.layout!r}: a StandIn serves 'expert_padded'")
    if not 0 <= stand_in.rank < ep:
        raise ConfigError(f"rank is {stand_in.rank}: legal are 0…{ep - 1}")
    wanted = (spec.max_tokens, spec.local_experts)
    if (load.max_tokens, load.counts.shape[2]) != wanted:
        raise ConfigError(
            f"load is for {load.max_tokens} tokens and {load.counts.shape[2]} experts of a rank, the exchange for "
            f"{wanted[0]} and {wanted[1]}: make it with the same model, parallel and max_tokens"
        )
    if load.counts.max() > spec.expert_rows:
        raise ConfigError(
            f"load has {load.counts.max()} rows for an expert: there is room for dp·max_tokens = {spec.expert_rows}"
        )
