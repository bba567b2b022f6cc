"""The four halves over any `Wire`: pack the rows of each destination into one message, move them, unpack by one sort.

| half          | sends                                          | waits for                                 |
|---------------|------------------------------------------------|-------------------------------------------|
| dispatch_send | counts to every rank; to some, rows            | nothing; posts the receives of counts     |
| dispatch_recv | nothing                                        | all counts, then the rows they announce   |
| combine_send  | a row's output to all TP ranks of its DP group | nothing; posts the receives of outputs    |
| combine_recv  | nothing                                        | the outputs; then that our own sends left |

The sizes of outputs are known at both ends since dispatch, so nothing announces them. That combine_recv waits for our
own sends frees their memory and keeps any rank from running a whole exchange ahead; it cannot deadlock, because a
send leaves as soon as the peer has made the call that posts the receive, and that call never comes after this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.comm.checks import quantizes
from moelab.comm.errors import ExchangeTimeout, WireError
from moelab.comm.layout import empty_rows, empty_scales, segment_starts, write_scales
from moelab.comm.pack import Placement, Routing, as_bytes, pack_rows, place, route, unpack_rows
from moelab.comm.spec import ExchangeSpec
from moelab.comm.wire import PARTS, Tag, Wire
from moelab.ops.quantize import quantize_rows
from moelab.ops.reduce import reduce_topk_reference


@dataclass
class PackedExchange:
    """One exchange in flight, on one rank."""

    number: int
    slot: int
    num_tokens: int
    routing: Routing
    weights: Tensor  # [n, K], our own copy
    header: Tensor  # [1 + L] int32 on the host: what we tell ourselves
    local_rows: Tensor | None  # the message from us to us, which takes no wire
    placement: Placement | None = None
    local_outputs: Tensor | None = None
    all_idle: bool | None = None
    starts: Tensor | None = None

    @property
    def idle(self) -> bool | None:
        return self.all_idle


class PackedBackend:
    """A `Backend` over a wire. Rows and scales live in one buffer per slot, made at the slot's first use."""

    reads_values = True

    def __init__(self, spec: ExchangeSpec, wire: Wire, device: torch.device, timeout_s: float) -> None:
        self.spec, self.device = spec, device
        self._wire, self._timeout_s = wire, timeout_s
        self._buffers: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._others = [rank for rank in range(spec.parallel.ep) if rank != wire.rank]

    @property
    def name(self) -> str:
        return self._wire.name

    @property
    def rank(self) -> int:
        return self._wire.rank

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    @torch.no_grad()
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
    ) -> PackedExchange:
        n = len(x) if num_tokens is None else int(num_tokens)
        if quantizes(self.spec, x, scales):
            x, scales = quantize_rows(x[:n].contiguous(), power_of_two=self.spec.scales == "ue8m0")
        routing = route(topk_ids[:n], self.spec, self.rank)
        counts = routing.my_counts.cpu()
        headers = torch.cat([torch.full((len(counts), 1), int(has_work)), counts], 1).to(torch.int32)
        tokens = routing.my_token.split(counts.sum(1).tolist())
        rows = {peer: pack_rows(x, scales, t) for peer, t in enumerate(tokens) if len(t)}
        exchange = PackedExchange(
            number, slot, n, routing, topk_weights[:n].clone(), headers[self.rank], rows.pop(self.rank, None)
        )
        tag = Tag(number, "counts")
        on_device = headers.to(self.device).view(torch.uint8)
        self._send("dispatch_send", tag, {peer: on_device[peer] for peer in self._others})
        self._post("dispatch_send", tag, dict.fromkeys(self._others, self.spec.header_bytes))
        self._send("dispatch_send", Tag(number, "rows"), rows)
        return exchange

    @torch.no_grad()
    def dispatch_recv(self, exchange: PackedExchange) -> tuple[Tensor, Tensor | None, Tensor]:
        spec, half, deadline = self.spec, "dispatch_recv", self._deadline()
        headers = self._wait(half, Tag(exchange.number, "counts"), deadline)
        headers[self.rank] = exchange.header.view(torch.uint8)
        table = torch.stack([headers[source].cpu().view(torch.int32) for source in range(spec.parallel.ep)])
        exchange.all_idle = not table[:, 0].any().item()
        counts = table[:, 1:].long()
        total = counts.sum(0)

        tag = Tag(exchange.number, "rows")
        sizes = {peer: n * spec.wire_row_bytes for peer, n in enumerate(counts.sum(1).tolist()) if n}
        sizes.pop(self.rank, None)
        self._post(half, tag, sizes)
        messages = self._wait(half, tag, deadline)
        if exchange.local_rows is not None:
            messages[self.rank] = exchange.local_rows

        rows, row_scales = self._slot(exchange.slot)
        if spec.layout == "contiguous_128":
            exchange.starts = segment_starts(total).to(self.device)
            starts = exchange.starts.long()
        else:
            starts = torch.arange(spec.local_experts, device=self.device) * spec.expert_rows
        arrived = [unpack_rows(messages[source], spec) for source in sorted(messages)]
        tokens = torch.cat([torch.empty(0, dtype=torch.int32, device=self.device), *(a[0] for a in arrived)])
        exchange.placement = place(tokens, counts.to(self.device), starts, spec)
        flat, first = as_bytes(rows.view(-1, spec.hidden)), 0
        for token, scales, values in arrived:
            where = exchange.placement.where[first : first + len(token)]
            flat[where] = values
            if row_scales is not None:
                write_scales(row_scales, where, scales, spec)
            first += len(token)
        exchange.local_rows = None
        return rows, row_scales, total.to(torch.int32).to(self.device)

    @torch.no_grad()
    def combine_send(self, exchange: PackedExchange, y: Tensor) -> None:
        spec, tag = self.spec, Tag(exchange.number, "outputs")
        flat = y.reshape(-1, spec.hidden)
        messages = {}
        for group, rows in enumerate(exchange.placement.by_group):
            if len(rows):
                message = as_bytes(flat[rows]).flatten()
                messages |= dict.fromkeys(spec.parallel.group_ranks(group), message)
        exchange.local_outputs = messages.pop(self.rank, None)
        sizes = {r: n * spec.output_row_bytes for r, n in enumerate(exchange.routing.rows_per_rank.tolist()) if n}
        sizes.pop(self.rank, None)
        self._send("combine_send", tag, messages)
        self._post("combine_send", tag, sizes)

    @torch.no_grad()
    def combine_recv(self, exchange: PackedExchange, out: Tensor) -> Tensor:
        half, deadline = "combine_recv", self._deadline()
        messages = self._wait(half, Tag(exchange.number, "outputs"), deadline)
        if exchange.local_outputs is not None:
            messages[self.rank] = exchange.local_outputs
        parts = [messages[source] for source in sorted(messages)]
        flat = torch.cat([torch.empty(0, dtype=torch.uint8, device=self.device), *parts])
        results = flat.view(self.spec.output_dtype).view(-1, self.spec.hidden)
        summed = reduce_topk_reference(results, exchange.routing.row_of, exchange.weights, out.dtype)
        out[: exchange.num_tokens] = summed
        for part in PARTS:
            with self._naming(half, f"it to take our {part} of exchange {exchange.number}"):
                self._wire.drain(Tag(exchange.number, part), deadline)
        return out

    def dispatch(self, *arguments) -> tuple[PackedExchange, tuple[Tensor, Tensor | None, Tensor]]:
        exchange = self.dispatch_send(*arguments)
        return exchange, self.dispatch_recv(exchange)

    def combine(self, exchange: PackedExchange, y: Tensor, out: Tensor) -> Tensor:
        self.combine_send(exchange, y)
        return self.combine_recv(exchange, out)

    def check(self, wait: bool) -> None:
        """Nothing to do: a half that fails raises itself."""

    def agree(self, settings: str) -> None:
        self._wire.agree(settings, self._deadline())

    def abandon(self) -> None:
        self._wire.close(failed=True)

    def close(self, failed: bool) -> None:
        self._wire.close(failed)
        self._buffers.clear()

    def _slot(self, slot: int) -> tuple[Tensor, Tensor | None]:
        if slot not in self._buffers:
            with torch.inference_mode(False):  # a buffer born in inference mode could not be written outside it
                self._buffers[slot] = empty_rows(self.spec, self.device), empty_scales(self.spec, self.device)
        return self._buffers[slot]

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _send(self, half: str, tag: Tag, messages: dict[int, Tensor]) -> None:
        with self._naming(half, f"a connection for {tag.part} of exchange {tag.exchange}"):
            self._wire.send(tag, messages)

    def _post(self, half: str, tag: Tag, sizes: dict[int, int]) -> None:
        with self._naming(half, f"a connection for {tag.part} of exchange {tag.exchange}"):
            self._wire.post(tag, sizes)

    def _wait(self, half: str, tag: Tag, deadline: float) -> dict[int, Tensor]:
        with self._naming(half, f"{tag.part} of exchange {tag.exchange}"):
            return self._wire.wait(tag, deadline)

    @contextmanager
    def _naming(self, half: str, expected: str) -> Iterator[None]:
        """The wire knows which peer; say also which rank waited, in which half and for what."""
        try:
            yield
        except WireError as error:
            raise ExchangeTimeout(self.rank, error.peer, half, expected, error.seen) from error
