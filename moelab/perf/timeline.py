"""When everything of a schedule happens: the walk of `moelab.perf.overlap`, kept span by span.

A GPU runs one stage after another; between a send and its receive rows are on the wire. `trace` gives both. What of a
flight passes while the GPU runs other stages is *hidden*, the rest it stands at the receive and waits: *exposed*. Time
that the kernels of an exchange take themselves is never hidden: over NVLink SMs store the rows, so all of it is that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moelab.hardware import GPU
from moelab.hardware import gpu as find_gpu
from moelab.perf import layer
from moelab.perf.deployment import deployment
from moelab.perf.fabric import Exchange
from moelab.perf.kernels import Kernels
from moelab.perf.overlap import SETTLED, MicroBatch
from moelab.perf.tables import Tables, load
from moelab.stages import SCHEDULES, Span

SENDS = {"dispatch_send": "Dispatch", "combine_send": "Combine"}
RECEIVES = {"dispatch_recv": "Dispatch", "combine_recv": "Combine"}


class Flight(NamedTuple):
    """Rows on the wire, from the end of their send; `category` Dispatch or Combine. `waited_us` of it the GPU stood."""

    micro_batch: int
    layer: int
    category: str
    start_us: float
    end_us: float
    waited_us: float


class Shares(NamedTuple):
    """Communication of one layer, us: in kernels of its own, in flight beside other work, in flight while the GPU
    waits."""

    kernels: float
    hidden: float
    exposed: float

    @property
    def total(self) -> float:
        return sum(self)


def micro_batches(
    schedule: str, gpu: str | GPU, dp: int, tp: int = 1, *, batch: float, kv_len: float, tables: Tables | None = None,
    **settings,
) -> list[MicroBatch]:  # fmt: skip
    """Modelled times of what `schedule` runs at once: the whole batch, or both its halves. `settings` as in
    `moelab.perf.predict`. Raises ConfigError."""
    settings["fabric_name"] = settings.pop("fabric", None)
    d = deployment(find_gpu(gpu) if isinstance(gpu, str) else gpu, dp, tp, batch=batch, kv_len=kv_len, **settings)
    tables = load() if tables is None else tables
    kernels = Kernels(d.gpu, d.model, tables)
    exchange = Exchange(d.gpu, d.model, d.parallel, d.alltoall, d.fabric, tables)
    count = 2 if schedule == "microbatch" else 1
    return [layer.moe_layer(d, kernels, exchange, d.batch / count, d.q_len).micro_batch({})] * count


def trace(schedule: str, num_layers: int, parts: Sequence[MicroBatch]) -> tuple[list[Span], list[Flight]]:
    """Of `num_layers` MoE layers, in the order of launches; `parts` as in `moelab.perf.overlap.walk`."""
    clock, spans, flights = 0.0, [], []
    sent: dict[tuple[int, str], float] = {}
    for launch in SCHEDULES[schedule](num_layers):
        micro, stage, part = launch.micro_batch, launch.stage.name, parts[launch.micro_batch]
        start = clock
        if stage in RECEIVES:
            category = RECEIVES[stage]
            left = sent.pop((micro, category))
            arrival = left + (part.dispatch if category == "Dispatch" else part.combine)
            clock = max(clock, arrival)
            flights.append(Flight(micro, launch.layer, category, left, arrival, clock - start))
        clock += part.stages[stage]
        spans.append(Span(micro, launch.layer, stage, start, clock))
        if stage in SENDS:
            sent[micro, SENDS[stage]] = clock
    return spans, flights


def shares(schedule: str, parts: Sequence[MicroBatch]) -> Shares:
    """Of a layer in the steady state, all micro-batches together."""
    spans, flights = trace(schedule, SETTLED + 2, parts)
    mine = [f for f in flights if f.layer == SETTLED]
    exposed = sum(f.waited_us for f in mine)
    kernels = sum(s.end_us - s.start_us for s in spans if s.layer == SETTLED and s.stage in {**SENDS, **RECEIVES})
    return Shares(kernels - exposed, sum(f.end_us - f.start_us for f in mine) - exposed, exposed)
