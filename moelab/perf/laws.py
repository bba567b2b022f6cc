"""How long dispatch and combine take: a law per library and fabric.

    time = α + T·bytes·φ / β        or, where a library waits for its messages one by one, max(α, T·bytes·φ / β)

T tokens that one GPU sends; bytes of all k copies of a token (59,264 for dispatch, 114,688 for combine); φ the share of
them that takes the road which β measures: off the node, off the GPU, or all. Copies that stay in the node overlap with
those that leave it. `hidden` says how much of the time a GPU may compute in: all of it where NICs carry the rows, none
over NVLink, where the sending half is copies by SMs.

    library     fabric   α dispatch / combine    β                φ          from
    deepep      ib400    25 / 27                 47               off node   4.4's rounded law: EP16-64, T 32-256
                nvlink   10.0 / 9.9 (H100)       249 / 213        off GPU    EP8, 2026-07, T >= 64
                         10.5 / 8.2 (H200)       264 / 218
    deepep-2025 ib400    25 / 27                 47 / 44          off GPU    early 2025: no NVLink, every copy by NIC
    pplx-2025   ib400    the time of one token   12-26 / 22-30    all, max   README at EP16-64; EP128: the study's rates
                nvlink   41.3 / 41.2             157 / 210        off GPU    README, one and 128 tokens
    pplx-garden ib400    8 / 21                  38 / 45          off node   EP16-64 at T = 128
                efa      147 / 42                60 / 37          off node   EP16-64 at T = 128
    cpu-proxy   ib400    290-790, per EP         47               off node   threads of the host post the messages
    moelab      nvlink   5 / 7                   360              distinct   its design's bound, until it is recorded

β in GB/s. On a fabric that nobody measured with a library, β follows the line rate and the origin says extrapolated.
The deepep law undershoots DeepEP's own EP128 and EP256 by 7-13 %: that is its error there. α of EFA and of pplx-garden
comes from three EPs at one T, so it is not a latency that was seen.

cpu-proxy is what NCCL and NVSHMEM's IBRC do; α is the time of one token of pplx-kernels over IBRC, β the line rate that
every good library reaches. Engines whose exchange is NCCL's, such as TensorRT-LLM between nodes, are of this kind.

Rates of the study: 25.6 and 29.0 GB/s over all copies, from its 593 and 1012 us. Everything else comes from
alltoall_published.csv; `calibrate` fits the same laws to Records, which then precede these.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from moelab.config import ModelConfig
from moelab.perf import traffic
from moelab.perf.experts import destinations
from moelab.perf.tables import rows

STAGES = ("dispatch", "combine")
SIZE = {"dispatch": 59_264, "combine": 114_688}  # bytes of a token in every published table: DeepSeek-V3's
LINE_GB_S = {  # per GPU and direction
    "nvlink": 450.0, "ib400": 50.0, "ib800": 100.0, "ib200": 25.0, "efa": 50.0, "nvl72": 900.0,
}  # fmt: skip
NVLINK_GB_S = {"H800": 200.0, "B200": 900.0}  # of nodes that are not NVLink 4's; else LINE_GB_S["nvlink"]
ALLTOALLS = ("deepep", "deepep-2025", "pplx-2025", "pplx-garden", "cpu-proxy", "moelab")
STUDY_GB_S = {"dispatch": 25.6, "combine": 29.0}  # all copies, EP128
LAW_ERROR, FAR_ERROR, SCALED_ERROR = 0.10, {"dispatch": 0.10, "combine": 0.15}, 0.20


@dataclass(frozen=True)
class Law:
    """One stage of one library on one fabric; see the module's text."""

    alpha_us: float
    beta_gb_s: float
    share: str  # φ: off-node, off-gpu, all, distinct
    origin: str
    error: float
    source: str
    hidden: float = 1.0
    either: bool = False  # max instead of the sum
    ep: tuple[float, float] = (2, 1024)  # where it was fitted
    tokens: tuple[float, float] = (1, 1024)

    def us(self, bytes_per_token: float, tokens: float, phi: float) -> float:
        wire = tokens * bytes_per_token * phi / self.beta_gb_s / 1e3
        return max(self.alpha_us, wire) if self.either else self.alpha_us + wire


def bytes_per_token(stage: str, model: ModelConfig) -> int:
    """Of all k copies."""
    return {"dispatch": traffic.dispatch_bytes_per_token, "combine": traffic.combine_bytes_per_token}[stage](model)


def share(kind: str, ep: int, gpus_per_node: int, model: ModelConfig) -> float:
    """φ."""
    if kind == "off-node":
        return 1 - min(gpus_per_node, ep) / ep
    if kind == "off-gpu":
        return 1 - 1 / ep
    if kind == "distinct":  # one row per GPU, not per expert; the routing that the sources assume has no groups
        spread = (
            destinations(ep, model, group_limited=False)
            if model.n_routed_experts % ep == 0
            else ep * (1 - (1 - 1 / ep) ** model.num_experts_per_tok)
        )
        return spread / model.num_experts_per_tok * (1 - 1 / ep)
    return 1.0


def fit(points: list[tuple[float, float]]) -> tuple[float, float, np.ndarray]:
    """Least squares of us = α + x/β over (bytes on the road, us): (α us, β GB/s, residuals us, law minus point)."""
    x, us = np.array(points, dtype=float).T
    design = np.column_stack([np.ones_like(x), x / 1e3])
    (alpha, inverse), *_ = np.linalg.lstsq(design, us, rcond=None)
    return float(alpha), float(1 / inverse), design @ [alpha, inverse] - us


@functools.cache
def published_points(library: str, fabric: str, stage: str, gpu: str = "") -> tuple[tuple[int, int, float], ...]:
    """((EP, tokens, us), …) of alltoall_published.csv, by library, part of the fabric's text, start of the GPU's."""
    found = [
        (int(r["ep"]), int(r["tokens_per_gpu"]), float(r["time_us"]))
        for r in rows("alltoall")
        if r["library"] == library and fabric in r["fabric"] and r["gpu"].startswith(gpu) and r["stage"] == stage
    ]
    return tuple(sorted(found))


@functools.cache
def law(library: str, road: str, stage: str, gpu: str, ep: int) -> Law:
    """The published law; a road without one takes that of a like road, scaled by the line rate."""
    known = _published(library, road, stage, gpu, ep)
    if known is not None:
        return known
    like = "nvlink" if road == "nvl72" else "ib400"
    base = _published(library, like, stage, gpu, ep)
    notes = []
    if base is None:
        base = _published("deepep", like, stage, gpu, ep)
        notes.append(f"{library} was not measured on {like}")
    if road != like:
        notes.append(f"scaled to {road}'s line rate")
    return replace(
        base,
        beta_gb_s=base.beta_gb_s * LINE_GB_S[road] / LINE_GB_S[like],
        origin="extrapolated",
        error=math.hypot(base.error, SCALED_ERROR),
        source="; ".join([base.source, *notes]),
    )


def _published(library: str, road: str, stage: str, gpu: str, ep: int) -> Law | None:
    first = stage == "dispatch"
    if library == "deepep" and road == "ib400":
        return Law(25.0 if first else 27.0, 47.0, "off-node", "published", LAW_ERROR, "law of DeepEP on 400G, EP16-64",
                   ep=(16, 64), tokens=(1, 256))  # fmt: skip
    if library == "deepep-2025" and road == "ib400":
        return Law(25.0 if first else 27.0, 47.0 if first else 44.0, "off-gpu", "published", LAW_ERROR,
                   "law of early DeepEP on 400G, EP8-128 at 128 tokens", ep=(8, 128), tokens=(1, 256))  # fmt: skip
    if library == "cpu-proxy" and road == "ib400":
        points = {at: us for at, tokens, us in published_points("pplx-kernels", "IBRC", stage) if tokens == 1}
        alpha = float(np.interp(math.log2(ep), np.log2(list(points)), list(points.values())))
        return Law(alpha, 47.0, "off-node", "published", 0.30, "latency of pplx-kernels over IBRC, DeepEP's rate",
                   ep=(16, 128), tokens=(1, 256))  # fmt: skip
    if road == "nvlink" and library in ("deepep", "deepep-2025", "cpu-proxy"):
        return _nvlink(stage, gpu)
    if library == "pplx-2025":
        return _pplx(stage, road, ep)
    if library == "pplx-garden" and road in ("ib400", "efa"):
        name = {"ib400": "CX7", "efa": "EFA"}[road]
        return _garden(stage, name)
    if library == "pplx-garden" and road == "nvlink":
        return replace(_nvlink(stage, gpu), alpha_us=15.0 if first else 7.0, source="pplx-garden at EP8, one point")
    if library == "deepep" and road == "efa":  # it does not run there: what does
        return _garden(stage, "EFA")
    if library == "deepep" and road == "nvl72":
        # TensorRT-LLM's one-sided kernels on GB200, EP8, BF16: 18.9 / 31.0 us at one token, 312 / 323 us at 2,048.
        return Law(18.0 if first else 31.0, 750.0, "distinct", "published", 0.25, "TensorRT-LLM one-sided, GB200, EP8",
                   hidden=0.0, tokens=(1, 2048))  # fmt: skip
    if library == "moelab" and road == "nvlink":
        return Law(5.0 if first else 7.0, 360.0, "distinct", "extrapolated", 0.30, "bound of our kernels' design",
                   hidden=0.0)  # fmt: skip
    return None


def _nvlink(stage: str, gpu: str) -> Law:
    """DeepEP over NVLink, EP8: the 2026-07 table of H100 or H200, T >= 64."""
    measured = gpu if gpu in ("H100", "H200") else "H100"
    points = published_points("DeepEP low-latency (aiconfigurator table, 2026-07)", "NVLink", stage, measured)
    size = SIZE[stage]
    alpha, beta, _ = fit([(t * size * 7 / 8, us) for _, t, us in points if t >= 64])
    law = Law(alpha, beta, "off-gpu", "published", LAW_ERROR, f"law of DeepEP over NVLink, {measured}, EP8", hidden=0.0)
    slow = NVLINK_GB_S.get(gpu, LINE_GB_S["nvlink"]) / LINE_GB_S["nvlink"]
    if gpu == measured:
        return law
    return replace(
        law, beta_gb_s=beta * slow, origin="extrapolated", error=0.2, source=f"{law.source}, scaled to {gpu}"
    )


def _pplx(stage: str, road: str, ep: int) -> Law | None:
    if road not in ("nvlink", "ib400", "efa"):
        return None
    kind = {"nvlink": "NVLink", "ib400": "IBGDA", "efa": "IBRC"}[road]
    size = SIZE[stage]
    times: dict[int, dict[int, float]] = {}
    for at, tokens, us in published_points("pplx-kernels", kind, stage):
        times.setdefault(at, {})[tokens] = us
    source = f"pplx-kernels README over {kind}"
    if road == "nvlink":
        alpha, beta, _ = fit([(t * size * 7 / 8, us) for t, us in times[8].items()])
        return Law(alpha, beta, "off-gpu", "published", 0.10, source, hidden=0.0, tokens=(1, 128))
    steps = sorted(times)
    alphas = [times[e][1] for e in steps]
    rates = [128 * size / times[e][128] / 1e3 for e in steps]
    if road == "ib400":
        rates[-1] = STUDY_GB_S[stage]
        source += " to EP64, the study's rates at EP128"
    at = math.log2(ep)
    alpha, beta = (float(np.interp(at, np.log2(steps), values)) for values in (alphas, rates))
    # On EFA: times of a CPU proxy, as it has one too, but over InfiniBand.
    origin, error = ("extrapolated", 0.30) if road == "efa" else ("published", 0.10)
    return Law(alpha, beta, "all", origin, error, source, either=True, ep=(16, 128), tokens=(1, 256))


def _garden(stage: str, name: str) -> Law:
    points = published_points("pplx-garden p2p-all-to-all", name, stage)
    size = SIZE[stage]
    alpha, beta, _ = fit([(t * size * (1 - 8 / ep), us) for ep, t, us in points if ep > 8])
    return Law(alpha, beta, "off-node", "published", 0.12, f"law of pplx-garden over {name}, EP16-64 at 128 tokens",
               ep=(16, 64), tokens=(128, 128))  # fmt: skip
