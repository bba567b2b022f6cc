"""`moelab bench alltoall`: dispatch and combine beside everybody else's, the floor and the bound, in one run.

    metric                             unit  clock
    pair_fused, pair_split             us    graph   a dispatch and a combine, as two launches or as four halves
    dispatch, combine                  us    graph   apart (alltoall_timer.py says how)
    dispatch_eager, combine_eager      us    event   one call, launched by the host, after an L2 sweep
    enqueue_fused, enqueue_split       us    wall    what the host spends on launching a pair
    sent_dispatch, sent_combine        B     none    payload that the busiest rank puts on the link
    flag, empty, event nodes, stores                 backend "floor": alltoall_floor.py

A sample is the slowest rank's. Peers' pair is `pair_fused` too, since nothing runs between. `predict` and `calibrate`
read dispatch and combine of backend "nvshmem", FP8, uniform routing, TP 1, the fastest configuration of each number of
tokens. (What the host spends between two steps, their metric "host", is another thing than `enqueue`.)

Inputs stay the same in a graph and lie in the cache as far as they fit, as the outputs of a kernel right before do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moelab.bench.alltoall_setting import Bound, Copies, Setting, bound, slowest
from moelab.bench.timer import BenchError
from moelab.comm import CommError, build
from moelab.hardware import fabric, gpu
from moelab.launch import LaunchError, launch
from moelab.results import Provenance, Record

BENCH = "alltoall"
OURS = ("nvshmem", "nvshmem-flags", "nvshmem-puts")
BACKENDS = (
    "floor", *OURS, "nccl-split", "nccl-split-packed", "nccl-padded", "nvshmem-padded", "symm_mem-vdev2d",
    "deep_ep", "pplx",
)  # fmt: skip
RETURNS = ("rows", "f32", "bf16")
LINK, MEMORY = "nvlink4", "H200"  # of the bound: line rates


@dataclass
class Results:
    """Records, and (setting or None, backend, reason) of what could not be had."""

    records: list[Record] = field(default_factory=list)
    missing: list[tuple[Setting | None, str, str]] = field(default_factory=list)


def job(
    settings: Sequence[Setting], backends: Sequence[str], returns: Sequence[str], blocks: Sequence[int],
    clocks: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """What `alltoall_worker.worker` needs. Raises BenchError for an unknown backend or return mode."""
    for given, legal, what in ((backends, BACKENDS, "backend"), (returns, RETURNS, "returns")):
        for name in given:
            if name not in legal:
                raise BenchError(f"no {what} {name!r}; there are: {', '.join(legal)}")
    if any(number < 0 for number in blocks):
        raise BenchError(f"blocks is {min(blocks)}: give 0, which lets the kernels choose, or more")
    return {
        "settings": [asdict(setting) for setting in settings], "backends": list(backends), "returns": list(returns),
        "blocks": list(blocks), "clocks": [*clocks, "wall"],
    }  # fmt: skip


def run(job: dict[str, Any]) -> Iterable[tuple[int, dict[str, Any]]] | None:
    """(rank, event) as they come: from ranks of this machine that are started here, or, under torchrun, from all ranks
    at the end; None there but on rank 0."""
    size = job["settings"][0]["dp"] * job["settings"][0]["tp"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _as_a_rank(job, size)
    _enough_gpus(size)
    with contextlib.suppress(CommError):  # the ranks say so, with what cannot run for it
        build.ensure()
    return _started(job, size)


def _started(job: dict[str, Any], size: int) -> Iterable[tuple[int, dict[str, Any]]]:
    with launch("moelab.bench.alltoall_worker:worker", job, size, "cuda") as ranks:
        yield from ranks


def _enough_gpus(size: int) -> None:
    import torch

    count = torch.cuda.device_count()
    if count < size:
        raise BenchError(
            f"dp·tp is {size}, which takes {size} GPUs with one process each; there {'is' if count == 1 else 'are'} "
            f"{count}: take fewer ranks, start it under torchrun on more nodes, or --device cpu for the method alone"
        )


def _as_a_rank(job: dict[str, Any], size: int) -> list[tuple[int, dict[str, Any]]] | None:
    import torch
    import torch.distributed as dist

    from moelab.bench.alltoall_worker import worker
    from moelab.launch.worker import Context

    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world != size:
        raise BenchError(f"torchrun started {world} ranks, dp·tp is {size}: they must be as many")
    if not torch.cuda.is_available() or local >= torch.cuda.device_count():
        raise BenchError(f"rank {rank} has no GPU of its own: start no more processes a node than it has GPUs")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    events: list[dict[str, Any]] = []
    try:
        worker(Context(rank, world, local, str(device), events.append), job)
        gathered: list[list[dict[str, Any]]] = [[] for _ in range(world)]
        dist.all_gather_object(gathered, events)
    finally:
        dist.destroy_process_group()
    return [(r, event) for r, of_rank in enumerate(gathered) for event in of_rank] if rank == 0 else None


def collect(
    events: Iterable[tuple[int, dict[str, Any]]], job: dict[str, Any], provenance: Provenance,
    keep: Callable[[Record], object],
) -> tuple[Results, LaunchError | None]:  # fmt: skip
    """Records of what all ranks have reported, each given to `keep` as soon as it is whole; also where the run ended
    early, with what ended it."""
    settings = [Setting(**given) for given in job["settings"]]
    size, results = settings[0].ep, Results()
    of_ranks: dict[tuple, list[dict[str, Any]]] = {}
    ended = None
    try:
        for rank, event in events:
            setting = None if event["setting"] is None else settings[event["setting"]]
            if "why" in event:
                if rank == 0:
                    results.missing.append((setting, event["backend"], event["why"]))
                continue
            key = (event["setting"], event["backend"], event["metric"], tuple(sorted(event["params"].items())))
            mine = of_ranks.setdefault(key, [])
            mine.append(event)
            if len(mine) == size:
                results.records.append(_record(mine, setting, provenance, size))
                keep(results.records[-1])
    except LaunchError as error:
        ended = error
    return results, ended


def _record(of_ranks: list[dict[str, Any]], setting: Setting | None, provenance: Provenance, size: int) -> Record:
    event = of_ranks[0]
    samples = [e["samples"] for e in of_ranks]
    # A rate is slowest where it is lowest.
    worst = [-x for x in slowest([[-x for x in s] for s in samples])] if event["unit"] == "GB/s" else slowest(samples)
    return Record.from_samples(
        worst, bench=BENCH, backend=event["backend"], metric=event["metric"], unit=event["unit"],
        clock="none" if event["unit"] == "B" else event["clock"], warmup=event["warmup"], provenance=provenance,
        params=({"ep": size} if setting is None else setting.params()) | event["params"],
        seed=None if setting is None else setting.seed,
    )  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One configuration of one backend in one setting, and what it is held against."""

    setting: Setting
    backend: str
    params: Mapping[str, Any]  # beyond the setting's
    records: Mapping[str, Record]
    bound: Bound

    def p50(self, metric: str) -> float | None:
        return self.records[metric].p50 if metric in self.records else None

    @property
    def pair(self) -> float | None:
        """us; without a graph, of the two eager calls."""
        eager = self.p50("dispatch_eager"), self.p50("combine_eager")
        return self.p50("pair_fused") or (sum(eager) if None not in eager else None)

    @property
    def over_bound(self) -> float | None:
        return None if self.pair is None else self.pair / self.bound.pair

    @property
    def link_share(self) -> float | None:
        """Of the line rate of one direction: the payload of a pair over its time."""
        if self.pair is None or self.p50("sent_dispatch") is None:
            return None
        sent = self.p50("sent_dispatch") + self.p50("sent_combine")
        return sent / self.pair / 1e3 / fabric(LINK).gb_s

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.setting.params(), **self.params, "backend": self.backend,
            "metrics": {name: record.to_dict() for name, record in sorted(self.records.items())},
            "bound_us": {"dispatch": self.bound.dispatch, "combine": self.bound.combine, "pair": self.bound.pair},
            "pair_over_bound": self.over_bound, "link_share": self.link_share,
        }  # fmt: skip


def lines(results: Results, settings: Sequence[Setting]) -> list[Line]:
    """In the order of settings, then of backends. Where the floor could not be measured, t0 is 0."""
    flag = [r.p50 for r in results.records if (r.backend, r.metric) == ("floor", "flag")]
    t0, found = flag[0] if flag else 0.0, []
    for setting in settings:
        params = setting.params()
        least = bound(Copies.of(setting), t0, fabric(LINK).gb_s, gpu(MEMORY).hbm_gb_s)
        groups: dict[tuple, dict[str, Record]] = {}
        for record in results.records:
            if record.backend != "floor" and params.items() <= record.params.items():
                own = tuple(item for item in record.params.items() if item[0] not in params)
                groups.setdefault((record.backend, own), {})[record.metric] = record
        found += [Line(setting, backend, dict(own), group, least) for (backend, own), group in groups.items()]
    return found
