"""One measured number and everything that is needed to believe it.

A Record is a summary of `n` samples of one `metric` in one `unit`: least value and four percentiles, so that
the spread can be drawn wherever the number is. Beside it stand what was run (`bench`, `backend`, `params`),
how it was timed (`clock`, `warmup`, `seed`), and where (`gpu`, `gpu_count`, `driver`, `versions`, `commit`,
`dirty`, `time`).

`clock` says what stood between start and stop:

    graph   replays of a CUDA graph, timed by events around the graph: no host in it
    event   CUDA events around eager launches: the host's enqueue may dominate below some 30 us
    wall    the host's clock
    none    the value is no time and comes from none: bits per byte, acceptance, bytes, a count. It has to be
            said, for a throughput is no time either, but is only as good as the clock it was derived from.

`kind` is "measured", or "stand-in" where something with the right shape took the place of the thing itself (a
local copy for a remote one, several ranks on one GPU). A stand-in never passes for a measurement.

Records compare by `key()`: what was run and on what, without when and by which commit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from moelab.config import MoelabError

if TYPE_CHECKING:
    from moelab.results.provenance import Provenance

CLOCKS = ("graph", "event", "wall", "none")
KINDS = ("measured", "stand-in")
STATISTICS = ("min", "p20", "p50", "p80", "p99")
TIME_UNITS = ("ns", "us", "ms", "s")
UNKNOWN_COMMIT = "unknown"

Scalar = str | int | float | bool | None


class RecordError(MoelabError, ValueError):
    """A record with a field that cannot be right; names the field, the value and what is legal."""


def _require(ok: bool, field: str, value: Any, legal: str) -> None:
    if not ok:
        raise RecordError(f"record field {field!r} is {value!r}; legal: {legal}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Record:
    """See the module's text. Raises RecordError for an illegal field; `params` and `versions` come out
    sorted."""

    bench: str  # what was run, e.g. "alltoall"; also the name of the file that holds it
    backend: str  # by whom, e.g. "nvshmem", "deep_gemm", "reference"
    params: Mapping[str, Scalar]  # flat: the setting, and nothing that varies between two runs of one setting
    metric: str  # e.g. "dispatch", "bits_per_byte"
    unit: str  # "us", "GB/s", "bit/B", "1" for a ratio or a count
    n: int  # samples behind the statistics
    min: float
    p20: float
    p50: float
    p80: float
    p99: float
    warmup: int  # samples run before and thrown away
    clock: str
    kind: str
    gpu: str  # the device's full name, or "cpu"
    gpu_count: int  # GPUs that took part; 0 for "cpu"
    driver: str  # of the GPU; empty for "cpu"
    versions: Mapping[str, str]  # library -> version, and "cpu" -> processor name
    commit: str  # 7 to 40 hex digits, or "unknown", which counts as dirty
    dirty: bool
    seed: int | None  # None: nothing random in it
    time: str  # ISO 8601, UTC, ends in Z

    def __post_init__(self) -> None:
        for field in ("bench", "backend", "metric", "unit", "gpu"):
            value = getattr(self, field)
            _require(isinstance(value, str) and value.strip() == value != "", field, value, "a non-empty string")
        _require(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.bench) is not None,
            "bench",
            self.bench,
            "letters, digits, '_', '-' and '.': it names a file",
        )
        object.__setattr__(self, "params", _sorted_scalars("params", self.params))
        object.__setattr__(self, "versions", _sorted_scalars("versions", self.versions))
        for name, version in self.versions.items():
            _require(isinstance(version, str), f"versions.{name}", version, "a string")
        _require(_is_int(self.n) and self.n >= 1, "n", self.n, "an integer from 1")
        for field in STATISTICS:
            value = getattr(self, field)
            ok = isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)
            _require(ok, field, value, "a finite number")
            object.__setattr__(self, field, float(value))
        stats = [getattr(self, field) for field in STATISTICS]
        _require(stats == sorted(stats), "min, p20, p50, p80, p99", stats, "numbers in rising order")
        _require(_is_int(self.warmup) and self.warmup >= 0, "warmup", self.warmup, "an integer from 0")
        _require(self.clock in CLOCKS, "clock", self.clock, ", ".join(CLOCKS))
        if self.unit in TIME_UNITS:
            _require(
                self.clock != "none",
                "clock",
                self.clock,
                f"graph, event or wall, since the unit is {self.unit!r}",
            )
            _require(self.min >= 0, "min", self.min, "a time from 0")
        _require(self.kind in KINDS, "kind", self.kind, ", ".join(KINDS))
        _require(
            _is_int(self.gpu_count) and (self.gpu_count == 0) == (self.gpu == "cpu") and self.gpu_count >= 0,
            "gpu_count",
            self.gpu_count,
            "the number of GPUs that took part: 0 for 'cpu', else from 1",
        )
        _require(isinstance(self.driver, str), "driver", self.driver, "a string, empty for 'cpu'")
        _require(isinstance(self.dirty, bool), "dirty", self.dirty, "true or false")
        _require(
            isinstance(self.commit, str)
            and (
                self.commit == UNKNOWN_COMMIT and self.dirty or re.fullmatch(r"[0-9a-f]{7,40}", self.commit) is not None
            ),
            "commit",
            self.commit,
            "7 to 40 hex digits, or 'unknown' with dirty true",
        )
        _require(self.seed is None or _is_int(self.seed), "seed", self.seed, "an integer or null")
        _require(
            _parse_time(self.time) is not None,
            "time",
            self.time,
            "ISO 8601 in UTC, e.g. 2026-01-31T12:00:00Z",
        )

    @classmethod
    def from_samples(
        cls,
        samples: Iterable[float],
        *,
        bench: str,
        metric: str,
        unit: str,
        clock: str,
        provenance: Provenance,
        backend: str = "reference",
        params: Mapping[str, Scalar] | None = None,
        warmup: int = 0,
        kind: str = "measured",
        seed: int | None = None,
        time: str | None = None,
    ) -> Record:
        """Summarise raw samples (any iterable of numbers, warm-up already taken off). One sample is allowed:
        a value that is not sampled, such as bits per byte of a file, has n = 1 and no spread."""
        values = sorted(float(x) for x in samples)
        if not values:
            raise RecordError(f"no samples for {bench} {metric}; at least one is needed")
        bad = [x for x in values if not math.isfinite(x)]
        if bad:
            raise RecordError(
                f"{len(bad)} of {len(values)} samples of {bench} {metric} are {bad[0]}: fix the measurement"
            )
        where = {f.name: getattr(provenance, f.name) for f in dataclasses.fields(provenance)}
        return cls(
            bench=bench,
            backend=backend,
            params=params or {},
            metric=metric,
            unit=unit,
            n=len(values),
            min=values[0],
            p20=percentile(values, 20),
            p50=percentile(values, 50),
            p80=percentile(values, 80),
            p99=percentile(values, 99),
            warmup=warmup,
            clock=clock,
            kind=kind,
            seed=seed,
            time=time or now(),
            **where,
        )

    def key(self) -> tuple[str, str, str, str, str, int]:
        """What makes two records answers to one question: bench, backend, params (as JSON), metric, gpu,
        gpu_count."""
        return (self.bench, self.backend, json.dumps(self.params), self.metric, self.gpu, self.gpu_count)

    @property
    def when(self) -> datetime:
        return _parse_time(self.time)

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_json(self) -> str:
        """One line of ASCII: no line separator of any alphabet can get into a JSONL file."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=True)

    @classmethod
    def from_json(cls, line: str | bytes) -> Record:
        """Raises RecordError when the line is not JSON, holds NaN or infinity, or lacks or adds a field."""
        try:
            data = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            if isinstance(error, RecordError):
                raise
            raise RecordError(f"not JSON: {error}") from None
        if not isinstance(data, dict):
            raise RecordError(f"not a JSON object but {type(data).__name__}")
        names = [f.name for f in dataclasses.fields(cls)]
        missing, extra = [x for x in names if x not in data], [x for x in data if x not in names]
        if missing or extra:
            raise RecordError(
                "; ".join(
                    f"{what} field{'s' * (len(x) > 1)}: {', '.join(x)}"
                    for what, x in (("missing", missing), ("unknown", extra))
                    if x
                )
            )
        return cls(**data)


def percentile(sorted_values: list[float], percent: float) -> float:
    """Linear interpolation between order statistics (numpy's default), in plain Python: importing numpy costs
    more than every record of a sweep. `sorted_values`: not empty, rising."""
    position = (len(sorted_values) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(sorted_values) - 1)
    a, b, weight = sorted_values[low], sorted_values[high], position - low
    # a + (b - a)·w may overflow and may leave [a, b] by a rounding; this form, clamped, does neither.
    return min(max(a * (1 - weight) + b * weight, a), b)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def _refuse_constant(name: str) -> float:
    raise RecordError(f"holds {name}; records are finite numbers")


def _parse_time(text: Any) -> datetime | None:
    if not isinstance(text, str) or not text.endswith("Z") or "T" not in text:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _sorted_scalars(field: str, mapping: Any) -> dict[str, Scalar]:
    _require(isinstance(mapping, Mapping), field, mapping, "a flat mapping")
    for name, value in mapping.items():
        _require(isinstance(name, str) and name != "", f"{field} name", name, "a non-empty string")
        _require(
            value is None or isinstance(value, (str, bool, int, float)),
            f"{field}.{name}",
            value,
            "a string, number, true, false or null (flat: no lists, no objects; numpy scalars: call .item())",
        )
        _require(
            not isinstance(value, (int, float)) or _is_finite(value),
            f"{field}.{name}",
            value,
            "a finite number",
        )
    return {name: mapping[name] for name in sorted(mapping)}
