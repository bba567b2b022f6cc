"""What `moelab bench` prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from moelab.bench.ops import Failure, as_table, cases, run
from moelab.bench.timer import BenchError, require_gpu
from moelab.ops import choice
from moelab.results import Store


def ops(names: Sequence[str], quick: bool, as_json: bool, records: Path) -> None:
    """Time the named ops, append their Records to `records`, print a table or JSON. Raises BenchError without a GPU,
    for an unknown op, and at the end if a backend failed."""
    todo = cases(names, quick)
    require_gpu("moelab bench ops")
    choice.use_records(records)
    err = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    total = sum(len(case.backends) for case in todo)
    results = list(track(run(todo, Store(records)), "timing (a first launch compiles)", total, console=err))
    lines = [result for result in results if not isinstance(result, Failure)]
    failures = [result for result in results if isinstance(result, Failure)]
    if as_json:
        print(json.dumps([line.to_dict() for line in lines], indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(as_table(lines))
    for failure in failures:
        err.print(escape(f"failed: {failure}"), style="red")
    if failures:
        raise BenchError(f"{len(failures)} of {len(results)} timings failed, named above")


def tables(names: Sequence[str], records: Path) -> None:
    """Measure the named tables, all if none is named; prints where each was written. Raises BenchError without a GPU
    or for an op that has none."""
    from moelab.bench.choice import TABLES, write_table

    err = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    for name in names or TABLES:
        print(write_table(name, records, lambda line: err.print(escape(line))))
