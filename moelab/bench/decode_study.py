"""What records of `moelab bench decode` say of a layer, beside the model of the same setting.

A setting is what was asked for: deployment, batch, schedule, fabric. Its MoE layer was timed whole ("layer"), and each
kind of kernel alone ("category"), so that the kinds do not add up to a layer in which some hide beside others. A shadow
rank's numbers are those of a stand-in: its exchange waited for as long as the law of its fabric says, which is the
model's own, while kernels, launches and order are real. A flight counts from its send's start ("held"), and what of it
a receive stood and waited is "exposed": the rest passed beside other work, or in the send's own kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from moelab.bench.decode import BENCH, LATER
from moelab.perf import schedules
from moelab.perf.prediction import Prediction, predict
from moelab.perf.tables import Tables
from moelab.perf.timeline import Shares
from moelab.results import Record, Store
from moelab.stages import CATEGORIES

OWN = ("of", "category", "stage", "half", "asked_us", "part", "from", "acceptance")  # parameters of a number
FOLLOW = ("dp", "q_len", "moe_layers", "max_tokens", "shadow", "weights")  # from others, or said by the fabric
LENGTH = ("layers", "moe_layers")
REAL, QUIET = "real", "none"  # the fabric of ranks that are all there; of a shadow rank that waits for nobody
SHOWN = ("MLA", "GEMM", "GroupGEMM", "Dispatch", "Combine")  # kinds of a table
SAID = ("ep", "fabric", "batch", "overlap")  # what a layer's name says first
PARTS = {"category": ("kinds", "category"), "held": ("held", "half"), "exposed": ("exposed", "half")}
PLAIN = {"mode": "graph", "tp": 1, "kv_dtype": "bf16"} | LATER


@dataclass(frozen=True)
class Layer:
    """One MoE layer of a setting, its parameters and Records: of the whole, of each kind of kernels, and of a shadow
    rank's exchange, by half: how long its rows were held, and what it waited."""

    name: str  # deployment, fabric of a shadow rank, batch, schedule, and what else tells it from others
    params: dict
    record: Record
    kinds: dict[str, Record] = field(default_factory=dict)
    held: dict[str, Record] = field(default_factory=dict)
    exposed: dict[str, Record] = field(default_factory=dict)


def layers(store: Store, gpu: str, model: str = "deepseek-v3") -> list[Layer]:
    """Those of `model` on `gpu`, by deployment, fabric, batch and schedule; [] if nothing was recorded."""
    whole: dict[tuple, Record] = {}
    parts: dict[tuple, dict[str, dict[str, Record]]] = {}
    for record in store.records(BENCH, gpu=gpu, model=model):
        of = record.params.get("of", "moe")
        if of != "moe" or record.metric not in ("layer", *PARTS):
            continue
        setting = tuple((k, v) for k, v in (LATER | record.params).items() if k not in OWN)
        if record.metric == "layer":
            whole[setting] = record
        else:
            field_name, by = PARTS[record.metric]
            parts.setdefault(setting, {}).setdefault(field_name, {})[record.params[by]] = record
    order = list(schedules.NAMES)
    found = sorted(
        whole, key=lambda x: [dict(x)[k] for k in ("ep", "fabric", "batch")] + [order.index(dict(x)["overlap"])]
    )
    names = _names([dict(x) for x in found], *SAID)
    for of in parts.values():
        of["kinds"] = {c: of["kinds"][c] for c in CATEGORIES if c in of["kinds"]} if "kinds" in of else {}
    return [Layer(name, dict(x), whole[x], **parts.get(x, {})) for name, x in zip(names, found, strict=True)]


def _names(settings: Sequence[dict], *said: str) -> list[str]:
    """What `said` names of each setting, and of those that it does not tell apart what else differs."""
    words = {
        "ep": lambda v: f"EP{v}", "batch": lambda v: f"batch {v}", "overlap": lambda v: schedules.NAMES[v],
        "fabric": lambda v: {REAL: "", QUIET: "no fabric"}.get(v, v),
    }  # fmt: skip
    texts = [", ".join(filter(None, (words[k](setting[k]) for k in said))) for setting in settings]
    names = []
    for text, setting in zip(texts, settings, strict=True):
        alike = [other for t, other in zip(texts, settings, strict=True) if t == text]
        differ = [k for k, v in setting.items() if k not in (*said, *FOLLOW) and any(x[k] != v for x in alike)]
        names.append(", ".join([text, *(f"{k} {setting[k]}" for k in differ)]))
    return names


def longest(found: Sequence[Layer]) -> list[Layer]:
    """Those replayed as graphs; of settings that differ in the number of layers only, the one with most."""
    kept: dict[tuple, Layer] = {}
    for layer in found:
        setting = tuple((k, v) for k, v in layer.params.items() if k not in LENGTH)
        if layer.params["mode"] == "graph":
            kept[setting] = max(kept.get(setting, layer), layer, key=lambda x: x.params["layers"])
    return list(kept.values())


def plain(found: Sequence[Layer]) -> list[Layer]:
    """Of the longest those that the study has a counterpart of: TP1, a bf16 cache, tokens spread evenly where the
    others are stood in for, no budget of multiprocessors."""
    kept = [x for x in longest(found) if _is_plain(x)]
    names = _names([x.params for x in kept], *SAID)
    return [replace(x, name=name) for x, name in zip(kept, names, strict=True)]


def _is_plain(layer: Layer) -> bool:
    return PLAIN.items() <= layer.params.items() and layer.params["routing"] in ("equal", "router")


def variants(found: Sequence[Layer]) -> list[tuple[str, Layer, Layer]]:
    """(what it differs in, the layer, the plain one of the same deployment, batch and schedule), of the longest."""
    same = ("ep", "fabric", "batch", "overlap", "kv_len", "draft_tokens")
    base = {tuple(x.params[k] for k in same): x for x in plain(found)}
    pairs = []
    for layer in longest(found):
        other = base.get(tuple(layer.params[k] for k in same))
        if other is not None and not _is_plain(layer):
            differs = [k for k, v in layer.params.items() if k not in (*FOLLOW, *LENGTH) and other.params.get(k) != v]
            pairs.append((", ".join(f"{k} {layer.params[k]}" for k in differs), layer, other))
    return pairs


def variant_rows(found: Sequence[Layer], batch: int) -> list[dict]:
    """A table's rows at `batch`: each plain layer that has variants, then those, with what they take more."""

    def row(name: str, layer: Layer, base: Layer) -> dict:
        more = 100 * (layer.record.p50 / base.record.p50 - 1)
        kinds = {f"{kind} [µs]": x.p50 for kind, x in layer.kinds.items() if kind in SHOWN}
        return {"layer": name, "whole [µs]": layer.record.p50, "against plain [%]": more, **kinds}

    pairs = [pair for pair in variants(found) if pair[1].params["batch"] == batch]
    rows = {base.name: row(base.name, base, base) for *_, base in pairs}
    return [*rows.values(), *(row(f"{base.name}: {what}", layer, base) for what, layer, base in pairs)]


def bars(found: Sequence[Layer], batch: int) -> dict[str, Layer]:
    """{bar of the study's breakdown: the plain layer of its EP and schedule at `batch`}, as far as recorded: of all
    ranks rather than of a shadow one, and by the law of a fabric rather than without an exchange."""
    at: dict[str, Layer] = {}
    for name, (ep, overlap) in schedules.STUDY_BARS.items():
        mine = [
            x for x in plain(found) if (x.params["ep"], x.params["overlap"], x.params["batch"]) == (ep, overlap, batch)
        ]
        if mine and (ep == 8 or any(x.params["fabric"] != QUIET for x in mine)):
            at[name] = max(mine, key=lambda x: (x.params["fabric"] == REAL, x.params["fabric"] != QUIET))
    return at


def shares(layer: Layer, found: Sequence[Layer]) -> Shares | None:
    """Communication of the layer, all micro-batches together; None of one that no law held, and where NoOverlap was not
    recorded at as many requests as its micro-batches have. Kernels of its own are what dispatch and combine take alone
    beyond their flights, and what passes of NoOverlap's flights, where a receive follows right behind its send."""
    times = 2 if layer.params["overlap"] == "microbatch" else 1
    wanted = _alike(layer) | {"batch": layer.params["batch"] / times}
    bare = next((x for x in longest(found) if x.params["overlap"] == "none" and _alike(x) == wanted), None)
    if bare is None or not (layer.held and layer.exposed and bare.exposed):
        return None
    flight, waited = times * _both(layer.held), times * _both(layer.exposed)
    sends = times * (_both(bare.held) - _both(bare.exposed))
    alone = _both(layer.kinds)
    return Shares(max(0.0, alone - flight) + sends, max(0.0, flight - waited - sends), waited)


def _alike(layer: Layer) -> dict:
    return {k: v for k, v in layer.params.items() if k not in ("overlap", "max_tokens", *LENGTH)}


def _both(halves: Mapping[str, Record]) -> float:
    """us of dispatch and combine."""
    return sum(record.p50 for name, record in halves.items() if name.lower() in ("dispatch", "combine"))


def hidden(found: Sequence[Layer]) -> dict[str, dict[float, float]]:
    """{schedule: {batch: percent of an exchange between nodes that is hidden}}, of plain layers."""
    at: dict[str, dict[float, float]] = {}
    for layer in plain(found):
        if layer.params["ep"] > 8 and (of := shares(layer, found)) is not None:
            name = schedules.NAMES[layer.params["overlap"]]
            at.setdefault(name, {})[layer.params["batch"]] = 100 * of.hidden / of.total
    return at


def modelled(found: Layer, tables: Tables) -> Prediction:
    """The model of that setting; of an exchange that nothing stood in for, none."""
    p = found.params
    quiet = {"Dispatch": 0.0, "Combine": 0.0} if p["fabric"] == QUIET else None
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
