"""Step times of the study's deployments over exchanges, KV lengths and drafts: all that a page needs to draw any
frontier of them at once.

A step does not depend on the acceptance of drafts, so with the grid at hand speed, throughput, what fits and the
frontier are four operations a point, which a browser does while a slider moves (`moelab.plots.explorer`).
"""

from __future__ import annotations

from collections.abc import Sequence

from moelab.config import ConfigError
from moelab.perf.deployment import deployment, tokens_per_step
from moelab.perf.prediction import evaluate
from moelab.perf.sweeps import STUDY_BATCHES, STUDY_GPUS, STUDY_TP
from moelab.perf.tables import Tables, load


def step_grid(
    exchanges: Sequence[str],
    kv_lens: Sequence[int],
    drafts: Sequence[int] = (0, 1),
    *,
    gpus: dict[int, str] | None = None,
    tps: Sequence[int] = STUDY_TP,
    batches: Sequence[int] = STUDY_BATCHES,
    tables: Tables | None = None,
) -> dict:
    """Plain lists and numbers, ready for JSON. `exchanges`: "alltoall/fabric between nodes", as "deepep/ib400".
    `gpus`: {EP: GPU}, the study's by default.

    step[exchange][draft][kv]: step_ms with the best overlap, in the order of `points`, [EP, TP, batch]; largest, alike:
    the most requests of a DP group that fit. Raises ConfigError for what `predict` refuses, and for empty lists.
    """
    gpus = gpus or STUDY_GPUS
    if not (exchanges and kv_lens and drafts):
        raise ConfigError("exchanges, kv_lens and drafts need one value each at least")
    tables = load() if tables is None else tables
    points = [(ep, tp, batch) for ep in gpus for tp in tps for batch in batches]
    step, largest = [], []
    for name in exchanges:
        alltoall, slash, fabric = name.partition("/")
        if not slash:
            raise ConfigError(f"exchange {name!r} has no fabric: write 'deepep/ib400'")
        by_draft = [
            [
                [_one(gpus[ep], ep, tp, batch, kv, q, alltoall, fabric, tables) for ep, tp, batch in points]
                for kv in kv_lens
            ]
            for q in drafts
        ]
        step.append([[[round(ms, 3) for ms, _ in found] for found in per_kv] for per_kv in by_draft])
        largest.append([[[most for _, most in found] for found in per_kv] for per_kv in by_draft])
    return {
        "exchanges": [name.replace("/", ", ") for name in exchanges], "kv_lens": list(kv_lens), "drafts": list(drafts),
        "gpus": dict(gpus), "points": points, "step": step, "largest": largest,
    }  # fmt: skip


def grid_frontiers(
    grid: dict, exchange: int, draft: int, kv: int, acceptance: float
) -> dict[int, list[tuple[float, float]]]:  # fmt: skip
    """{EP: [(tok/s per request, tok/s per node of 8 GPUs), …]} of the deployments that fit and that no other one of the
    EP beats in both, from slow to fast. `exchange`, `draft`, `kv`: indices into the grid's lists."""
    step, largest = (grid[name][exchange][draft][kv] for name in ("step", "largest"))
    tokens = tokens_per_step(grid["drafts"][draft], acceptance)
    found: dict[int, list[tuple[float, float]]] = {}
    for (ep, tp, batch), ms, most in zip(grid["points"], step, largest, strict=True):
        if batch <= most:
            speed = 1e3 * tokens / ms
            found.setdefault(ep, []).append((speed, 8 * batch / tp * speed))
    edges = {}
    for ep, points in found.items():
        edges[ep] = []
        for point in sorted(points, reverse=True):
            if not edges[ep] or point[1] > edges[ep][-1][1]:
                edges[ep].append(point)
        edges[ep].reverse()
    return edges


def _one(gpu: str, ep: int, tp: int, batch: int, kv: int, drafts: int, alltoall: str, fabric: str, tables: Tables):
    d = deployment(
        gpu, ep // tp, tp, batch=batch, kv_len=kv, draft_tokens=drafts, acceptance=0.5 if drafts else 0.0,
        alltoall=alltoall, fabric_name=fabric if ep > 8 else None,
    )  # fmt: skip
    found = evaluate(d, tables, interval=False)
    return found.step_ms, found.largest_batch
