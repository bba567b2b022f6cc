"""`moelab bench ops`: time, bandwidth and rate of each op, as shares of roofs measured in the same run.

An op is an entry of OPS: a function from `quick` to its `OpCase`s. Whether a result is right is the tests' business.
Every backend of a case runs the same inputs; Records hold times only, in us, by graph replay. Rates are of p50.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moelab.bench import memory_bound, roofs, routing
from moelab.bench.case import OpCase
from moelab.bench.timer import WARMUP, BenchError, graph_samples, num_sets, require_gpu
from moelab.results import Provenance, Record, Store, collect

if TYPE_CHECKING:
    from rich.table import Table

BENCH = "ops"
OPS: dict[str, Callable[[bool], list[OpCase]]] = {
    "quantize": memory_bound.quantize_cases,
    "rms_norm": memory_bound.rms_norm_cases,
    "silu_mul": memory_bound.silu_mul_cases,
    "router": routing.router_cases,
    "gather": routing.gather_cases,
    "reduce": routing.reduce_cases,
}


@dataclass(frozen=True)
class Line:
    """One backend of one case, timed. `roof`: p50 of the roof's record, in its unit."""

    case: OpCase
    record: Record
    roof: float

    @property
    def gb_per_s(self) -> float:
        return self.case.bytes / self.record.p50 / 1e3

    @property
    def tflop_per_s(self) -> float:
        return self.case.flops / self.record.p50 / 1e6

    @property
    def share(self) -> float:
        """Of the roof the case is bound by."""
        return (self.gb_per_s if self.case.roof == "copy" else self.tflop_per_s) / self.roof

    def to_dict(self) -> dict[str, Any]:
        derived = {"gb_per_s": self.gb_per_s, "tflop_per_s": self.tflop_per_s, "share": self.share}
        return {**self.record.to_dict(), **derived, "roof": self.case.roof, "roof_value": self.roof}


def run(ops: Sequence[str], quick: bool, store: Store) -> Iterator[Line]:
    """Time the named ops (all of OPS if none is named); every Record is appended to `store` as it is made. Raises
    BenchError without a GPU or for an unknown op."""
    unknown = [name for name in ops if name not in OPS]
    if unknown:
        raise BenchError(f"no op {unknown[0]!r}; there are: {', '.join(OPS)}")
    device = require_gpu("moelab bench ops")
    provenance = collect("cuda", gpu_count=1)
    heights: dict[str, float] = {}
    for name in ops or OPS:
        for case in OPS[name](quick):
            if case.roof not in heights:
                heights[case.roof] = _roof(case.roof, device, provenance, store)
            for record in time_case(case, device, provenance):
                store.append(record)
                yield Line(case, record, heights[case.roof])


def time_case(case: OpCase, device: torch.device, provenance: Provenance) -> Iterator[Record]:
    """One Record per backend, all on the same inputs."""
    torch.manual_seed(case.seed)
    sets = [case.make(device) for _ in range(num_sets(case.bytes, device))]
    for backend, call in case.backends.items():
        samples = graph_samples([lambda inputs=inputs, call=call: call(inputs) for inputs in sets])
        yield Record.from_samples(
            samples, bench=BENCH, backend=backend, metric=case.op, unit="us", clock="graph", warmup=WARMUP,
            params=case.params, provenance=provenance, seed=case.seed,
        )  # fmt: skip


def _roof(name: str, device: torch.device, provenance: Provenance, store: Store) -> float:
    record = Record.from_samples(
        roofs.measure(name, device), bench=roofs.BENCH, backend="torch", metric=name, unit=roofs.UNITS[name],
        clock="graph", warmup=WARMUP, params=roofs.PARAMS[name], provenance=provenance,
    )  # fmt: skip
    store.append(record)
    return record.p50


def as_table(lines: Sequence[Line]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("op", "params", "backend"):
        table.add_column(column, overflow="fold")
    for column in ("p50 [us]", "p20–p80", "GB/s", "TFLOP/s", "of roof"):
        table.add_column(column, justify="right")
    for line in lines:
        r = line.record
        table.add_row(
            line.case.op,
            " ".join(f"{name}={value}" for name, value in r.params.items()),
            r.backend,
            f"{r.p50:.2f}",
            f"{r.p20:.2f}–{r.p80:.2f}",
            f"{line.gb_per_s:.0f}",
            f"{line.tflop_per_s:.0f}" if line.case.flops else "",
            f"{line.share:.0%} {line.case.roof}",
        )
    return table
