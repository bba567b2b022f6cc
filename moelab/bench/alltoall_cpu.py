"""Dispatch and combine between processes on CPUs, against dense all-to-all: the method, small.

`worker` runs on every rank of a launch and times, for each backend, dispatch (send and receive) and combine (send and
receive) of the same routing. Ranks start together, behind a barrier that is not timed; a sample is the slowest rank's
time, since a layer goes on when the last rank has its tokens. `records` makes Records of what the ranks report. What
arrives is checked before the timing and after it, as on GPUs (alltoall_case.py). `moelab bench alltoall --device cpu`
runs this; alltoall.py is the same for GPUs.

These times show how an exchange is measured. They say nothing about GPUs: gloo copies through sockets of one
machine, and its processes share the cores.
"""

from __future__ import annotations

import time
from typing import Any

from moelab.bench.alltoall_setting import Setting, slowest
from moelab.config import ParallelConfig
from moelab.results import Provenance, Record

BENCH = "alltoall"
BACKENDS = ("torch-gloo", "dense-padded", "dense-split")
HALVES = ("dispatch", "combine")


def job(
    parallel: ParallelConfig,
    num_experts: int,
    hidden: int,
    ids: list[list[list[int]]],
    tokens: list[int],
    repeats: int = 20,
    warmup: int = 3,
    payload: str = "bf16",
) -> dict[str, Any]:
    """What `worker` needs. `ids` [dp][tokens][k]: the routing of each DP group; each entry of `tokens` is run with
    that many first tokens of every group."""
    return {
        "dp": parallel.dp, "tp": parallel.tp, "num_experts": num_experts, "top_k": len(ids[0][0]), "hidden": hidden,
        "ids": ids, "tokens": tokens, "repeats": repeats, "warmup": warmup, "payload": payload,
    }  # fmt: skip


def worker(context, job: dict[str, Any]) -> None:
    """For `moelab.launch`. Emits {backend, tokens, half, samples_us, bytes} per backend, number of tokens and half;
    bytes are what this rank sends to others in one exchange, both halves."""
    parallel = ParallelConfig(job["dp"], job["tp"], gpus_per_node=context.world_size)
    for tokens in job["tokens"]:
        for backend in BACKENDS:
            samples, sent = _time(context, job, parallel, tokens, backend)
            for half in HALVES:
                context.emit(
                    {"backend": backend, "tokens": tokens, "half": half, "samples_us": samples[half], "bytes": sent}
                )


def _time(context, job, parallel: ParallelConfig, tokens: int, backend: str) -> tuple[dict[str, list[float]], int]:
    import numpy as np
    import torch
    import torch.distributed as dist

    from moelab.bench.alltoall_case import Case, summed
    from moelab.comm import AllToAll
    from moelab.comm.dense import Dense

    setting = Setting(
        parallel.dp, parallel.tp, tokens, job["hidden"], job["num_experts"], job["top_k"], job["payload"], "given"
    )
    given = [np.array(ids[:tokens], np.int32) for ids in job["ids"]]
    case = Case(setting, context.rank, torch.device("cpu"), given)
    y, out = case.padded_outputs(), torch.empty(tokens, job["hidden"])
    group = None if backend == "torch-gloo" else Dense(padded=backend == "dense-padded")
    samples: dict[str, list[float]] = {half: [] for half in HALVES}
    with AllToAll(
        parallel, job["num_experts"], job["top_k"], job["hidden"], tokens, job["payload"], slots=1, group=group
    ) as exchange:
        last = job["warmup"] + job["repeats"] - 1
        for repeat in range(last + 1):
            checked = repeat in (0, last)
            out.fill_(torch.nan)
            dist.barrier()
            start = time.perf_counter()
            handle = exchange.dispatch_send(case.x, case.ids, case.weights, case.scales)
            received = exchange.dispatch_recv(handle)
            samples["dispatch"].append((time.perf_counter() - start) * 1e6)
            if checked:
                case.check_rows(*received)
            dist.barrier()
            start = time.perf_counter()
            exchange.combine_send(handle, y)
            exchange.combine_recv(handle, out)
            samples["combine"].append((time.perf_counter() - start) * 1e6)
            if checked:
                case.check_out(out, summed(job["top_k"]))
        sent = exchange.sent_bytes // (job["warmup"] + job["repeats"])
    return {half: values[job["warmup"] :] for half, values in samples.items()}, sent


def records(
    events: list[tuple[int, dict[str, Any]]], job: dict[str, Any], provenance: Provenance, routing: str
) -> list[Record]:
    """Records of the ranks' `events` as (rank, event): `dispatch` and `combine` in us, the slowest rank of each
    repetition, and `sent`, bytes of one exchange over all ranks. `routing` says whose routing it was."""
    found = []
    for tokens in job["tokens"]:
        for backend in BACKENDS:
            mine = [event for _, event in events if (event["backend"], event["tokens"]) == (backend, tokens)]
            common = {
                "bench": BENCH, "backend": backend, "provenance": provenance, "seed": 0,
                "params": {
                    "dp": job["dp"], "tp": job["tp"], "tokens": tokens, "hidden": job["hidden"],
                    "experts": job["num_experts"], "top_k": job["top_k"], "payload": job["payload"], "routing": routing,
                    "ep": job["dp"] * job["tp"],
                },
            }  # fmt: skip
            for half in HALVES:
                times = slowest([event["samples_us"] for event in mine if event["half"] == half])
                found.append(
                    Record.from_samples(times, metric=half, unit="us", clock="wall", warmup=job["warmup"], **common)
                )
            sent = sum(event["bytes"] for event in mine if event["half"] == HALVES[0])
            found.append(Record.from_samples([sent], metric="sent", unit="B", clock="none", **common))
    return found
