"""Running points: what is left of each, one process group for each, and a journal of how each ended.

Only records count as done. The journal, `runs.ndjson` beside them, says what was tried, so that what failed before
comes last; the folder `logs` holds what each command printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from points import Mark, Point

from moelab.doctor.machine import MULTICAST
from moelab.results import Record, Store
from moelab.results.record import now

ROOT = Path(__file__).parents[2]  # of the clone: where `python -m moelab` and the tests are found
JOURNAL, LOGS = "runs.ndjson", "logs"  # not .jsonl: those are records
GRACE_S = 10.0  # from SIGTERM to SIGKILL
GONE_S = 5.0  # ranks whose launcher was killed end by themselves, and give their GPU's memory back
LAST_LINES, LAST_CHARACTERS = 3, 300


@dataclass(frozen=True)
class Run:
    """How a point ended. `status`: the command's, negative for the signal that ended it; "limit" where it was killed at
    its limit. `left`: parts whose records are still missing."""

    name: str
    status: int | str
    seconds: float
    parts: list[str]
    left: list[str]
    said: str
    time: str

    @property
    def well(self) -> bool:
        return self.status == 0 and not self.left


class Seen:
    """The records of a folder, to ask for marks."""

    def __init__(self, folder: Path) -> None:
        self._by: dict[tuple[str, str], list[Record]] = {}
        for entry in Store(folder, package=False).winners():
            self._by.setdefault((entry.record.bench, entry.record.metric), []).append(entry.record)

    def has(self, mark: Mark, gpus: int) -> bool:
        """Whether there is such a record of so many GPUs or more."""
        bench, backend, metric, params = mark
        return any(
            backend in (None, r.backend) and r.gpu_count >= gpus and params.items() <= r.params.items()
            for r in self._by.get((bench, metric), [])
        )

    def left(self, point: Point) -> list[str]:
        """Parts of which a mark is missing, in order."""
        return [part for part, marks in point.parts.items() if not all(self.has(m, point.gpus) for m in marks)]


def tried(folder: Path) -> set[str]:
    """Names in the journal. A line that was torn by a lost machine is passed over."""
    names = set()
    for line in (folder / JOURNAL).read_text().splitlines() if (folder / JOURNAL).exists() else []:
        with contextlib.suppress(ValueError, KeyError):
            names.add(json.loads(line)["name"])
    return names


def in_order(points: Iterable[Point], folder: Path) -> list[Point]:
    """Those never tried first, each group as it came."""
    before = tried(folder)
    return sorted(points, key=lambda point: point.name in before)


def run(point: Point, folder: Path, limit_s: float | None = None) -> Run:
    """Run what is left of `point` and note in the journal how it ended. `limit_s`: in place of its own limit."""
    parts = Seen(folder).left(point)
    log = folder / LOGS / f"{point.name.replace('/', '_').replace(' ', '_')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("ab") as out:
        begin = out.tell()
        limit_s = point.limit_s(len(parts)) if limit_s is None else limit_s
        # Tests let ranks share a GPU: a kernel that is loaded at its first launch only may wait for one that spins.
        more = {"CUDA_MODULE_LOADING": "EAGER"} if point.verb == "pytest" else {}
        status = _end(point.arguments(parts, str(folder.resolve())), more, out, limit_s)
    seconds = round(time.monotonic() - start, 1)
    ended = Run(point.name, status, seconds, parts, Seen(folder).left(point), _last(log, begin), now())
    with (folder / JOURNAL).open("a") as journal:
        journal.write(json.dumps(asdict(ended)) + "\n")
    return ended


def _end(arguments: list[str], more: dict[str, str], out: BinaryIO, limit_s: float) -> int | str:
    """The exit status, or "limit". Whatever ends this, the process group does not outlive it."""
    # A run that dies with NVLink multicast in use may leave GPUs unusable until they are reset.
    environment = MULTICAST | more | os.environ | {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return "limit"
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            _signal(process, signal.SIGKILL)
            process.wait()
            time.sleep(GONE_S)


def _signal(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, of a group that is gone
        os.killpg(process.pid, number)


def _last(log: Path, begin: int) -> str:
    """The last words since byte `begin`."""
    with log.open("rb") as file:
        file.seek(begin)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:])[-LAST_CHARACTERS:]
