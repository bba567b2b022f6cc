"""What records of `moelab bench decode` say of a layer, beside the model of the same setting.

A setting is what was asked for: deployment, batch, schedule, fabric. Its MoE layer was timed whole ("layer"), and each
kind of kernel alone ("category"), so that the kinds do not add up to a layer in which some hide beside others. A shadow
rank's numbers are those of a stand-in: its exchange waited for as long as the law of its fabric says, which is the
model's own, while kernels, launches and order are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moelab.bench.decode import BENCH, LATER
from moelab.perf import schedules
from moelab.perf.prediction import Prediction, predict
from moelab.perf.tables import Tables
from moelab.results import Record, Store

OWN = ("of", "category", "stage", "half", "asked_us", "part", "from", "acceptance")  # parameters of a number
FOLLOW = ("dp", "tp", "q_len", "moe_layers", "max_tokens", "shadow", "weights")  # from others, or said by the fabric
REAL = "real"  # the fabric of ranks that are all there


@dataclass(frozen=True)
class Layer:
    """One MoE layer of a setting, its parameters and Records: of the whole, and of each kind of kernels."""

    name: str  # deployment, fabric of a shadow rank, batch, schedule, and what else tells it from others
    params: dict
    record: Record
    kinds: dict[str, Record] = field(default_factory=dict)


def layers(store: Store, gpu: str, model: str = "deepseek-v3") -> list[Layer]:
    """Those of `model` on `gpu`, by deployment, fabric, batch and schedule; [] if nothing was recorded."""
    whole: dict[tuple, Record] = {}
    kinds: dict[tuple, dict[str, Record]] = {}
    for record in store.records(BENCH, gpu=gpu, model=model):
        if record.params.get("of") == "moe" and record.metric in ("layer", "category"):
            setting = tuple((k, v) for k, v in (LATER | record.params).items() if k not in OWN)
            if record.metric == "layer":
                whole[setting] = record
            else:
                kinds.setdefault(setting, {})[record.params["category"]] = record
    order = list(schedules.NAMES)
    found = sorted(
        whole, key=lambda x: [dict(x)[k] for k in ("ep", "fabric", "batch")] + [order.index(dict(x)["overlap"])]
    )
    names = _names([dict(x) for x in found], "ep", "fabric", "batch", "overlap")
    return [Layer(name, dict(x), whole[x], kinds.get(x, {})) for name, x in zip(names, found, strict=True)]


def _names(settings: Sequence[dict], *said: str) -> list[str]:
    """What `said` names of each setting, and of those that it does not tell apart what else differs."""
    words = {
        "ep": lambda v: f"EP{v}", "batch": lambda v: f"batch {v}", "overlap": lambda v: schedules.NAMES[v],
        "fabric": lambda v: "" if v == REAL else v,
    }  # fmt: skip
    texts = [", ".join(filter(None, (words[k](setting[k]) for k in said))) for setting in settings]
    names = []
    for text, setting in zip(texts, settings, strict=True):
        alike = [other for t, other in zip(texts, settings, strict=True) if t == text]
        differ = [k for k, v in setting.items() if k not in (*said, *FOLLOW) and any(x[k] != v for x in alike)]
        names.append(", ".join([text, *(f"{k} {setting[k]}" for k in differ)]))
    return names


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
    """{deployment, fabric of a shadow rank, what else tells it from others: {batch: percent of DispatchOverlap's time
    that MicroBatch saves}}, of settings that were run by both."""
    us: dict[tuple, dict[float, dict[str, float]]] = {}
    for layer in found:
        p = layer.params
        setting = tuple((k, v) for k, v in p.items() if k not in ("overlap", "batch", "max_tokens"))
        us.setdefault(setting, {}).setdefault(p["batch"], {})[p["overlap"]] = layer.record.p50
    saved = {}
    for name, at in zip(_names([dict(x) for x in us], "ep", "fabric"), us.values(), strict=True):
        both = {batch: x for batch, x in at.items() if {"dispatch", "microbatch"} <= x.keys()}
        if both:
            saved[name] = {batch: 100 * (1 - x["microbatch"] / x["dispatch"]) for batch, x in both.items()}
    return saved
