"""`moelab bench groups`: DP groups with different batches, each in its own size or all padded to the largest.

Two ways to run the same requests, in steps that are otherwise the same (`moelab.engine.graphs`):

    own      each group runs the size of its own batch, and asks nobody
    padded   all groups first agree on the largest batch, by an all-reduce of one integer, and run that size. Padding
             is routed nowhere, and has nothing cached to attend to

`padded` is what an exchange of equal shapes forces on an engine, torch's all_to_all_single for one. Here it runs over
the same exchange as `own`, so what differs is the agreement and the padding, and nothing else.

What to expect: a group's experts wait for the rows of every group, so whatever the sizes, no rank ends a step before
the group with most to do has sent its last rows. A small group that pads works while it would wait otherwise. Padding
then costs work, but time only where ranks share something (cores, power, a link); the agreement comes on top of every
step.

    metric       unit   params beside the setting's: batches, way, agree (none, host, device)
    step         us     from the batch being known to the device being done; the slowest rank's, of each repetition
    agree        us     the all-reduce, waiting for the last group included. host: over gloo. device: over NCCL, and
                        the number read back; the size of a graph to replay must be known on the host
    fill         us     laying out and planning attention
    run          us     the step itself
    tokens       1      rows of all groups that linear layers and attention compute in a step; exact
    rows         1      rows that all experts of all layers receive in a step; exact
    launches     1      of a step on a rank, the most; what is counted: `moelab.bench.launches`

On the CPU the model computes in float32, eagerly, by the host's clock. There the stages of some steps are timed as
well, and told as `Lane`s: all ranks read the same clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

from moelab.bench.alltoall_setting import slowest
from moelab.bench.decode_setting import Setting
from moelab.bench.timer import BenchError
from moelab.results import Provenance, Record, Store

BENCH = "groups"
WAYS = {"own": ("none",), "padded": ("host", "device")}
OWN = ("batches", "max_tokens", "way", "agree")  # in which records of one setting may differ
NUMBERS = {"tokens": sum, "rows": sum, "launches": max}  # of all ranks
Events = Iterable[tuple[int, dict[str, Any]]]
Cases = dict[tuple[str, str, str], dict[str, Record]]  # (batches, way, agree) -> metric -> Record


class Block(NamedTuple):
    """Something a rank does: "agree", "fill", a stage's name, or "head"."""

    what: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Lane:
    """One step of a group's first rank, us since the first group began. `places` it computed, `requests` it had."""

    group: int
    requests: int
    places: int
    blocks: list[Block]

    @property
    def end_us(self) -> float:
        return self.blocks[-1].end_us

    def spent(self, named: Callable[[str], bool]) -> float:
        """us in blocks of these names."""
        return sum(block.end_us - block.start_us for block in self.blocks if named(block.what))


def batches(text: str) -> tuple[int, ...]:
    """1,64 -> (1, 64). Raises BenchError for what is no such list of two groups or more, one of them with requests."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < 2 or not all(part.isdecimal() for part in parts) or not any(map(int, parts)):
        raise BenchError(
            f"batch-by-group is {text!r}: give the requests of each DP group, as 1,64 for two; 0 is an idle one"
        )
    return tuple(map(int, parts))


def cases(given: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Of several texts, all with as many groups. Raises BenchError otherwise."""
    found = tuple(dict.fromkeys(map(batches, given)))
    if len({len(case) for case in found}) != 1:
        raise BenchError(f"batch-by-group is {' and '.join(given)}: give as many groups each time, they are the ranks")
    return found


def setting(
    given: Sequence[tuple[int, ...]], *, model: str = "tinyseek", tp: int = 1, draft_tokens: int = 0,
    kv_len: int = 256, kv_dtype: str = "bf16", overlap: str = "none", layers: int | None = None, device: str = "cpu",
    graph: bool = False,
) -> Setting:  # fmt: skip
    """Of a run over these cases: `batches` are all sizes that occur. Raises as `Setting` does."""
    return Setting(
        model=model, dp=len(given[0]), tp=tp, batches=tuple({n for case in given for n in case if n}),
        draft_tokens=draft_tokens, acceptance=0.0, kv_len=kv_len, kv_dtype=kv_dtype, overlap=overlap, shadow=False,
        layers=layers, routing=None, fabric=None, device=device, graph=graph,
    )  # fmt: skip


def run(setting: Setting, given: Sequence[tuple[int, ...]], events: list[tuple[int, dict[str, Any]]]) -> None:
    """Measure on ranks of its own; appends (rank, event) to `events` as they come. Raises LaunchError."""
    from moelab.launch import launch

    job = {"setting": asdict(setting), "cases": [list(case) for case in given]}
    with launch("moelab.bench.groups_rank:measure", job, setting.processes, setting.device) as ranks:
        events.extend(ranks)


def records(events: Events, setting: Setting, provenance: Provenance) -> list[Record]:
    """Of what all ranks have measured, in the order of the cases."""
    said: dict[str, Any] = {}
    of_ranks: dict[tuple, list[dict[str, Any]]] = {}
    for _, event in events:
        if "backend" in event:
            said = event
        elif "metric" in event:
            key = (tuple(event["batches"]), event["way"], event["agree"], event["metric"])
            of_ranks.setdefault(key, []).append(event)
    made = []
    for (batches, way, agree, metric), mine in of_ranks.items():
        if len(mine) < setting.processes:  # the run ended before all had it
            continue
        samples = [event["samples"] for event in mine]
        if metric in NUMBERS:
            samples = [NUMBERS[metric](column) for column in zip(*samples, strict=True)]
        else:
            samples = slowest(samples)
        made.append(
            Record.from_samples(
                samples, bench=BENCH, backend=said["backend"], metric=metric, unit=mine[0]["unit"],
                params=params(setting, batches, way, agree, said["max_tokens"]), clock=mine[0]["clock"],
                warmup=mine[0]["warmup"], provenance=provenance, kind="measured", seed=setting.seed,
            )
        )  # fmt: skip
    return made


def params(setting: Setting, batches: Sequence[int], way: str, agree: str, max_tokens: int) -> dict[str, Any]:
    """As they stand in a Record."""
    common = setting.params(max(batches), max_tokens)
    for of_shadow_ranks in ("batch", "shadow", "routing", "fabric"):
        del common[of_shadow_ranks]
    arithmetic = {"arithmetic": "block-fp8" if setting.device == "cuda" else "float32"}
    if setting.device == "cpu":
        arithmetic["kv_dtype"] = "f32"
    return common | arithmetic | {"batches": ",".join(map(str, batches)), "way": way, "agree": agree}


def lanes(events: Events, batches: Sequence[int], way: str) -> list[Lane]:
    """One step of each group in this case, of several the shortest, which other programs disturbed least; [] where none
    was timed by stages."""
    repeats: dict[int, list[dict[str, Any]]] = {}
    for _, event in events:
        if "lane" in event and (event["batches"], event["way"]) == (list(batches), way):
            repeats.setdefault(event["repeat"], []).append(event)
    steps = []
    for step in repeats.values():
        begin = min(event["lane"][0][1] for event in step)
        steps.append([
            Lane(event["group"], event["requests"], event["places"],
                 [Block(what, start - begin, end - begin) for what, start, end in event["lane"]])
            for event in sorted(step, key=lambda event: event["group"])
        ])  # fmt: skip
    return min(steps, key=lambda step: max(lane.end_us for lane in step), default=[])


def by_case(records: Iterable[Record]) -> Cases:
    """{(batches, way, agree): {metric: Record}}."""
    cases: Cases = {}
    for record in records:
        key = tuple(record.params[name] for name in ("batches", "way", "agree"))
        cases.setdefault(key, {})[record.metric] = record
    return cases


def recorded(store: Store, gpu: str, gpu_count: int) -> Cases:
    """`by_case`, in order, of what was recorded on these GPUs with graphs in one setting: that of the most layers, then
    of the most records."""
    settings: dict[tuple, list[Record]] = {}
    for record in store.records(BENCH, gpu=gpu, gpu_count=gpu_count):
        if record.params["mode"] == "graph":
            common = tuple(sorted((k, v) for k, v in record.params.items() if k not in OWN))
            settings.setdefault((record.params["layers"], record.backend, common), []).append(record)
    best = max(settings, key=lambda key: (key[0], len(settings[key])), default=None)

    def place(key: tuple[str, str, str]) -> tuple:
        case, way, agree = key
        return batches(case), list(WAYS).index(way), WAYS[way].index(agree)

    found = by_case(settings[best]) if best else {}
    return {key: found[key] for key in sorted(found, key=place)}


def lessons(cases: Cases) -> list[str]:
    """What records say, in sentences with their numbers: of the case with the most padding, and of those with none."""
    if not cases:
        return []
    most = max((key for key in cases if key[1] == "padded"), key=lambda key: _padding(cases, key))
    own, said = cases[most[0], "own", "none"], []
    for key in (key for key in cases if key[:2] == most[:2]):
        padded = cases[key]
        by = f", agreed by the {key[2]}" if len({k[2] for k in cases if k[1] == "padded"}) > 1 else ""
        said.append(
            f"{names(most[0])} requests: padded{by}, the groups compute {padded['tokens'].p50:.0f} rows a step instead "
            f"of {own['tokens'].p50:.0f}, and the experts receive {padded['rows'].p50:,.0f} either way. A step takes "
            f"**{padded['step'].p50 / own['step'].p50:.2f}×** as long ({padded['step'].p50 / 1e3:.3g} for "
            f"{own['step'].p50 / 1e3:.3g} ms), the agreement in it {padded['agree'].p50 / 1e3:.2g} ms."
        )
    for key in cases:
        if key[1] == "padded" and not _padding(cases, key):
            ratio = cases[key]["step"].p50 / cases[key[0], "own", "none"]["step"].p50
            said.append(
                f"{names(key[0])} requests: nothing is padded, and with the agreement a step takes {ratio:.2f}× as "
                "long. Differences of that size are the agreement and chance."
            )
    return said


def _padding(cases: Cases, key: tuple[str, str, str]) -> float:
    return cases[key]["tokens"].p50 / cases[key[0], "own", "none"]["tokens"].p50 - 1


def names(batches: str) -> str:
    """As they are read: 1,16 -> 1 and 16; 1,1,1,64 -> 3 × 1 and 64."""
    runs = [(len(list(same)), number) for number, same in groupby(batches.split(","))]
    parts = [part for count, number in runs for part in ([number] * count if count < 3 else [f"{count} × {number}"])]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
