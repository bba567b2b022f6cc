"""The three schedules on real ranks: decode steps of a small model through the engine, and when each stage ran.

`worker` runs on every rank of a launch: one engine for each schedule over the same weights and the same prompts, whose
steps take turns, so that a disturbance of the machine meets all three alike. Steps are timed on the host's clock; a
step's exchange makes its ranks end together, so a sample is the slowest rank's time. `records` makes Records of them,
`timeline` is the step of median length.

On CPUs these times show that the engine keeps the order that it is given. They say nothing about GPUs: gloo's messages
pass through sockets of one machine, its threads share the cores with the kernels, and a kernel this small costs little
beside the Python around it, of which two halves have twice as much.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import median_low
from typing import Any

from moelab.bench.alltoall_setting import slowest
from moelab.config import ParallelConfig
from moelab.perf.timeline import Span
from moelab.results import Provenance, Record
from moelab.stages import SCHEDULES

BENCH = "schedules"
Events = Sequence[tuple[int, dict[str, Any]]]


def job(
    model: Path, parallel: ParallelConfig, prompts: list[list[list[int]]], steps: int, warmup: int = 3
) -> dict[str, Any]:
    """What `worker` needs. `prompts` [dp][requests] of token ids; `steps` decode steps of each schedule are timed."""
    return {"model": str(Path(model).resolve()), "dp": parallel.dp, "tp": parallel.tp, "prompts": prompts,
            "steps": steps, "warmup": warmup}  # fmt: skip


def worker(context, job: dict[str, Any]) -> None:
    """For `moelab.launch`. Emits {overlap, step_us, spans} for each schedule: the timed steps' times, and the spans of
    each of them as [micro-batch, layer, stage, start, end]."""
    import torch

    from moelab.engine.engine import Engine
    from moelab.engine.sequence import Sampling
    from moelab.engine.timeline import Timeline
    from moelab.model.deepseek import DeepSeek

    parallel = ParallelConfig(job["dp"], job["tp"], gpus_per_node=context.world_size)
    groups, steps = job["prompts"], job["warmup"] + job["steps"]
    most = 4 * max(map(len, groups))  # tokens of a step: the experts' padded buffers grow with it
    # Those that decode already take a place each; the same number on every rank, which all step together.
    filling = max(ceil(sum(map(len, prompts)) / (most - len(prompts))) for prompts in groups)
    model = DeepSeek.load(job["model"], parallel, most, rank=context.rank, device=context.device)
    length = filling + steps + 1
    room = max(sum(len(ids) + length + 64 for ids in prompts) for prompts in groups)
    engines = {overlap: Engine(model, room, overlap) for overlap in SCHEDULES}
    taken: dict[str, list[tuple[float, list[Span]]]] = {overlap: [] for overlap in engines}
    with torch.no_grad():
        for engine in engines.values():
            for number, ids in enumerate(groups[parallel.dp_group(context.rank)]):
                engine.add(number, ids, Sampling(length))
            for _ in range(filling):
                engine.step()
            engine.timeline = Timeline(context.device)
        for _ in range(steps):
            for overlap, engine in engines.items():
                start = time.perf_counter()
                engine.step()
                taken[overlap].append(((time.perf_counter() - start) * 1e6, engine.timeline.spans()))
    for overlap, steps_taken in taken.items():
        timed = steps_taken[job["warmup"] :]
        context.emit({"overlap": overlap, "step_us": [us for us, _ in timed], "spans": [spans for _, spans in timed]})
    model.close()


def records(events: Events, job: dict[str, Any], provenance: Provenance, backend: str) -> list[Record]:
    """One Record of a step for each schedule, the slowest rank's times; `backend` says what exchanged."""
    params = {
        "model": Path(job["model"]).name, "dp": job["dp"], "tp": job["tp"], "ep": job["dp"] * job["tp"],
        "batch": max(map(len, job["prompts"])), "prompt": max(len(ids) for group in job["prompts"] for ids in group),
    }  # fmt: skip
    return [
        Record.from_samples(
            slowest([event["step_us"] for _, event in events if event["overlap"] == overlap]),
            bench=BENCH, backend=backend, params=params | {"overlap": overlap}, metric="step", unit="us", clock="wall",
            warmup=job["warmup"], provenance=provenance, seed=0,
        )
        for overlap in SCHEDULES
    ]  # fmt: skip


def timeline(events: Events, overlap: str, rank: int = 0) -> list[Span]:
    """Of `rank`'s timed step of (lower) median length, its MoE layers only, from the first one's beginning."""
    (mine,) = [event for at, event in events if at == rank and event["overlap"] == overlap]
    typical = mine["step_us"].index(median_low(mine["step_us"]))
    spans = [Span(*span) for span in mine["spans"][typical] if span[1] >= 0]
    start = spans[0].start_us
    return [s._replace(start_us=s.start_us - start, end_us=s.end_us - start) for s in spans]
