"""What records of `moelab bench decode` say of a layer, beside the model of the same setting.

A setting is what was asked for: deployment, batch, schedule, fabric. Its MoE layer was timed whole ("layer"), and each
kind of kernel alone ("category"), so that the kinds do not add up to a layer in which some hide beside others. A shadow
rank's numbers are those of a stand-in: its exchange waited for as long as the law of its fabric says, which is the
model's own, while kernels, launches and order are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moelab.bench.decode import BENCH
from moelab.perf import schedules
from moelab.perf.prediction import Prediction, predict
from moelab.perf.tables import Tables
from moelab.results import Record, Store

OWN = ("of", "category", "stage", "half", "asked_us", "part", "from", "acceptance")  # parameters of a number
REAL = "real"  # the fabric of ranks that are all there


@dataclass(frozen=True)
class Layer:
    """One MoE layer of a setting, its parameters and Records: of the whole, and of each kind of kernels."""

    params: dict
    record: Record
    kinds: dict[str, Record] = field(default_factory=dict)

    @property
    def stand_in(self) -> bool:
        return self.record.kind == "stand-in"

    @property
    def name(self) -> str:
        p = self.params
        where = "" if p["fabric"] == REAL else f", {p['fabric']}"
        return f"EP{p['ep']}{where}, batch {p['batch']}, {schedules.NAMES[p['overlap']]}"


def layers(store: Store, gpu: str) -> list[Layer]:
    """Those of `gpu`, by deployment, fabric, batch and schedule; [] if nothing was recorded. Of one setting that was
    run with graphs and eagerly both are there."""
    whole: dict[tuple, Record] = {}
    kinds: dict[tuple, dict[str, Record]] = {}
    for record in store.records(BENCH, gpu=gpu):
        if record.params.get("of") == "moe" and record.metric in ("layer", "category"):
            setting = tuple((k, v) for k, v in record.params.items() if k not in OWN)
            if record.metric == "layer":
                whole[setting] = record
            else:
                kinds.setdefault(setting, {})[record.params["category"]] = record
    found = [Layer(dict(setting), record, kinds.get(setting, {})) for setting, record in whole.items()]
    order = list(schedules.NAMES)
    return sorted(found, key=lambda x: (x.params["ep"], x.params["fabric"], x.params["batch"],
                                        order.index(x.params["overlap"])))  # fmt: skip


def modelled(found: Layer, tables: Tables) -> Prediction:
    """The model of that setting; of an exchange that nothing stood in for, none."""
    p = found.params
    quiet = {"Dispatch": 0.0, "Combine": 0.0} if p["fabric"] == "none" else None
    between = p["fabric"] if p["ep"] > 8 and p["fabric"] in ("ib400", "efa") else None
    return predict(
        found.record.gpu, p["dp"], p["tp"], batch=p["batch"], kv_len=p["kv_len"], draft_tokens=p["draft_tokens"],
        acceptance=0.5 if p["draft_tokens"] else 0.0, overlap=p["overlap"], fabric=between, kv_dtype=p["kv_dtype"],
        model=p["model"], alltoall="moelab" if p["fabric"] == REAL else "deepep", scale=quiet, tables=tables,
    )  # fmt: skip


def gains(found: Sequence[Layer]) -> dict[str, dict[float, float]]:
    """{deployment and fabric: {batch: percent of DispatchOverlap's time that MicroBatch saves}}, of what has both."""
    us: dict[tuple[str, int], dict[str, float]] = {}
    for layer in found:
        p = layer.params
        where = f"EP{p['ep']}" + ("" if p["fabric"] == REAL else f", shadow rank, {p['fabric']}")
        us.setdefault((where, p["batch"]), {})[p["overlap"]] = layer.record.p50
    saved: dict[str, dict[float, float]] = {}
    for (where, batch), at in us.items():
        if {"dispatch", "microbatch"} <= at.keys():
            saved.setdefault(where, {})[batch] = 100 * (1 - at["microbatch"] / at["dispatch"])
    return saved
