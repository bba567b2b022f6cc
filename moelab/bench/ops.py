"""`moelab bench ops`: time, bandwidth and rate of each op, as shares of roofs measured in the same run.

An op is an entry of OPS: a function from `quick` to its `OpCase`s. Whether a result is right is the tests' business.
Every backend of a case runs the same inputs; Records hold times only, in us, by graph replay. Rates are of p50.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moelab.bench import absorb, grouped, linear, memory_bound, mla, roofs, routing
from moelab.bench.case import OpCase
from moelab.bench.timer import BenchError, num_sets, require_gpu, samples_in_turns
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
    "quantize_weight": absorb.quantize_weight_cases,
    "bmm": absorb.bmm_cases,
    "rope_append": absorb.rope_append_cases,
    "linear": linear.linear_cases,
    "grouped_gemm": grouped.grouped_gemm_cases,
    "mla": mla.mla_cases,
}


@dataclass(frozen=True)
class Line:
    """One backend of one case, timed. `roofs`: p50 of the record of each of the case's roofs, in its unit."""

    case: OpCase
    record: Record
    roofs: Mapping[str, float]

    @property
    def gb_per_s(self) -> float:
        return self.case.bytes / self.record.p50 / 1e3

    @property
    def tflop_per_s(self) -> float:
        return self.case.flops / self.record.p50 / 1e6

    @property
    def shares(self) -> dict[str, float]:
        rates = {roof: self.gb_per_s if roof == "copy" else self.tflop_per_s for roof in self.case.roofs}
        return {roof: rate / self.roofs[roof] for roof, rate in rates.items()}

    @property
    def roof(self) -> str:
        """The one that binds."""
        return max(self.shares, key=self.shares.__getitem__)

    @property
    def share(self) -> float:
        """Of the roof that binds: the least time there is, over the time taken."""
        return self.shares[self.roof]

    def to_dict(self) -> dict[str, Any]:
        derived = {"gb_per_s": self.gb_per_s, "tflop_per_s": self.tflop_per_s, "share": self.share}
        return {**self.record.to_dict(), **derived, "roof": self.roof, "roof_value": self.roofs[self.roof]}


@dataclass(frozen=True)
class Failure:
    """A backend that raised; the others of its case and the other cases go on."""

    case: OpCase
    backend: str
    error: Exception

    def __str__(self) -> str:
        setting = " ".join(f"{name}={value}" for name, value in self.case.params.items())
        return f"{self.case.op} {setting} {self.backend}: {type(self.error).__name__}: {self.error}"


def cases(ops: Sequence[str], quick: bool) -> list[OpCase]:
    """Of the named ops, all of OPS if none is named. Raises BenchError for an unknown op."""
    unknown = [name for name in ops if name not in OPS]
    if unknown:
        raise BenchError(f"no op {unknown[0]!r}; there are: {', '.join(OPS)}")
    return [case for name in ops or OPS for case in OPS[name](quick)]


def run(todo: Sequence[OpCase], store: Store) -> Iterator[Line | Failure]:
    """Time every backend of every case; every Record is appended to `store` as it is made. Raises BenchError without a
    GPU."""
    device = require_gpu("moelab bench ops")
    provenance = collect("cuda", gpu_count=1)
    heights: dict[str, float] = {}
    for case in todo:
        for roof in case.roofs:
            if roof not in heights:
                heights[roof] = _roof(roof, device, provenance, store)
        for result in time_case(case, device, provenance):
            if isinstance(result, Record):
                store.append(result)
                result = Line(case, result, heights)
            yield result


def time_case(case: OpCase, device: torch.device, provenance: Provenance) -> Iterator[Record | Failure]:
    """One Record per backend, all on the same inputs and in turns."""
    torch.manual_seed(case.seed)
    sets = [case.make(device) for _ in range(num_sets(case.bytes, device))]
    calls = [[lambda inputs=inputs, call=call: call(inputs) for inputs in sets] for call in case.backends.values()]
    for backend, samples in zip(case.backends, samples_in_turns(calls), strict=True):
        if isinstance(samples, Exception):  # reported by who prints, who also fails
            yield Failure(case, backend, samples)
            continue
        yield Record.from_samples(
            samples.us, bench=BENCH, backend=backend, metric=case.op, unit="us", clock="graph", warmup=samples.warmup,
            params=case.params, provenance=provenance, seed=case.seed,
        )  # fmt: skip


def _roof(name: str, device: torch.device, provenance: Provenance, store: Store) -> float:
    samples, warmup = roofs.measure(name, device)
    record = Record.from_samples(
        samples, bench=roofs.BENCH, backend="torch", metric=name, unit=roofs.UNITS[name],
        clock="graph", warmup=warmup, params=roofs.PARAMS[name], provenance=provenance,
    )  # fmt: skip
    store.append(record)
    return record.p50


def as_table(lines: Sequence[Line]) -> Table:
    from moelab.bench.table import empty

    table = empty("op", "params", "backend", right=("p50 [us]", "p20–p80", "GB/s", "TFLOP/s", "of roof"))
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
            f"{line.share:.0%} {line.roof}",
        )
    return table
