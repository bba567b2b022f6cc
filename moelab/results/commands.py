"""The verbs `moelab records …`, for `moelab.cli`. Bodies import what they need."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Look at measurements, your own and the package's.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
Records = Annotated[
    Path | None,
    typer.Option("--records", metavar="DIR", help="Folder of your own records, searched first. [default: ./records]"),
]


@app.command("list")
def records_list(
    as_json: AsJson = False,
    records: Records = None,
    everything: Annotated[bool, typer.Option("--all", help="Also those that a newer or clean record outdoes.")] = False,
) -> None:
    """List the records that count.

    For one setting on one kind of machine that is the newest record of a clean commit, your own before the
    package's.
    """
    entries = _entries(records, everything)
    if as_json:
        print(json.dumps([_entry_as_dict(e) for e in entries], indent=2))
        return
    if not entries:
        print("no records; a benchmark writes them to ./records (or --records DIR)", file=sys.stderr)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("#", "bench", "backend", "params", "metric"):
        table.add_column(column, overflow="fold")
    table.add_column("p50", justify="right")
    table.add_column("p20–p80", justify="right")
    for column in ("unit", "machine", "commit", "day"):
        table.add_column(column, overflow="fold")
    for number, entry in enumerate(entries, start=1):
        r = entry.record
        params = " ".join(f"{name}={value}" for name, value in r.params.items())
        where = "CPU" if r.gpu == "cpu" else f"{r.gpu_count} × {r.gpu}"
        metric = r.metric if r.kind == "measured" else f"{r.metric} ({r.kind})"
        commit = r.commit[:7] + (" (dirty)" if r.dirty else "")
        table.add_row(
            str(number),
            r.bench,
            r.backend,
            params,
            metric,
            f"{r.p50:.5g}",
            f"{r.p20:.5g}–{r.p80:.5g}",
            r.unit,
            where,
            commit,
            r.time[:10],
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@app.command("show")
def records_show(
    which: Annotated[str, typer.Argument(metavar="BENCH|NUMBER", help="A bench, or a number of `records list`.")],
    as_json: AsJson = False,
    records: Records = None,
    everything: Annotated[bool, typer.Option("--all", help="Number and match as `records list --all` does.")] = False,
) -> None:
    """Show records in full, with file and line."""
    from moelab.results import StoreError

    entries = _entries(records, everything)
    if which.isdecimal():
        if not 1 <= int(which) <= len(entries):
            raise StoreError(f"no record number {which}; there are {len(entries)} (see `moelab records list`)")
        chosen = [entries[int(which) - 1]]
    else:
        chosen = [e for e in entries if e.record.bench == which]
        if not chosen:
            benches = ", ".join(sorted({e.record.bench for e in entries})) or "none"
            raise StoreError(f"no records of bench {which!r}; there are: {benches}")
    if as_json:
        print(json.dumps([_entry_as_dict(e) for e in chosen], indent=2))
        return
    for entry in chosen:
        fields = _entry_as_dict(entry)
        width = max(len(name) for name in fields)
        for name, value in fields.items():
            shown = " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{name:<{width}}  {shown}")
        print()


@app.command("export")
def records_export(
    file: Annotated[Path, typer.Argument(metavar="FILE.parquet", help="The file to write.")],
    records: Records = None,
    everything: Annotated[bool, typer.Option("--all", help="Also those that a newer or clean record outdoes.")] = False,
) -> None:
    """Write records as a Parquet table; prints its path."""
    if file.suffix != ".parquet":
        raise typer.BadParameter(f"{file} does not end in .parquet", param_hint="FILE.parquet")
    count = _store(records).to_parquet(file, everything=everything)
    print(f"{count} record{'s' * (count != 1)}", file=sys.stderr)
    print(file)


def _store(records: Path | None):
    from moelab.results import Store, StoreError

    if records is not None and not records.is_dir():
        raise StoreError(f"no folder {records}: --records names one that holds records")
    return Store(records)


def _entries(records: Path | None, everything: bool) -> list:
    store = _store(records)
    return store.entries() if everything else store.winners()


def _entry_as_dict(entry) -> dict[str, Any]:
    return entry.record.to_dict() | {"file": str(entry.path), "line": entry.line, "own": entry.own}
