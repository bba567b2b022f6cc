"""`calibrate`: laws of the exchange and the overhead of the host, fitted to Records, with residuals.

    Records                                                                gives
    bench "alltoall", metrics dispatch and combine, at least 3 numbers     α and β of that library on that GPU and EP
      of tokens at one EP, of the model's own hidden size and experts
      (FP8, uniform routing, TP 1; of several configurations the fastest)
    metric "host" in us: from the end of one step's kernels to the         the host's share of a step
      start of the next one's

`predict` makes the same fits whenever such Records are there, the user's own (--records DIR, ./records) before the
package's; this shows them, so that a bad point is seen. Published tables are fitted beside them, by the same code:
the laws that count where nothing was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moelab.config import ParallelConfig, preset
from moelab.hardware import gpu as find_gpu
from moelab.perf import laws
from moelab.perf.fabric import Exchange, describes, road_share
from moelab.perf.tables import Tables

ENOUGH = 3  # points of a law, so that a residual is left


@dataclass(frozen=True)
class Fit:
    """us = alpha_us + bytes on the road / beta_gb_s; `road_share` is φ. Residuals: law minus point."""

    library: str
    gpu: str
    ep: str
    stage: str
    alpha_us: float
    beta_gb_s: float
    road_share: str
    points: int
    tokens: tuple[int, int]
    worst_residual_us: float
    worst_residual: float  # relative
    origin: str


@dataclass(frozen=True)
class Overhead:
    name: str
    gpu: str
    us: float
    low: float
    high: float
    points: int
    origin: str


def recorded_fits(tables: Tables) -> list[Fit]:
    """One per library, GPU, EP and stage that has ENOUGH points."""
    model = preset("deepseek-v3")
    sets: dict[tuple, dict[int, float]] = {}
    origins: dict[tuple, str] = {}
    for stage in laws.STAGES:
        for (metric, gpu), points in tables.recorded.items():
            if metric != stage:
                continue
            for params, us, origin in points:
                if not describes(params, model):
                    continue
                key = (params["backend"], gpu, int(params.get("ep", params["gpus"])), stage)
                times = sets.setdefault(key, {})
                tokens = int(params["tokens"])
                times[tokens] = min(us, times.get(tokens, us))
                origins[key] = "measured" if origin == "measured" else origins.get(key, origin)
    found = []
    for (library, gpu, ep, stage), times in sorted(sets.items()):
        if len(times) >= ENOUGH:
            exchange = Exchange(find_gpu(gpu), model, ParallelConfig(ep), "deepep", "ib400", tables)
            kind = road_share(library, exchange.one_node)
            phi = laws.share(kind, ep, 8, model)
            found.append(_fit(library, gpu, str(ep), stage, kind, {(ep, t): us for t, us in times.items()},
                              {ep: phi}, origins[library, gpu, ep, stage]))  # fmt: skip
    return found


def published_fits() -> list[Fit]:
    """DeepEP's low-latency kernels as aiconfigurator tables them: EP16, EP32, EP64 and all three together between
    nodes, T 32 to 256; EP8 over NVLink, T 64 and more."""
    name = "DeepEP low-latency (aiconfigurator table)"
    found = []
    for stage in laws.STAGES:
        points = [(ep, t, us) for ep, t, us in laws.published_points(name, "", stage) if ep > 8 and 32 <= t <= 256]
        for eps in ((16,), (32,), (64,), (16, 32, 64)):
            chosen = {(ep, t): us for ep, t, us in points if ep in eps}
            label = "16-64" if len(eps) > 1 else str(eps[0])
            phi = {ep: 1 - 8 / ep for ep in eps}
            found.append(_fit(name, "H100/H200", label, stage, "off-node", chosen, phi, "published"))
        for gpu in ("H100", "H200"):
            newer = "DeepEP low-latency (aiconfigurator table, 2026-07)"
            chosen = {(ep, t): us for ep, t, us in laws.published_points(newer, "NVLink", stage, gpu) if t >= 64}
            found.append(_fit(newer, gpu, "8", stage, "off-gpu", chosen, {8: 7 / 8}, "published"))
    return found


def overheads(tables: Tables) -> list[Overhead]:
    found = []
    for (metric, gpu), points in sorted(tables.recorded.items()):
        if metric == "host":
            times = sorted(us for _, us, _ in points)
            origin = "measured" if any(o == "measured" for *_, o in points) else "recorded"
            found.append(Overhead("host", gpu, times[len(times) // 2], times[0], times[-1], len(times), origin))
    return found


def _fit(
    library: str, gpu: str, ep: str, stage: str, kind: str, times: dict[tuple[int, int], float], phi: dict, origin: str
) -> Fit:
    size = laws.SIZE[stage]
    alpha, beta, residuals = laws.fit([(t * size * phi[e], us) for (e, t), us in times.items()])
    relative = residuals / np.array(list(times.values()))
    tokens = [t for _, t in times]
    return Fit(library, gpu, ep, stage, alpha, beta, kind, len(times), (min(tokens), max(tokens)),
               float(residuals[np.argmax(np.abs(residuals))]), float(relative[np.argmax(np.abs(relative))]),
               origin)  # fmt: skip
