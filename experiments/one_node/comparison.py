"""What the campaign's records say: a shadow rank beside the real ones term by term, and the exchange beside what others
published and what it aims at. Only what is recorded: where a record is missing, it says "not run".

**Error of a term**: the shadow's median over the real one's, less 1. Real times are the slowest rank's; a kind's is the
sum of its stages in one MoE layer, each timed alone. `rows` and `experts` are what a layer brought to rank 0 and how
many of its experts got any: where they differ, so does GroupGEMM, and no law is to blame.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from points import Point

from moelab.bench.alltoall import OURS
from moelab.bench.decode import LATER
from moelab.results import Record, Store, published
from moelab.stages import CATEGORIES

NOT_RUN = "not run"
AIM_EP, AIM_TOKENS = 8, 128
AIMS = {"uniform": (20.0, 35.0), "group-limited": (18.0, 28.0)}  # us of dispatch and combine, EP8 over NVLink
TERMS: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("step", {}), "first draft pass": ("draft", {"of": "first"}), "MoE layer": ("layer", {"of": "moe"}),
    "dense layer": ("layer", {"of": "dense"}), **{c: ("category", {"of": "moe", "category": c}) for c in CATEGORIES},
    "rows": ("rows", {}), "experts": ("active", {}),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A decode point at one batch: {term: (the real ranks' median, the shadow's or None)}; {} if it was not run."""

    point: str
    batch: int
    terms: dict[str, tuple[float, float | None]]

    def error(self, term: str) -> float | None:
        """Share of the real one."""
        real, shadow = self.terms.get(term, (0.0, None))
        return shadow / real - 1 if real and shadow is not None else None


@dataclass(frozen=True)
class Halves:
    """Who exchanged, and medians in us; None: not run."""

    who: str
    dispatch: float | None
    combine: float | None
    pair: float | None = None
    source: str = ""


def decode_rows(points: Iterable[Point], store: Store) -> list[Row]:
    """One for each real decode point and batch, in order."""
    records: dict[tuple[str, str], list[Record]] = {}
    for record in store.records("decode"):
        records.setdefault((record.gpu, record.metric), []).append(record)
    gpus = sorted({gpu for gpu, _ in records})

    def value(gpu: str, term: str, params: dict[str, Any]) -> float | None:
        metric, own = TERMS[term]
        wanted = LATER | params | own
        found = (r for r in records.get((gpu, metric), []) if wanted.items() <= (LATER | r.params).items())
        return next((r.p50 for r in found), None)

    rows = []
    for point in points:
        if point.shadow is None:
            continue
        for batch in map(int, point.parts):
            real, shadow = point.params | {"batch": batch}, point.shadow.params | {"batch": batch}
            gpu = next((gpu for gpu in gpus if value(gpu, "step", real) is not None), None)
            terms = {}
            for term in TERMS if gpu else ():
                if (us := value(gpu, term, real)) is not None:
                    terms[term] = us, value(gpu, term, shadow)
            rows.append(Row(point.name, batch, terms))
    return rows


def errors(rows: Iterable[Row]) -> dict[str, tuple[int, float, float, float]]:
    """{term: (how many, median of the absolute errors, lowest, highest)}, of terms that both have."""
    found = {term: [e for row in rows if (e := row.error(term)) is not None] for term in TERMS}
    return {t: (len(es), median(map(abs, es)), min(es), max(es)) for t, es in found.items() if es}


def exchange(point: Point, store: Store) -> dict[int, list[Halves]]:
    """{tokens: ours, then each peer} of an all-to-all point: of each the configuration with the least pair, or
    dispatch and combine. Ours stand there also where they were not run."""
    found = {}
    records = store.records("alltoall", gpu_count=point.gpus, **point.params)
    records = [r for r in records if r.gpu == records[0].gpu]
    for tokens in map(int, point.parts):
        configurations: dict[tuple, dict[str, float]] = {}
        for r in records:
            own = tuple(item for item in r.params.items() if item[0] not in point.params)
            if r.params["tokens"] == tokens and r.unit == "us":
                configurations.setdefault((r.backend, own), {})[r.metric] = r.p50
        best: dict[str, Halves] = {}
        for (backend, own), us in configurations.items():
            name = "ours" if backend in OURS else backend
            said = " ".join(f"{k}={v}" for k, v in own if k in ("returns", "blocks") and v)
            who = f"ours: {backend} {said}".strip() if name == "ours" else backend
            halves = Halves(who, us.get("dispatch"), us.get("combine"), us.get("pair_fused"))
            if name not in best or _total(halves) < _total(best[name]):
                best[name] = halves
        ours = best.pop("ours", Halves("ours", None, None))
        found[tokens] = [ours, *sorted(best.values(), key=_total)]
    return found


def _total(halves: Halves) -> float:
    if halves.pair is not None:
        return halves.pair
    return float("inf") if None in (halves.dispatch, halves.combine) else halves.dispatch + halves.combine


def others_published(ep: int, tokens: int = AIM_TOKENS) -> list[Halves]:
    """Published figures of DeepSeek-V3's shape in FP8 at that EP and number of tokens of a GPU, whatever the fabric,
    which `who` says. [] if there are none."""
    table = published.table("alltoall")
    shape = {"ep": ep, "tokens_per_gpu": tokens, "hidden": 7168, "topk": 8, "experts": 256}
    mine = table[(table[list(shape)] == list(shape.values())).all(axis=1)]
    found = []
    for (library, fabric, gpu, source), rows in mine.groupby(["library", "fabric", "gpu", "source"], sort=False):
        us = {}
        for stage, dtype in (("dispatch", "fp8"), ("combine", "bf16")):
            times = rows[(rows.stage == stage) & (rows.dtype == dtype)].time_us
            us[stage] = float(times.iloc[0]) if len(times) else None
        if any(us.values()):
            found.append(Halves(f"{library}; {fabric}; {gpu}", us["dispatch"], us["combine"], None, source))
    return found


def verdict(point: Point, ours: Halves) -> str:
    """How ours stands against the aim of that routing, EP8, one rank a DP group, 128 tokens."""
    aim = AIMS.get(point.params["routing"])
    if aim is None or (point.dp, point.tp) != (AIM_EP, 1):
        return "no aim is set for it"
    said = []
    for half, us, most in zip(("dispatch", "combine"), (ours.dispatch, ours.combine), aim, strict=True):
        if us is None:
            said.append(f"{half} ≤ {most:g}: {NOT_RUN}")
        else:
            missed = "reached" if us <= most else f"missed by {us / most - 1:.0%}"
            said.append(f"{half} ≤ {most:g}: {us:.1f}, {missed}")
    return "; ".join(said)
