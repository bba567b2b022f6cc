"""What `moelab bench decode` prints, and what it writes."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moelab.bench import decode
from moelab.bench.decode import Found
from moelab.bench.decode_setting import Setting, batches
from moelab.bench.table import empty
from moelab.launch import LaunchError
from moelab.results import Store, collect

WIDTH = 150


def decode_bench(
    batch: Sequence[str], *, device: str | None, graph: bool | None, as_json: bool, records: Path, **asked: Any
) -> None:
    """The verb: time a decode step of each batch, append the Records to `records`, print tables or JSON. `asked`: the
    other fields of `Setting`; `device` None takes the GPU if there is one, `graph` None graphs where there are."""
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    setting = Setting(
        batches=batches(batch), device=device, graph=device == "cuda" if graph is None else graph, **asked
    )
    setting.check_here()
    here = collect(device, gpu_count=setting.processes if device == "cuda" else None)
    seen: dict[str, Any] = {}
    bars = _Bars()

    def see(event: dict[str, Any]) -> None:
        if "progress" in event:
            bars.show(*event["progress"])
        else:
            seen.update(event)

    events: dict[int, list[tuple[int, dict[str, Any]]]] = {}  # by batch, those that are not yet records
    found: list[Found] = []
    store = Store(records)

    def take(rank: int, event: dict[str, Any]) -> None:
        events.setdefault(event["batch"], []).append((rank, event))

    def keep(batch: int) -> None:
        for one in decode.collect(events.pop(batch), setting, seen, here):
            found.append(one)
            for record in one.records:
                store.append(record)

    try:
        decode.run(setting, take, see, keep)
    except LaunchError as error:
        if error.report:
            print(error.report, file=sys.stderr, flush=True)
        raise
    finally:
        bars.close()
        for batch in list(events):  # of a run that has ended early
            keep(batch)
    found.sort(key=lambda one: one.batch)
    if as_json:
        as_dict = {"setting": dataclasses.asdict(setting), "backend": seen["backend"]}
        print(json.dumps(as_dict | {"batches": [one.to_dict() for one in found]}, indent=2))
        return
    out = Console(width=None if sys.stdout.isatty() else WIDTH)
    out.print(escape(_heading(setting, seen["backend"])), soft_wrap=True)
    for table in tables(found):
        out.print(table)


def _heading(setting: Setting, backend: str) -> str:
    mode = {"graph": "CUDA graphs", "event": "eager, by events", "wall": "eager, on the host's clock"}[setting.clock]
    drafts = f", {setting.q_len} tokens a request and {setting.tokens_per_step:g} kept" if setting.draft_tokens else ""
    what = f"{setting.model}, dp {setting.dp} tp {setting.tp}, kv {setting.kv_len} {setting.kv_dtype}{drafts}; {mode}"
    for name, count in (("exchange", setting.comm_sms), ("compute", setting.compute_sms)):
        what += f"; {name} on {count} SMs" if count else ""
    if not setting.shadow:
        return f"{what}; exchange: {backend}"
    other = f"routing {setting.routing or 'equal'}, fabric {setting.fabric or 'none'}"
    return f"{what}; one rank, the others and the exchange with them stood in for: {other}"


def tables(found: Sequence[Found]) -> list[Table]:
    """The step and a layer by stages, a column for each batch; a shadow rank's waits; memory."""
    made = [_steps(found), _layers(found), _waits(found), _memory(found)]
    return [table for table in made if table.row_count]


def _steps(found: Sequence[Found]) -> Table:
    table = _table(found, "step")
    rows: dict[str, Callable[[Found], float | None]] = {
        "step [us]": lambda one: one.p50("step"),
        "first draft pass [us]": lambda one: one.p50("draft", of="first"),
        "a later one [us]": lambda one: one.p50("draft", of="next"),
        "host, between steps [us]": lambda one: one.p50("host"),
        "sum of its stages [us]": lambda one: one.p50("stages"),
        "MoE layer [us]": lambda one: one.p50("layer", of="moe"),
        "its stages but the exchange [us]": lambda one: one.without_exchange_us,
        "dense layer [us]": lambda one: one.p50("layer", of="dense"),
        "tok/s, request": lambda one: one.p50("tok_s_request"),
        "tok/s, GPU": lambda one: one.p50("tok_s_gpu"),
        "rows for our experts": lambda one: one.p50("rows"),
        "experts with rows": lambda one: one.p50("active"),
    }
    for name, value in rows.items():
        _row(table, name, [value(one) for one in found], "{:.1f}")
    _row(table, "step over sum of stages", [one.p50("step_over_stages") for one in found], "{:.3f}")
    return table


def _layers(found: Sequence[Found]) -> Table:
    """p50 of each stage in one layer, under its category."""
    table = _table(found, "stage [us a layer]")
    for of in ("moe", "dense", "step"):
        named = found[0].stages(of)
        if not named:
            continue
        table.add_section()
        table.add_row({"moe": "MoE layer", "dense": "dense layer", "step": "beside layers"}[of], style="bold")
        for category, stages in named.items():
            if of != "step":
                _row(table, f"  {category}", [one.p50("category", category=category, of=of) for one in found], "{:.1f}")
            for stage in stages:
                _row(table, f"    {stage}", [one.p50("stage", stage=stage, of=of) for one in found], "{:.1f}", "dim")
    return table


def _waits(found: Sequence[Found]) -> Table:
    """What a shadow rank was asked to hold, and held; one line for each half and number of tokens."""
    numbers = ("asked [us]", "held p50", "p20–p80", "off", "exposed", "SMs", "sent [kB]", "received")
    table = empty("batch", "stood in for", right=numbers)
    for one in found:
        for r in one.of("held"):
            half, asked = r.params["half"], r.params["asked_us"]
            off = f"{r.p50 / asked - 1:+.1%}" if asked else ""
            sizes = [f"{one.p50(way, half=half) / 1e3:.0f}" for way in ("sent", "received")]
            spread, sms = f"{r.p20:.1f}–{r.p80:.1f}", f"{one.p50('sms', half=half):.0f}"
            exposed = f"{one.p50('exposed', half=half):.1f}"
            table.add_row(str(one.batch), half, f"{asked:.1f}", f"{r.p50:.1f}", spread, off, exposed, sms, *sizes)
    return table


def _memory(found: Sequence[Found]) -> Table:
    """Of the largest batch."""
    table = empty("memory [GB]", right=("foreseen", "measured", "off"))
    for part, size in found[-1].memory().items():
        seen = size.get("measured")
        off = "" if not seen or "foreseen" not in size else f"{size['foreseen'] / seen - 1:+.1%}"
        table.add_row(part, f"{size.get('foreseen', 0) / 1e9:.3f}", "" if seen is None else f"{seen / 1e9:.3f}", off)
    return table


def _table(found: Sequence[Found], first: str) -> Table:
    return empty(first, right=[f"batch {one.batch}" for one in found])


def _row(table: Table, name: str, values: Sequence[float | None], form: str, style: str | None = None) -> None:
    if any(value is not None for value in values):
        table.add_row(name, *("" if value is None else form.format(value) for value in values), style=style)


class _Bars:
    """One bar at a time on standard error, for what takes more than two seconds."""

    def __init__(self) -> None:
        self._name, self._bar = None, None

    def show(self, name: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if name != self._name:
            self.close()
            self._name, self._bar = name, tqdm(total=total, desc=name, delay=2, leave=False)
        self._bar.total = max(total, self._bar.total)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
