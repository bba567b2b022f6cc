"""`moelab bench ops --op OP --write-table`: time every candidate at every point, keep the fastest of each backend.

The result is the table that `moelab.ops.choice` reads. The benchmark proper judges it in another run, so that a choice
is not judged by the samples that made it.

A candidate compiles for seconds, and many points share its kernel. So kernels are compiled first, each once, by
processes side by side that fill the compilers' caches on disk; timing follows, one after another.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from moelab.bench.grouped import contiguous_points, padded_points
from moelab.bench.linear import linear_points
from moelab.bench.point import Candidate, Point
from moelab.bench.timer import BenchError, graph_samples, num_sets, require_gpu
from moelab.ops import choice
from moelab.ops.choice import Choice, Row
from moelab.results import Provenance, collect

TABLES: Mapping[str, Callable[[], list[Point]]] = {
    "linear": linear_points,
    "grouped_gemm_padded": padded_points,
    "grouped_gemm_contiguous": contiguous_points,
}
MAX_PROCESSES = 16

Job = tuple[int, int]  # a point's candidate, by their places


def write_table(op: str, records: Path, say: Callable[[str], None]) -> Path:
    """Measure the table of `op` and write it into the folder `records`; returns its path. `say` is told of progress and
    of candidates that fail, which are left out. Raises BenchError without a GPU, for an op without a table, and for a
    point where no candidate works."""
    if op not in TABLES:
        raise BenchError(f"op {op!r} has no table; there are: {', '.join(TABLES)}")
    device = require_gpu("--write-table")
    provenance = collect("cuda", gpu_count=1)
    points = TABLES[op]()
    for failure in compile_all(op, points):
        say(failure)
    rows = []
    for point in points:
        rows += measure(point, device, say)
        say(
            f"{op} {point}: "
            + ", ".join(f"{r.choice.backend} {r.choice.config} {r.choice.us:.1f} us" for r in rows[-2:])
        )
    path = choice.table_path(records, op, provenance.gpu)
    choice.write(path, rows, origin(provenance))
    choice.tables.cache_clear()
    return path


def measure(point: Point, device: torch.device, say: Callable[[str], None]) -> list[Row]:
    """The fastest candidate of each backend, by the median, fastest first."""
    sets = [point.make(device) for _ in range(num_sets(point.bytes, device))]
    best: dict[str, Choice] = {}
    for candidate in point.candidates:
        try:
            samples = graph_samples([lambda inputs=inputs, c=candidate: c.run(inputs) for inputs in sets])
        except Exception as error:  # a config beyond the GPU's shared memory, say; the others go on
            say(_failure(point, candidate, error))
            continue
        us = statistics.median(samples.us)
        if candidate.backend not in best or us < best[candidate.backend].us:
            best[candidate.backend] = Choice(candidate.backend, candidate.config, us)
    if not best:
        raise BenchError(f"no candidate works at {point}")
    found = sorted(best.values(), key=lambda one: one.us)
    return [Row(point.groups, point.n, point.k, point.m, one) for one in found]


def compile_all(op: str, points: Sequence[Point]) -> list[str]:
    """Run each kernel once in some process, at its smallest point; returns what failed."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(min(MAX_PROCESSES, os.cpu_count() or 1), mp_context=context) as pool:
        return [said for said in pool.map(_compile, [(op, job) for job in jobs(points)]) if said]


def jobs(points: Sequence[Point]) -> list[Job]:
    """One for each kernel, at the point that moves least, from small m to large: neighbours in the list are then of
    different shapes, so that no two processes compile the same tile of DeepGEMM, which it picks by m."""
    least: dict[str, Job] = {}
    for i, point in enumerate(points):
        for j, candidate in enumerate(point.candidates):
            if candidate.kernel not in least or point.bytes < points[least[candidate.kernel][0]].bytes:
                least[candidate.kernel] = (i, j)
    return sorted(least.values(), key=lambda job: points[job[0]].m)


def _compile(work: tuple[str, Job]) -> str | None:
    op, (i, j) = work
    point = TABLES[op]()[i]
    try:
        point.candidates[j].run(point.make(torch.device("cuda")))
        torch.cuda.synchronize()
    except Exception as error:  # it fails again, and is named again, where it is timed
        return _failure(point, point.candidates[j], error)
    return None


def _failure(point: Point, candidate: Candidate, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"{candidate.backend} {candidate.config} at {point}: {type(error).__name__}: {reason}"


def origin(provenance: Provenance) -> str:
    """The line that says where a table comes from."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(provenance.versions.items()))
    state = provenance.commit + (" with changes" if provenance.dirty else "")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
    return f"{provenance.gpu}, driver {provenance.driver}; {versions}; commit {state}; {now} UTC"
