"""What `moelab bench` prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moelab.bench.ops import as_table, run
from moelab.results import Store


def ops(names: Sequence[str], quick: bool, as_json: bool, records: Path) -> None:
    """Time the named ops, append their Records to `records`, print a table or JSON."""
    with Console(stderr=True).status("timing (a first launch compiles)"):
        lines = list(run(names, quick, Store(records)))
    if as_json:
        print(json.dumps([line.to_dict() for line in lines], indent=2))
        return
    Console(width=None if sys.stdout.isatty() else 160).print(as_table(lines))
