"""What each rank of `moelab bench alltoall` does on GPUs: per setting and backend make it, check it, time it, check it
again. What it emits becomes Records in alltoall.py.

A backend that cannot run says why and the others go on, on all ranks alike. One that gave a wrong result, before or
after its times were taken, has no times.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from moelab.bench import alltoall_timer as timer
from moelab.bench.alltoall import OURS
from moelab.bench.alltoall_case import Case, WrongResult
from moelab.bench.alltoall_setting import Copies, Setting
from moelab.bench.timer import Samples

DEPTH_BYTES = 24 << 30  # of the rows of exchanges in flight at once
MOST_DEPTH = 8


def worker(context, job: dict[str, Any]) -> None:
    """For `moelab.launch` on GPUs; see `alltoall.job`."""
    ranks, device = timer.Ranks(), torch.device(context.device)
    _floor(context, ranks, device)
    for number, given in enumerate(job["settings"]):
        setting = Setting(**given)
        case = Case(setting, context.rank, device)
        copies = Copies.of(setting)
        for name, make in _makers(job, case):
            emit = partial(_emit, context, number, name)
            try:
                _backend(make, copies, job, ranks, device, emit)
            except timer.Failed as failure:
                context.emit({"setting": number, "backend": name, "why": str(failure)})
            gc.collect()
            torch.cuda.empty_cache()
        del case


def _floor(context, ranks: timer.Ranks, device: torch.device) -> None:
    from moelab.bench import alltoall_floor as floor

    try:
        for reading in floor.measure(context.rank, context.world_size, device, ranks):
            _emit(context, None, floor.BACKEND, reading.params, reading.metric, "graph", reading.samples, reading.unit)
    except Exception as failure:  # raised on all ranks
        context.emit({"setting": None, "backend": floor.BACKEND, "why": str(failure)})


def _makers(job: dict[str, Any], case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, how to make it) of every backend and configuration that is asked for, ours first: NVSHMEM is then started
    with our settings, and torch's use of it joins in."""
    for name in OURS:
        if name in job["backends"]:
            for returns in job["returns"]:
                for blocks in job["blocks"]:
                    yield name, partial(_ours, name, case, returns, blocks)
    for name in job["backends"]:
        if name != "floor" and name not in OURS:
            yield name, partial(_peer, name, case)


def _ours(name: str, case: Case, returns: str, blocks: int) -> Any:
    from moelab.bench.alltoall_ours import Ours

    experts, room, hidden = case.padded_shape
    depth = max(1, min(MOST_DEPTH, DEPTH_BYTES // (experts * room * hidden)))
    return Ours(name, case, returns, blocks, depth)


def _peer(name: str, case: Case) -> Any:
    from moelab.bench import alltoall_dense as dense
    from moelab.bench import alltoall_foreign as foreign

    classes = (
        dense.NcclSplit, dense.NcclSplitPacked, dense.NcclPadded, dense.NvshmemPadded, dense.SymmMem, foreign.DeepEP,
        foreign.Pplx,
    )  # fmt: skip
    return {kind.name: kind for kind in classes}[name](case)


def _backend(
    make: Callable[[], Any], copies: Copies, job: dict[str, Any], ranks: timer.Ranks, device: torch.device, emit
) -> None:
    """Raises timer.Failed, on all ranks."""
    it = ranks.attempt(make)
    try:
        found, whys = _measured(it, job, ranks, device)
        sent = it.sent_bytes(copies)
    finally:
        it.close()
    for metric, clock, samples in found:
        emit(it.params, metric, clock, samples)
    for metric, value in zip(("sent_dispatch", "sent_combine"), sent, strict=True):
        emit(it.params, metric, "none", Samples([value], 0), "B")
    if whys:
        raise timer.Failed("; ".join(whys))


def _measured(
    it: Any, job: dict[str, Any], ranks: timer.Ranks, device: torch.device
) -> tuple[list[tuple[str, str, Samples]], list[str]]:
    """What was timed, and why some of it was not: a clock that a backend does not bear spoils no other."""
    split = getattr(it, "pair_split", None)
    forms = {"pair_fused": it.pair} | ({"pair_split": split} if split else {})
    once = {}
    for metric, pair in forms.items():
        ranks.attempt(pair)
        once[metric] = _watched(it, ranks, partial(timer.once_us, pair, ranks))

    def graph() -> Iterator[tuple[str, Samples]]:
        for metric, pair in forms.items():
            yield metric, _watched(it, ranks, partial(timer.pair_samples, pair, once[metric], ranks))
        halves = partial(timer.half_samples, it.dispatch, it.combine, it.depth, once["pair_fused"], ranks)
        yield from zip(("dispatch", "combine"), _watched(it, ranks, halves), strict=True)

    def event() -> Iterator[tuple[str, Samples]]:
        halves = partial(timer.eager_samples, it.dispatch, it.combine, device, ranks)
        yield from zip(("dispatch_eager", "combine_eager"), _watched(it, ranks, halves), strict=True)

    def wall() -> Iterator[tuple[str, Samples]]:
        for metric, pair in forms.items():
            yield metric.replace("pair", "enqueue"), _watched(it, ranks, partial(timer.enqueue_samples, pair, ranks))

    found, whys = [], []
    for clock, measure in (("graph", graph), ("event", event), ("wall", wall)):
        if clock not in job["clocks"]:
            continue
        try:
            for metric, samples in measure():
                found.append((metric, clock, samples))
        except timer.Failed as failure:
            if WrongResult.__name__ in str(failure):
                raise
            whys.append(f"{clock}: {failure}")
    return found, whys


def _watched(it: Any, ranks: timer.Ranks, measure: Callable[[], Any]) -> Any:
    """`measure()` on outputs that held nothing right before; what it left there must be right."""
    ranks.attempt(it.poison)
    ranks.align()  # some exchanges write into a peer's outputs
    result = measure()
    ranks.attempt(it.check)
    return result


def _emit(
    context, number: int | None, backend: str, params: dict[str, Any], metric: str, clock: str, samples: Samples,
    unit: str = "us",
) -> None:  # fmt: skip
    context.emit({
        "setting": number, "backend": backend, "params": params, "metric": metric, "unit": unit, "clock": clock,
        "warmup": samples.warmup, "samples": samples.us,
    })  # fmt: skip
