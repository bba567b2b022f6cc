"""`moelab bench decode`: a decode step, what it is made of, and what it takes in memory.

    metric                    unit   params beside the setting's
    step                      us                            the main model's step, head included
    draft                     us     of: first, next        a pass of the MTP layer, head included
    engine_step, host         us                            the engine's whole step; less its step and drafts
    construct                 us     sizes                  making the engine, its steps of so many sizes captured
    layer                     us     of: moe, dense         one layer, from a graph of all of its kind
    stage                     us     of, stage, category    one layer's stage, from a graph of it alone in all layers;
                                                            of "step": what a step has beside layers
    category                  us     of, category           the sum of its stages in one layer of the kind
    stages                    us                            the sum of all stages of all layers: what a step would take
                                                            if nothing stood between them, and nothing overlapped
    step_over_stages          1                             step over that
    tok_s_request, tok_s_gpu  tok/s  acceptance             tokens a step, Σ aⁱ, over step and drafts
    rows, active              1                             rows of a layer for this rank's experts; experts with any
    memory                    B      part, from             foreseen and measured (decode_memory.py)
    held                      us     half, asked_us         a shadow rank's waits in the step, from the send's start,
                                                            beside the time that the fabric's law asked for
    exposed                   us     half                   what it waited, on average; the rest passed meanwhile
    sent, received            B      half                   by a call's kernels, on average
    sms                       1      half                   that they take

Times of several ranks are the slowest's. Sample i of a sum is the sum of the i-th samples. Records of a shadow rank are
of kind "stand-in": its setting names what stood in for the others, `routing` and `fabric`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moelab.bench.alltoall_setting import slowest
from moelab.bench.decode_setting import Setting
from moelab.results import Provenance, Record
from moelab.results.record import percentile
from moelab.stages import CATEGORIES

BENCH = "decode"
LATER = {"comm_sms": 0, "compute_sms": 0}  # parameters that records lack from before they could be set
Events = Iterable[tuple[int, dict[str, Any]]]


@dataclass
class Found:
    """One batch's records."""

    setting: Setting
    batch: int
    records: list[Record] = field(default_factory=list)

    def get(self, metric: str, **params) -> Record | None:
        return next((r for r in self.of(metric, **params)), None)

    def of(self, metric: str, **params) -> list[Record]:
        """Those of the metric that carry these parameters."""
        return [r for r in self.records if r.metric == metric and params.items() <= r.params.items()]

    def p50(self, metric: str, **params) -> float | None:
        record = self.get(metric, **params)
        return None if record is None else record.p50

    def stages(self, of: str) -> dict[str, dict[str, float]]:
        """{category: {stage: us}} of one layer of a kind, or of the step beside layers."""
        named = {(r.params["category"], r.params["stage"]): r.p50 for r in self.of("stage", of=of)}
        return {
            category: {stage: us for (c, stage), us in named.items() if c == category}
            for category in CATEGORIES
            if any(c == category for c, _ in named)
        }

    @property
    def without_exchange_us(self) -> float | None:
        """An MoE layer's stages one after another, but for dispatch and combine."""
        kinds = [r for r in self.of("category", of="moe") if r.params["category"] not in ("Dispatch", "Combine")]
        return sum(r.p50 for r in kinds) if kinds else None

    def memory(self) -> dict[str, dict[str, int]]:
        """{part: {foreseen, measured}} bytes."""
        parts: dict[str, dict[str, int]] = {}
        for record in self.of("memory"):
            parts.setdefault(record.params["part"], {})[record.params["from"]] = int(record.p50)
        return parts

    def to_dict(self) -> dict[str, Any]:
        names = ("step_over_stages", "tok_s_request", "tok_s_gpu", "rows", "active")
        return {
            "batch": self.batch, **{f"{name}_us": self.p50(name) for name in ("step", "stages", "host")},
            **{name: self.p50(name) for name in names},
            "draft_us": {of: self.p50("draft", of=of) for of in ("first", "next")},
            "layer_us": {of: self.p50("layer", of=of) for of in ("moe", "dense")},
            "moe_without_exchange_us": self.without_exchange_us,
            "stage_us": {of: self.stages(of) for of in ("moe", "dense", "step")},
            "memory_bytes": self.memory(), "records": [record.to_dict() for record in self.records],
        }  # fmt: skip


def run(
    setting: Setting,
    take: Callable[[int, dict[str, Any]], object],
    see: Callable[[dict[str, Any]], object],
    finish: Callable[[int], object] = lambda batch: None,
) -> None:
    """Measure. `take` gets (rank, event) of every number as it comes, `finish` a batch of which all have come, `see`
    what else rank 0 says. Starts ranks of its own where there are several. Raises what a rank raises, LaunchError of
    ranks that were started."""
    job, finished = {"setting": asdict(setting)}, Counter()

    def sort(rank: int, event: dict[str, Any]) -> None:
        if "metric" in event:
            take(rank, event)
        elif "finished" in event:
            finished[event["finished"]] += 1
            if finished[event["finished"]] == setting.processes:
                finish(event["finished"])
        elif rank == 0:
            see(event)

    if setting.processes == 1:
        from moelab.bench.decode_rank import measure
        from moelab.launch.worker import Context

        device = "cuda:0" if setting.device == "cuda" else "cpu"
        measure(Context(0, 1, 0, device, lambda event: sort(0, event)), job)
        return
    from moelab.launch import launch

    with launch("moelab.bench.decode_rank:measure", job, setting.processes, setting.device) as ranks:
        for rank, event in ranks:
            sort(rank, event)


@dataclass(frozen=True)
class _Taken:
    """Samples of one number, the slowest rank's, and how they were taken."""

    us: list[float]
    unit: str
    clock: str
    warmup: int = 0

    @property
    def middle(self) -> float:
        return percentile(sorted(self.us), 50)


Numbers = dict[tuple[str, tuple[tuple[str, Any], ...]], _Taken]  # by metric and its own parameters


def collect(events: Events, setting: Setting, said: dict[str, Any], provenance: Provenance) -> list[Found]:
    """Records of what all ranks have measured, by batch, and of what follows from it. `said`: of rank 0, `backend` and
    `max_tokens`."""
    of_ranks: dict[tuple, list[dict[str, Any]]] = {}
    for _, event in events:
        key = (event["batch"], event["metric"], tuple(sorted(event["params"].items())))
        of_ranks.setdefault(key, []).append(event)
    batches: dict[int, Numbers] = {}
    for (batch, metric, own), mine in of_ranks.items():
        if len(mine) < setting.processes:  # the run ended before all had it
            continue
        worst = slowest([event["samples"] for event in mine])
        taken = _Taken(worst, mine[0]["unit"], mine[0]["clock"], mine[0]["warmup"])
        batches.setdefault(batch, {})[metric, own] = taken
    found = []
    for batch, numbers in sorted(batches.items()):
        params = setting.params(batch, said["max_tokens"])
        records = [
            Record.from_samples(
                taken.us, bench=BENCH, backend=said["backend"], params=params | dict(own), metric=metric,
                unit=taken.unit, clock=taken.clock, warmup=taken.warmup, provenance=provenance,
                kind="stand-in" if setting.shadow else "measured", seed=setting.seed,
            )
            for (metric, own), taken in (numbers | _derived(setting, batch, numbers)).items()
        ]  # fmt: skip
        found.append(Found(setting, batch, records))
    return found


def _derived(setting: Setting, batch: int, numbers: Numbers) -> Numbers:
    """Sums of stages, what is left between them, and tokens a second."""
    step = numbers.get(("step", ()))
    if step is None:
        return {}
    drafts = [numbers.get(("draft", (("of", of),))) for of in ("first", "next")]
    times = (1, setting.draft_tokens - 1)
    drafts_us = sum(n * draft.middle for n, draft in zip(times, drafts, strict=True) if draft is not None)
    tokens = [1e6 * setting.tokens_per_step / (us + drafts_us) for us in step.us]
    with_acceptance = (("acceptance", setting.acceptance),)
    found: Numbers = {
        ("tok_s_request", with_acceptance): _Taken(tokens, "tok/s", step.clock, step.warmup),
        ("tok_s_gpu", with_acceptance): _Taken(
            [batch / setting.tp * x for x in tokens], "tok/s", step.clock, step.warmup
        ),
    }
    whole = numbers.get(("engine_step", ()))
    if whole is not None:
        host = [max(0.0, us - step.middle - drafts_us) for us in whole.us]
        found["host", ()] = _Taken(host, "us", "wall", whole.warmup)
    config = setting.config
    count = {"moe": config.num_moe_layers, "dense": config.num_hidden_layers - config.num_moe_layers, "step": 1}
    stages = [(dict(own), taken) for (metric, own), taken in numbers.items() if metric == "stage"]
    if not stages:
        return found
    for of in ("moe", "dense"):
        for category in CATEGORIES:
            mine = [taken for own, taken in stages if (own["of"], own["category"]) == (of, category)]
            if mine:
                found["category", (("category", category), ("of", of))] = _sum(mine)
    total = _sum([taken for _, taken in stages], [count[own["of"]] for own, _ in stages])
    found["stages", ()] = total
    found["step_over_stages", ()] = _Taken([us / total.middle for us in step.us], "1", "none", step.warmup)
    return found


def _sum(parts: Sequence[_Taken], times: Sequence[int] | None = None) -> _Taken:
    """Sample by sample, each part so many times; as many samples as the part with fewest has."""
    times = times or [1] * len(parts)
    columns = zip(*(part.us for part in parts), strict=False)
    sums = [sum(n * us for n, us in zip(times, column, strict=True)) for column in columns]
    return _Taken(sums, parts[0].unit, parts[0].clock, max(part.warmup for part in parts))
