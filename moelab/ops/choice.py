"""Which backend and which config an op takes: read from measurements, never guessed when it runs.

`moelab bench ops --op OP --write-table` times every candidate at every point of a grid and writes, beside the Records,
`<gpu>x1/choice_<op>.csv`. A point is (groups, n, k, m): G matrices [N, K] (0 for an op with one) and M rows, or rows
per group. For each point the file holds the fastest config of each backend, so that a machine without one of the
backends still finds the best of the others.

    # NVIDIA H200; …                       where the file comes from
    groups,n,k,m,backend,config,us
    0,2112,7168,64,triton,64x16x128/s7,6.4

How it is read: the points of (groups, n, k) must be there exactly. Of them the one with the same m counts, else the
next larger m, else the largest; there the fastest of the backends that can be used. Where (groups, n, k) or the GPU is
not in the table, `pick` returns None and the op takes the default that it states. As with Records, tables of the user's
folder (./records, or what a command's --records says: `use_records`) come before the package's; a (groups, n, k) is
taken whole from the first that has it.

A look-up is a dictionary and a bisection on the host: it needs shapes only, so a captured graph keeps its choice.
"""

from __future__ import annotations

import csv
import functools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moelab.config import MoelabError
from moelab.results.store import DEFAULT_RECORDS, PACKAGE_RECORDS, machine

COLUMNS = ("groups", "n", "k", "m", "backend", "config", "us")

Shape = tuple[int, int, int]  # groups, n, k


class ChoiceError(MoelabError, ValueError):
    """A table that cannot be read."""


@dataclass(frozen=True)
class Choice:
    """`config`: text whose meaning the backend knows; empty for one that chooses by itself. `us`: as it was timed."""

    backend: str
    config: str
    us: float


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    groups: int
    n: int
    k: int
    m: int
    choice: Choice


def pick(
    op: str, device: torch.device, n: int, k: int, m: int, groups: int = 0,
    backends: tuple[str, ...] = ("deep_gemm", "triton"), directory: Path | None = None,
) -> Choice | None:  # fmt: skip
    """The fastest of `backends` at a point, by the rule above; None where the table has none.

    `device`: a CUDA device. `directory`: the user's folder of records, by default that of `use_records`; read once per
    process."""
    table = tables(op, device, directory or _own[0])
    if (points := table.get((groups, n, k))) is None:
        return None
    where, choices = points
    for choice in choices[min(bisect_left(where, m), len(where) - 1)]:
        if choice.backend in backends:
            return choice
    return None


_own = [DEFAULT_RECORDS]


def use_records(directory: Path) -> None:
    """From now on the user's tables are those of this folder, in this process."""
    _own[0] = directory


Points = tuple[list[int], list[list[Choice]]]  # every m, rising; the choices there, fastest first


@functools.cache
def tables(op: str, device: torch.device, directory: Path) -> dict[Shape, Points]:
    """Of one op on one GPU, folders merged. `tables.cache_clear()` after a table was written."""
    found: dict[Shape, Points] = {}
    gpu = torch.cuda.get_device_name(device)
    for folder in (directory, PACKAGE_RECORDS):
        path = table_path(folder, op, gpu)
        if path.is_file():
            found = {**_by_shape(read(path)), **found}
    return found


def _by_shape(rows: Iterable[Row]) -> dict[Shape, Points]:
    points: dict[Shape, dict[int, list[Choice]]] = {}
    for row in rows:
        points.setdefault((row.groups, row.n, row.k), {}).setdefault(row.m, []).append(row.choice)
    return {
        shape: (sorted(at), [sorted(at[m], key=lambda choice: choice.us) for m in sorted(at)])
        for shape, at in points.items()
    }


@dataclass(frozen=True)
class _Machine:
    gpu: str
    gpu_count: int = 1


def table_path(folder: Path, op: str, gpu: str) -> Path:
    """Where the table of an op stands in a folder of records, for a GPU of this name ("NVIDIA H200" -> h200x1)."""
    return folder / machine(_Machine(gpu)) / f"choice_{op}.csv"


def read(path: Path) -> list[Row]:
    """Every line of a table. Raises ChoiceError for one that is not as COLUMNS has it."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    reader = csv.DictReader(lines)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ChoiceError(
            f"{path} has the columns {reader.fieldnames}, not {list(COLUMNS)}; --write-table makes it anew"
        )
    try:
        return [
            Row(*(int(line[name]) for name in COLUMNS[:4]), Choice(line["backend"], line["config"], float(line["us"])))
            for line in reader
        ]
    except (TypeError, ValueError) as error:
        raise ChoiceError(f"{path} has a damaged line ({error}); --write-table makes it anew") from error


def write(path: Path, rows: Sequence[Row], origin: str) -> None:
    """Write a table, sorted, with `origin` (one line: GPU, versions, commit, time) as its first line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(f"# {origin}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in sorted(rows, key=lambda r: (r.groups, r.n, r.k, r.m, r.choice.us)):
            writer.writerow(
                [row.groups, row.n, row.k, row.m, row.choice.backend, row.choice.config, f"{row.choice.us:.2f}"]
            )
