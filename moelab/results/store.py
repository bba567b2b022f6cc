"""Records in JSONL files: append-safe writing, reading that reports damage and goes on, and precedence.

Writing. A whole line goes out in one os.write on a descriptor opened with O_APPEND, under flock: two writers
never mix, and one that is killed leaves at most a last line without its end. The next append sees that the
file does not end in a newline and puts one first, so the torn line stays alone and its neighbours whole.

Reading. A line that is no record is kept in `Store.damage` with file, number and reason, and named once in a
warning.

Which counts. Files are searched in the user's own folder (`--records DIR`, by default ./records), then in the
package. For one key (`Record.key`) a record of the user's own folder precedes the package's: who measures
again wants to see that. Within one folder the newest record of a clean commit wins; a dirty one counts only
where there is no clean one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moelab.config import MoelabError
from moelab.results.record import Record, RecordError, Scalar

if TYPE_CHECKING:
    import pandas as pd

PACKAGE_RECORDS = Path(__file__).resolve().parents[1] / "data" / "records"
DEFAULT_RECORDS = Path("records")

log = logging.getLogger(__name__)


class StoreError(MoelabError, OSError):
    """A record file cannot be written or read."""


@dataclass(frozen=True)
class Damage:
    """A line that is no record."""

    path: Path
    line: int  # from 1
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Entry:
    """A record and where it stands."""

    record: Record
    path: Path
    line: int  # from 1
    own: bool  # in the user's folder, not the package's


def machine(record: Record) -> str:
    """The folder of a record: "h200x2" for two "NVIDIA H200", "cpu" without a GPU."""
    if record.gpu == "cpu":
        return "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", record.gpu.lower().replace("nvidia", "")).strip("-")
    return f"{name}x{record.gpu_count}"


class Store:
    """Records of one folder of the user's and, unless `package` is False, of the package.

    `directory`: default ./records. It need not exist: reading finds nothing there, `append` creates it.
    """

    def __init__(self, directory: str | Path | None = None, *, package: bool = True) -> None:
        self.directory = Path(directory) if directory is not None else DEFAULT_RECORDS
        self.package = package
        self.damage: list[Damage] = []  # of the last reading
        self._warned: set[Damage] = set()

    def append(self, record: Record) -> Path:
        """Add one record to <directory>/<gpu>x<count>/<bench>.jsonl; returns that path. Safe against other
        writers (processes or threads) and against being killed. Raises StoreError if the line cannot be
        written whole."""
        path = self.directory / machine(record) / f"{record.bench}.jsonl"
        line = record.to_json().encode("ascii") + b"\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}; choose another folder with --records") from error
        try:
            _lock(descriptor, fcntl.LOCK_EX, path)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            written = os.write(descriptor, line)
            if written != len(line):  # a full disk or a quota takes part of it: leave no torn line
                os.ftruncate(descriptor, size)
                raise StoreError(f"cannot write {path}: only {written} of {len(line)} bytes fit; is the disk full?")
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)  # releases the lock
        return path

    def entries(self) -> list[Entry]:
        """Every record of every file, own ones first, in the order of paths and lines. Fills `damage`."""
        self.damage = []
        found = list(self._read_folder(self.directory, own=True))
        if self.package and self.directory.resolve() != PACKAGE_RECORDS:
            found += self._read_folder(PACKAGE_RECORDS, own=False)
        for damage in self.damage:
            if damage not in self._warned:
                self._warned.add(damage)
                log.warning("damaged record passed over: %s", damage)
        return found

    def winners(self) -> list[Entry]:
        """One entry per key, by the rule of the module's text, sorted by key (numbers by value)."""
        best: dict[tuple, tuple[tuple, Entry]] = {}
        for order, entry in enumerate(self.entries()):
            record = entry.record
            rank = (entry.own, not record.dirty, record.when, order)  # a tie in time: the later line
            key = record.key()
            if key not in best or rank > best[key][0]:
                best[key] = (rank, entry)
        return [best[key][1] for key in sorted(best, key=_natural)]

    def records(
        self,
        bench: str | None = None,
        *,
        backend: str | None = None,
        metric: str | None = None,
        gpu: str | None = None,
        gpu_count: int | None = None,
        **params: Scalar,
    ) -> list[Record]:
        """The records that count, cut down to those that match; `params` names settings, e.g. tokens=128."""
        wanted = {"bench": bench, "backend": backend, "metric": metric, "gpu": gpu, "gpu_count": gpu_count}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return [
            r
            for r in (entry.record for entry in self.winners())
            if all(getattr(r, name) == value for name, value in wanted.items())
            and all(name in r.params and r.params[name] == value for name, value in params.items())
        ]

    def to_frame(self, *, everything: bool = False) -> pd.DataFrame:
        """One row per record that counts (`everything`: per record). `params` become columns `params.<name>`,
        `versions` `versions.<name>`; `own`, `path` and `line` say where the record stands."""
        import dataclasses

        import pandas as pd

        rows = []
        for entry in self.entries() if everything else self.winners():
            row = entry.record.to_dict()
            for field in ("params", "versions"):
                row |= {f"{field}.{name}": value for name, value in row.pop(field).items()}
            rows.append(row | {"own": entry.own, "path": str(entry.path), "line": entry.line})
        fixed = [f.name for f in dataclasses.fields(Record) if f.name not in ("params", "versions")]
        fixed += ["own", "path", "line"]
        names = sorted({name for row in rows for name in row} - set(fixed))
        return pd.DataFrame(rows, columns=[*fixed, *names])

    def to_parquet(self, path: str | Path, *, everything: bool = False) -> int:
        """Write `to_frame` as Parquet; returns the number of rows. A parameter that is a number in one bench
        and a string in another has one column type only, so such a column is written as JSON text."""
        frame = self.to_frame(everything=everything)
        for name in frame.columns:
            kinds = {_arrow_kind(value) for value in frame[name] if not _is_absent(value)}
            if len(kinds) > 1 or kinds == {"bigint"}:
                frame[name] = [None if _is_absent(value) else json.dumps(value) for value in frame[name]]
        try:
            frame.to_parquet(path, index=False)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
        return len(frame)

    def _read_folder(self, folder: Path, *, own: bool) -> Iterator[Entry]:
        for path in sorted(folder.glob("**/*.jsonl")):
            for number, line in enumerate(self._read_lines(path), start=1):
                if not line.strip():
                    continue
                try:
                    yield Entry(Record.from_json(line), path, number, own)
                except RecordError as error:
                    self.damage.append(Damage(path, number, str(error)))

    def _read_lines(self, path: Path) -> list[bytes]:
        try:
            with open(path, "rb") as file:
                _lock(file.fileno(), fcntl.LOCK_SH, path)
                return file.read().split(b"\n")
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error


def _lock(descriptor: int, how: int, path: Path) -> None:
    """Held until the descriptor is closed."""
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        # Cluster file systems are often mounted without locks. O_APPEND with one write still keeps lines
        # whole on most of them, so going on beats refusing to record.
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        log.warning("no file lock on %s (%s): let only one process write there", path, error.strerror)


def _natural(key: tuple) -> list:
    return [[int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", str(part))] for part in key]


def _is_absent(value: object) -> bool:
    return value is None or value != value  # NaN: pandas' mark for a parameter the record does not have


def _arrow_kind(value: object) -> str:
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return "bool"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "bigint"
    return "text" if isinstance(value, str) else "number"
