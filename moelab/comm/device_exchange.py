"""`DeviceBackend`: the halves as launches of the kernels in `kernels/` (exchange.h), on the caller's stream.

A half only fills in what changed in a prepared `Call` and launches it: no allocation, no wait, nothing looked up for
the first time, so any sequence of halves can be captured in a CUDA graph, and a replay finds its exchange's number in
device memory. Rows, scales, counts and starts of each slot are made once, at construction.

The host reads no values. What goes wrong on the device is noted by the kernel in eight words of host memory that the
GPU can write (`Error`), at which every call looks first.

Where windows come from and how a launch reaches the GPU is a `Site`: NVSHMEM's heap and one launch for each rank
(nvshmem.py), or memory of this process and one launch for all of them (virtual_kernels.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from typing import Protocol

import torch
from torch import Tensor

from moelab.comm.checks import quantizes
from moelab.comm.errors import CommError, ExchangeTimeout, InputError, WireError
from moelab.comm.layout import empty_rows, empty_scales
from moelab.comm.library import Call, Dtype, Error, Halves, Layout, Library, Return, Scales, Shape, What
from moelab.comm.library import Protocol as Arrival
from moelab.comm.spec import ExchangeSpec
from moelab.config import ConfigError

PAYLOADS = {"bf16": Dtype.BF16, "fp8": Dtype.FP8, "f32": Dtype.F32}
LAYOUTS = {"expert_padded": Layout.EXPERT_PADDED, "contiguous_128": Layout.CONTIGUOUS_128}
SCALES = {"row": Scales.ROW, "column_tma": Scales.COLUMN, "ue8m0": Scales.UE8M0}
RETURNS = {"rows": Return.ROWS, "f32": Return.F32, "bf16": Return.Y}
OUTPUTS = {torch.bfloat16: int(Dtype.BF16), torch.float32: int(Dtype.F32), torch.float16: int(Dtype.F16)}

DISPATCH, COMBINE = int(What.DISPATCH), int(What.COMBINE)
SEND, RECV, FUSED = int(Halves.SEND), int(Halves.RECV), int(Halves.FUSED)
NAMES = {
    (DISPATCH, SEND): "dispatch_send", (DISPATCH, RECV): "dispatch_recv", (DISPATCH, FUSED): "dispatch",
    (COMBINE, SEND): "combine_send", (COMBINE, RECV): "combine_recv", (COMBINE, FUSED): "combine",
}  # fmt: skip
FAILED, BAD_IDS, BAD_COUNT = int(Error.FAILED), int(Error.BAD_IDS), int(Error.BAD_COUNT)
# Half of an error record -> its name, and what the peer had to do.
WAITS = {
    1: ("dispatch_send", "it to have read exchange {} of the slot"),
    2: ("dispatch_recv", "counts and tokens of exchange {} of the slot"),
    4: ("combine_recv", "outputs of exchange {} of the slot"),
}

log = logging.getLogger(__name__)


class Site(Protocol):
    """A rank's place among the others."""

    name: str
    rank: int
    windows: int  # address of the device array of all windows' addresses
    window: int  # address of this rank's own
    state: int  # address of this rank's state
    send_blocks: int

    def agree(self, settings: str, deadline: float) -> None:
        """As `Wire.agree`."""

    def launch(self, number: int, call: Call, what: int, halves: int) -> None:
        """Launch this half of exchange `number` on the current stream. Raises `WireError` for a rank that stays
        away."""

    def abandon(self) -> None: ...

    def close(self, failed: bool, timeout_s: float) -> None:
        """The device is idle. Give the memory back."""


def make_shape(
    spec: ExchangeSpec, library: Library, returns: str, all_mapped: bool, packets: bool = True
) -> tuple[Shape, int, int]:
    """(shape, bytes of a window, bytes of a state). Packets where the kernels serve them, which is for few tokens;
    puts as soon as somebody is not mapped. Raises `CommError` for what the kernels do not serve."""
    parallel = spec.parallel
    if spec.payload == "f32" and returns == "bf16":
        raise ConfigError("returns is 'bf16' but a float32 payload has float32 outputs: take 'f32' or 'rows'")

    def shape(arrival: Arrival) -> Shape:
        return Shape(
            parallel.dp, parallel.tp, spec.num_experts, spec.top_k, spec.hidden, spec.max_tokens,
            PAYLOADS[spec.payload], LAYOUTS[spec.layout], SCALES[spec.scales], RETURNS[returns], spec.slots, arrival,
        )  # fmt: skip

    chosen = shape(Arrival.FLAGS if all_mapped else Arrival.PUTS)
    if all_mapped and packets:
        with contextlib.suppress(CommError):  # not served; if flags do not serve it either, they say so below
            library.sizes(shape(Arrival.PACKETS))
            chosen = shape(Arrival.PACKETS)
    sizes = library.sizes(chosen)
    if spec.layout == "contiguous_128" and sizes.contiguous_rows != spec.capacity:
        raise CommError(
            f"the kernels have {sizes.contiguous_rows} contiguous rows, this moelab {spec.capacity}: rebuild"
        )
    return chosen, sizes.window_bytes, sizes.state_bytes


class _Slot:
    """What belongs to one exchange in flight: its buffers, and the call that the kernels are given."""

    def __init__(self, spec: ExchangeSpec, device: torch.device) -> None:
        self.rows, self.scales = empty_rows(spec, device), empty_scales(spec, device)
        self.counts = torch.zeros(spec.local_experts, dtype=torch.int32, device=device)
        self.starts = torch.zeros_like(self.counts) if spec.layout == "contiguous_128" else None
        self.all_idle = torch.zeros(1, dtype=torch.int32, device=device)
        self.received = self.rows, self.scales, self.counts
        self.number = -1  # of the exchange that has it, or had it last
        self.call = call = Call()
        call.rows, call.row_scales, call.counts = (None if t is None else t.data_ptr() for t in self.received)
        call.starts = None if self.starts is None else self.starts.data_ptr()
        call.all_idle = self.all_idle.data_ptr()
        # Views into the call, which cost less to write through than the attribute does to look up.
        self.ids_stride, self.weights_stride = call.ids_stride, call.weights_stride
        self.scales_stride = call.scales_stride


class DeviceExchange:
    """One exchange in flight; its memory is the slot's."""

    __slots__ = ("number", "slot")

    def __init__(self, number: int, slot: _Slot) -> None:
        self.number, self.slot = number, slot

    @property
    def starts(self) -> Tensor | None:
        return self.slot.starts

    @property
    def idle(self) -> Tensor:
        """int32 [1] on the device."""
        return self.slot.all_idle

    @property
    def all_idle(self) -> bool:
        """Waits for the device."""
        if self.slot.number != self.number:
            raise CommError(
                f"all_idle of exchange {self.number} is gone: exchange {self.slot.number} has its slot; read it before "
                "that begins, or construct with more slots"
            )
        return bool(self.slot.all_idle.item())


class DeviceBackend:
    """A `Backend` over the kernels. All memory is there once it is constructed."""

    reads_values = False

    def __init__(self, spec: ExchangeSpec, site: Site, device: torch.device, timeout_s: float) -> None:
        self.spec, self.device, self.name, self.rank = spec, device, site.name, site.rank
        self._site, self._timeout_s = site, timeout_s
        self._host = torch.zeros(Error.WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._errors = (ctypes.c_uint64 * Error.WORDS).from_address(self._host.data_ptr())
        with torch.inference_mode(False):  # buffers born in inference mode could not be written outside it
            self._slots = [_Slot(spec, device) for _ in range(spec.slots)]
        for index, slot in enumerate(self._slots):
            call = slot.call
            call.windows, call.window, call.state = site.windows, site.window, site.state
            call.host_error, call.rank, call.slot = self._host.data_ptr(), site.rank, index
            call.send_blocks, call.timeout_ns = site.send_blocks, int(timeout_s * 1e9)

    @property
    def sent_bytes(self) -> int:
        raise CommError("the kernels do not count what they send: moelab.comm.traffic counts it for a routing")

    def dispatch_send(self, *arguments) -> DeviceExchange:
        exchange, _kept = self._prepare(*arguments)
        self._launch(exchange, DISPATCH, SEND)
        return exchange

    def dispatch_recv(self, exchange: DeviceExchange) -> tuple[Tensor, Tensor | None, Tensor]:
        self._launch(exchange, DISPATCH, RECV)
        return exchange.slot.received

    def dispatch(self, *arguments) -> tuple[DeviceExchange, tuple[Tensor, Tensor | None, Tensor]]:
        exchange, _kept = self._prepare(*arguments)
        self._launch(exchange, DISPATCH, FUSED)
        return exchange, exchange.slot.received

    def combine_send(self, exchange: DeviceExchange, y: Tensor) -> None:
        y = _plain(y)
        exchange.slot.call.y = y.data_ptr()
        self._launch(exchange, COMBINE, SEND)

    def combine_recv(self, exchange: DeviceExchange, out: Tensor) -> Tensor:
        return self._into(out, exchange, RECV)

    def combine(self, exchange: DeviceExchange, y: Tensor, out: Tensor) -> Tensor:
        y = _plain(y)
        exchange.slot.call.y = y.data_ptr()
        return self._into(out, exchange, FUSED)

    def check(self, wait: bool) -> None:
        if wait:
            self._synchronize()
        errors = self._errors
        if errors[FAILED]:
            raise self._timeout()
        if errors[BAD_IDS] or errors[BAD_COUNT]:
            raise InputError(self._bad_input())

    def agree(self, settings: str) -> None:
        self._site.agree(settings, time.monotonic() + self._timeout_s)

    def abandon(self) -> None:
        self._site.abandon()

    def close(self, failed: bool) -> None:
        self._synchronize()  # every wait ends, so this does
        if not failed and self._errors[FAILED]:
            failed = True
            log.warning("closed after an error that no call has raised: %s", self._timeout())
        elif self._errors[BAD_IDS] or self._errors[BAD_COUNT]:
            log.warning("closed after an error that no call has raised: %s", self._bad_input())
        self._slots.clear()
        self._site.close(failed, self._timeout_s)

    def _prepare(
        self,
        number: int,
        slot: int,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        scales: Tensor | None,
        num_tokens: Tensor | None,
        has_work: bool,
    ) -> tuple[DeviceExchange, Tensor]:
        """The call's part of dispatch_send; and x, which must live until it is launched, since it may be a copy."""
        s = self._slots[slot]
        call = s.call
        x = _aligned_rows(x)
        call.x, call.x_stride = x.data_ptr(), x.stride(0) * x.element_size()
        call.quantize = quantizes(self.spec, x, scales)
        call.ids, call.ids_bytes = topk_ids.data_ptr(), topk_ids.element_size()
        s.ids_stride[0], s.ids_stride[1] = topk_ids.stride()
        call.weights = topk_weights.data_ptr()
        s.weights_stride[0], s.weights_stride[1] = topk_weights.stride()
        if scales is not None:
            call.scales = scales.data_ptr()
            s.scales_stride[0], s.scales_stride[1] = scales.stride()
        call.num_tokens = None if num_tokens is None else num_tokens.data_ptr()
        call.tokens, call.has_work = x.shape[0], has_work
        s.number = number
        return DeviceExchange(number, s), x

    def _into(self, out: Tensor, exchange: DeviceExchange, halves: int) -> Tensor:
        straight = _plain(out)  # rows beyond num_tokens are left alone, so a copy starts from what is there
        call = exchange.slot.call
        call.out, call.out_dtype = straight.data_ptr(), OUTPUTS[out.dtype]
        self._launch(exchange, COMBINE, halves)
        if straight is not out:
            with torch.no_grad():
                out.copy_(straight)
        return out

    def _launch(self, exchange: DeviceExchange, what: int, halves: int) -> None:
        try:
            self._site.launch(exchange.number, exchange.slot.call, what, halves)
        except WireError as error:
            half = NAMES[what, halves]
            raise ExchangeTimeout(self.rank, error.peer, half, f"its call of {half}", error.seen) from error
        if self.device.type == "cpu" and self._errors[FAILED]:  # there a launch returns when it has run
            raise self._timeout()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _timeout(self) -> ExchangeTimeout:
        failed, half, peer, expected, seen = self._errors[:BAD_IDS]
        name, expectation = WAITS[half]
        seen = f"exchange {seen}" if failed == 1 else "it gave up first"
        return ExchangeTimeout(self.rank, peer, name, expectation.format(expected), seen)

    def _bad_input(self) -> str:
        """What was wrong with an earlier dispatch; said once."""
        found = []
        if self._errors[BAD_IDS]:
            found.append(f"topk_ids held ids other than 0…{self.spec.num_experts - 1} and -1, which went nowhere")
        if self._errors[BAD_COUNT]:
            found.append("num_tokens was not in 0…T, the rows of x, and counted as 0 or as T")
        self._errors[BAD_IDS] = self._errors[BAD_COUNT] = 0
        return f"in an earlier dispatch {' and '.join(found)}"


def _aligned_rows(x: Tensor) -> Tensor:
    """x, or a copy with contiguous rows that begin at multiples of 16 bytes."""
    if x.stride(1) == 1 and not (x.data_ptr() | x.stride(0) * x.element_size()) % 16:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _plain(t: Tensor) -> Tensor:
    """t, or a copy that is contiguous and begins at a multiple of 16 bytes."""
    if t.is_contiguous() and not t.data_ptr() % 16:
        return t
    return t.clone(memory_format=torch.contiguous_format)
