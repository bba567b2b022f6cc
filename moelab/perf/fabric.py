"""The exchange of one deployment: which law holds on its fabric, and what dispatch and combine then take.

Inside a node rows go over NVLink, between nodes over `fabric`; the laws are in `moelab.perf.laws`. Ranks of a TP group
share the sending (T = t/TP each), but each of them gets the whole result (T = t).

Records of bench "alltoall" precede the published laws: fitted at the deployment's EP or, on the same road, the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moelab.config import ConfigError, ModelConfig, ParallelConfig
from moelab.hardware import GPU, unknown
from moelab.perf import laws
from moelab.perf.laws import ALLTOALLS, FAR_ERROR, LAW_ERROR, LINE_GB_S, Law
from moelab.perf.tables import Tables
from moelab.perf.term import Term


@dataclass(frozen=True)
class Exchange:
    """Dispatch and combine of one deployment."""

    gpu: GPU
    model: ModelConfig
    parallel: ParallelConfig
    library: str
    fabric: str  # between nodes; inside one it is NVLink
    tables: Tables

    @property
    def one_node(self) -> bool:
        return self.parallel.ep <= self.parallel.gpus_per_node

    @property
    def road(self) -> str:
        """The fabric whose law counts: NVLink inside a node, but for a library that does not use it; 400G NICs between
        NVL72's racks."""
        if self.one_node and self.library != "deepep-2025":
            return "nvl72" if self.fabric == "nvl72" else "nvlink"
        return "ib400" if self.fabric == "nvl72" else self.fabric

    def law(self, stage: str) -> Law:
        key = ("law", stage, self.library, self.gpu.name, self.parallel.ep, self.one_node)
        return self.tables.once(key, lambda: self._recorded(stage)) or laws.law(
            self.library, self.road, stage, self.gpu.name, self.parallel.ep
        )

    def time(self, stage: str, tokens: float, imbalance: float = 1.0) -> Term:
        """`tokens` that a GPU sends (dispatch) or gets back (combine); `imbalance`: rows of the busiest receiver over
        the mean, which its link has to carry."""
        ep, law = self.parallel.ep, self.law(stage)
        if ep == 1 or not tokens:
            return Term(0.0, law.origin, 0.0, "nothing to exchange" if ep == 1 else law.source)
        phi = laws.share(law.share, ep, self.parallel.gpus_per_node, self.model)
        us = law.us(laws.bytes_per_token(stage, self.model), tokens * imbalance, phi)
        term = Term(us, law.origin, law.error, law.source)
        if not law.ep[0] <= ep <= law.ep[1]:
            return term.moved(1.0, FAR_ERROR[stage], f"law of EP{law.ep[0]:g}-{law.ep[1]:g}")
        if tokens > law.tokens[1]:
            return term.moved(1.0, LAW_ERROR, f"law of up to {law.tokens[1]:g} tokens")
        return term

    def reduce(self, tokens: float, ranks: int) -> Term:
        """All-reduce of BF16 [tokens, H] over `ranks` of one node: 2(n−1)/n of it pass each GPU's NVLink. Nobody's
        table holds it; α and β are those of combine over NVLink, which moves the same kind of rows the same way."""
        if ranks == 1:
            return Term(0.0, "measured", 0.0, "no TP")
        law = laws.law("deepep", "nvl72" if self.fabric == "nvl72" else "nvlink", "combine", self.gpu.name, 8)
        moved = 2 * (ranks - 1) / ranks * tokens * self.model.hidden_size * 2
        return Term(law.alpha_us + moved / law.beta_gb_s / 1e3, "extrapolated", 0.3, "all-reduce by the law of combine")

    def _recorded(self, stage: str) -> Law | None:
        """From Records of bench "alltoall" by this library on this GPU, at this EP or the nearest on the same road."""
        by_ep: dict[int, dict[int, float]] = {}
        own = False
        for params, us, origin in self.tables.recorded.get((stage, self.gpu.name), ()):
            named = params["backend"] in (self.library, "nvshmem" if self.library == "moelab" else self.library)
            if named and describes(params, self.model):
                ep, tokens = int(params.get("ep", params["gpus"])), int(params["tokens"])
                if (ep <= self.parallel.gpus_per_node) == self.one_node:
                    points = by_ep.setdefault(ep, {})
                    points[tokens] = min(us, points.get(tokens, us))  # of several configurations the fastest
                    own |= origin == "measured"
        usable = {ep: points for ep, points in by_ep.items() if len(points) >= 3}
        if not usable:
            return None
        ep = min(usable, key=lambda e: abs(math.log(e / self.parallel.ep)))
        kind = road_share(self.library, self.one_node)
        phi = laws.share(kind, ep, self.parallel.gpus_per_node, self.model)
        size = laws.bytes_per_token(stage, self.model)
        alpha, beta, residuals = laws.fit([(t * size * phi, us) for t, us in usable[ep].items()])
        times = np.array(list(usable[ep].values()))
        worst = float(np.max(np.abs(residuals) / times))
        tokens = (min(usable[ep]), max(usable[ep]))
        source = f"records of {self.library} on {self.gpu.name}, EP{ep}"
        hidden = 0.0 if self.one_node else 1.0
        return Law(alpha, beta, kind, "measured" if own else "recorded", max(worst, 0.05), source, hidden,
                   ep=(ep, ep), tokens=tokens)  # fmt: skip


def road_share(backend: str, one_node: bool) -> str:
    """Which φ (laws.py) carries a measured time from one EP to another: inside a node our kernels send a token once a
    rank, and others a row for each expert."""
    if not one_node:
        return "off-node"
    return "distinct" if backend in ("moelab", "nvshmem", "nvshmem-flags", "nvshmem-puts") else "off-gpu"


def describes(params: Mapping, model: ModelConfig) -> bool:
    """Whether a record is of an exchange as the laws have it: bench "alltoall", the model's hidden size and experts,
    tokens known, FP8 there, any expert as likely as any other, no TP. What a record does not say it is taken to be."""
    assumed = {"payload": "fp8", "routing": "uniform", "tp": 1}
    return (
        params["bench"] == "alltoall"
        and (params.get("experts"), params.get("hidden")) == (model.n_routed_experts, model.hidden_size)
        and "tokens" in params
        and all(params.get(name, value) == value for name, value in assumed.items())
    )


def default_fabric(gpu: GPU, ep: int) -> str:
    """The usual one: NVLink in a node, a 400G NIC per GPU between nodes, one NVLink domain for GB200."""
    if gpu.name == "GB200":
        return "nvl72"
    if gpu.name == "H20":
        return "nvlink" if ep <= 8 else "ib200"
    return "nvlink" if ep <= 8 else "ib400"


def check(fabric: str, library: str, parallel: ParallelConfig) -> None:
    """Raise ConfigError for an unknown fabric or library, and for NVLink between nodes."""
    if fabric not in LINE_GB_S:
        raise unknown("fabric", fabric, list(LINE_GB_S))
    if library not in ALLTOALLS:
        raise unknown("alltoall", library, list(ALLTOALLS))
    if fabric == "nvlink" and parallel.ep > parallel.gpus_per_node:
        raise ConfigError(
            f"fabric nvlink joins {parallel.gpus_per_node} GPUs, ep is {parallel.ep}: "
            f"take ib400, ib800, efa or nvl72, or ep {parallel.gpus_per_node}"
        )
