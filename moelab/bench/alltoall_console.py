"""What `moelab bench alltoall` prints, and what it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moelab.bench import alltoall, alltoall_cpu
from moelab.bench.alltoall_setting import Setting
from moelab.bench.table import empty
from moelab.bench.timer import BenchError
from moelab.launch import launch
from moelab.results import Record, Store, collect
from moelab.results.provenance import visible_gpus

if TYPE_CHECKING:
    from moelab.bench.alltoall import Line, Results

WIDTH = 190


def alltoall_bench(
    tokens: Sequence[str], routings: Sequence[str], device: str, *, dp: int, tp: int, hidden: int, experts: int,
    top_k: int, payload: str, graph: bool | None, backends: Sequence[str], returns: Sequence[str],
    blocks: Sequence[str], as_json: bool, records: Path,
) -> None:  # fmt: skip
    """The verb. `tokens` and `blocks`: numbers, or several with commas between; `graph` None: both clocks."""
    settings = [
        Setting(dp, tp, count, hidden, experts, top_k, payload, routing)
        for routing in routings
        for count in numbers("tokens", tokens)
    ]
    for setting in settings:
        setting.ids()  # what cannot be drawn says so before anything starts
    if device == "cpu":
        if given := [*backends, *returns, *blocks]:
            raise BenchError(f"{given[0]!r} picks among backends of GPUs: leave it out with --device cpu")
        on_cpu(settings, as_json, records)
    else:
        clocks = ("graph", "event") if graph is None else ("graph",) if graph else ("event",)
        on_gpus(settings, backends, returns, numbers("blocks", blocks), clocks, as_json, records)


def numbers(name: str, given: Sequence[str]) -> list[int]:
    """["1,8", "32"] -> [1, 8, 32]. Raises BenchError for what is no number."""
    texts = [text.strip() for several in given for text in several.split(",")]
    for text in texts:
        if not text.isdecimal():
            raise BenchError(f"{name} is {text!r}: give a number, several with commas between, or the option again")
    return [int(text) for text in texts]


def on_gpus(
    settings: Sequence[Setting], backends: Sequence[str], returns: Sequence[str], blocks: Sequence[int],
    clocks: Sequence[str], as_json: bool, records: Path,
) -> None:  # fmt: skip
    """Time everything, append each Record to `records` as it is made, print tables or JSON. What was measured is kept
    and printed also where the run ends early, with its LaunchError, or where one of our own results was wrong or could
    not be had: BenchError."""
    job = alltoall.job(settings, backends or alltoall.BACKENDS, returns or alltoall.RETURNS, blocks or [0], clocks)
    events = alltoall.run(job)
    if events is None:  # another rank prints
        return
    store = Store(records)

    def keep(record: Record) -> None:
        store.append(record)
        params = " ".join(f"{n}={record.params[n]}" for n in ("tokens", "returns", "blocks") if n in record.params)
        print(f"{record.backend} {params} {record.metric} {record.p50:.2f} {record.unit}", file=sys.stderr, flush=True)

    # Of several nodes this one stands for all.
    here = collect("cuda", gpu_count=min(settings[0].ep, len(visible_gpus())))
    results, ended = alltoall.collect(events, job, replace(here, gpu_count=settings[0].ep), keep)
    found = alltoall.lines(results, settings)
    if as_json:
        print(json.dumps(_as_dict(results, found), indent=2))
    else:
        out = Console(width=None if sys.stdout.isatty() else WIDTH)
        if floor := [r for r in results.records if r.backend == "floor"]:
            out.print(_floor_table(floor))
        out.print(_table(found))
        for setting, backend, why in results.missing:
            where = "" if setting is None else f" at {setting.tokens} tokens, {setting.routing}"
            out.print(escape(f"not measured: {backend}{where}: {why}"))
    if ended is not None:
        if ended.report:
            print(ended.report, file=sys.stderr, flush=True)
        raise ended
    if ours := [why for _, backend, why in results.missing if backend in alltoall.OURS]:
        raise BenchError(f"{len(ours)} of our own timings failed: {ours[0]}")


def on_cpu(settings: Sequence[Setting], as_json: bool, records: Path) -> None:
    """The method, small: processes over gloo. Appends the Records, prints a table or JSON."""
    provenance, found = collect("cpu"), []
    for setting in settings:
        job = alltoall_cpu.job(
            setting.parallel(), setting.experts, setting.hidden, [ids.tolist() for ids in setting.ids()],
            [setting.tokens], payload=setting.payload,
        )  # fmt: skip
        with launch("moelab.bench.alltoall_cpu:worker", job, setting.ep) as ranks:
            found += alltoall_cpu.records(list(ranks), job, provenance, setting.routing)
    store = Store(records)
    for record in found:
        store.append(record)
    if as_json:
        print(json.dumps([record.to_dict() for record in found], indent=2))
        return
    table = empty("tokens", "backend", "metric", right=("p50", "p20–p80", "p99", "unit"))
    for r in found:
        spread = f"{r.p20:.0f}–{r.p80:.0f}"
        table.add_row(str(r.params["tokens"]), r.backend, r.metric, f"{r.p50:.0f}", spread, f"{r.p99:.0f}", r.unit)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    print("CPU processes over gloo: these show the method, not a GPU.", file=sys.stderr)


def _as_dict(results: Results, found: Sequence[Line]) -> dict[str, Any]:
    missing = [
        {"setting": None if setting is None else setting.params(), "backend": backend, "why": why}
        for setting, backend, why in results.missing
    ]
    floor = [record.to_dict() for record in results.records if record.backend == "floor"]
    return {"floor": floor, "lines": [line.to_dict() for line in found], "missing": missing}


def _floor_table(floor: Sequence[Record]) -> Table:
    table = empty("floor", "params", right=("p50", "p20–p80", "p99", "unit"))
    for r in floor:
        params = " ".join(f"{name}={value}" for name, value in r.params.items() if name not in ("ep", "bytes"))
        table.add_row(r.metric, params, f"{r.p50:.2f}", f"{r.p20:.2f}–{r.p80:.2f}", f"{r.p99:.2f}", r.unit)
    return table


def _table(found: Sequence[Line]) -> Table:
    """Times in us; for each line what it is held against."""
    right = (
        "pair", "p20–p80", "p99", "split", "dispatch", "combine", "eager d / c", "enqueue", "bound d + c", "× bound",
        "of link",
    )  # fmt: skip
    table = empty("tokens", "routing", "backend", right=right)
    last = None
    for line in found:
        if last not in (None, line.setting):
            table.add_section()
        last = line.setting
        pair = line.records.get("pair_fused")
        own = " ".join(f"{name}={value}" for name, value in line.params.items() if value or name == "returns")
        table.add_row(
            str(line.setting.tokens), line.setting.routing, f"{line.backend} {own}".strip(),
            _us(line.p50("pair_fused")), f"{pair.p20:.1f}–{pair.p80:.1f}" if pair else "",
            _us(pair.p99 if pair else None),
            _us(line.p50("pair_split")), _us(line.p50("dispatch")), _us(line.p50("combine")),
            f"{_us(line.p50('dispatch_eager'))} / {_us(line.p50('combine_eager'))}".strip(" /"),
            _us(line.p50("enqueue_fused")), f"{line.bound.dispatch:.1f} + {line.bound.combine:.1f}",
            "" if line.over_bound is None else f"{line.over_bound:.1f}",
            "" if line.link_share is None else f"{line.link_share:.0%}",
        )  # fmt: skip
    return table


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
