"""What `moelab bench groups` prints, and what it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moelab.bench import groups
from moelab.bench.table import empty
from moelab.launch import LaunchError
from moelab.results import Record, Store, collect

WIDTH = 120


def groups_bench(
    batch_by_group: Sequence[str], *, device: str | None, graph: bool | None, as_json: bool, records: Path, **asked: Any
) -> None:
    """The verb: time the steps of each case, append the Records to `records`, print a table or JSON. `asked`: of
    `groups.setting`; `device` None takes the GPU if there is one, `graph` None graphs where there are."""
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = groups.cases(batch_by_group)
    setting = groups.setting(cases, device=device, graph=device == "cuda" if graph is None else graph, **asked)
    setting.check_here()
    here = collect(device, gpu_count=setting.processes if device == "cuda" else None)
    found: list[Record] = []
    try:
        events: list[tuple[int, dict[str, Any]]] = []
        groups.run(setting, cases, events)
    except LaunchError as error:
        if error.report:
            print(error.report, file=sys.stderr, flush=True)
        raise
    finally:
        found = groups.records(events, setting, here)  # also of a run that has ended early
        store = Store(records)
        for record in found:
            store.append(record)
    if as_json:
        print(json.dumps({"records": [record.to_dict() for record in found]}, indent=2))
        return
    out = Console(width=None if sys.stdout.isatty() else WIDTH)
    at = found[0].params
    mode = "CUDA graphs" if setting.graph else "eager"
    out.print(
        escape(
            f"{at['model']}, {at['layers']} layers, dp {setting.dp} tp {setting.tp}, kv {setting.kv_len} "
            f"{at['kv_dtype']}, {at['arithmetic']}; {mode}; exchange: {found[0].backend}; wall clock, slowest rank"
        ),
        soft_wrap=True,
    )
    out.print(table(found))


def table(found: Sequence[Record]) -> Table:
    """A line for each case and way; times in us, p50."""
    numbers = ("step [us]", "p20–p80", "agree", "fill", "run", "tokens", "rows", "launches")
    made = empty("batches", "way", "agree by", right=numbers)
    for (batches, way, agree), numbers in groups.by_case(found).items():
        step = numbers["step"]
        own = [
            f"{numbers[name].p50:,.0f}" if name in numbers else ""
            for name in ("agree", "fill", "run", "tokens", "rows", "launches")
        ]
        made.add_row(batches, way, agree, f"{step.p50:,.0f}", f"{step.p20:,.0f}–{step.p80:,.0f}", *own)
    return made
