"""Which schedule at which batch: what a layer takes by each, who is ahead, and from where on.

Two half batches hide each other's exchange and read every weight twice. The exchange grows with the batch while the
weights do not, so micro-batches pay from some batch on, if there is anything to hide: over NVLink SMs store the rows
themselves, which leaves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moelab.perf.deployment import deployment
from moelab.perf.prediction import Prediction, evaluate
from moelab.perf.study import number
from moelab.perf.tables import Tables
from moelab.stages import SCHEDULES

NAMES = {"none": "NoOverlap", "dispatch": "DispatchOverlap", "microbatch": "MicroBatch"}
STUDY_BARS = {"EP8": (8, "none"), **{f"EP128 {name}": (128, overlap) for overlap, name in NAMES.items()}}
EXCHANGE_AND_EXPERTS = ("Dispatch", "Combine", "GroupGEMM")  # what the study lets differ between its bars


def layer(gpu: str, dp: int, overlap: str, *, batch: float, tables: Tables, **settings) -> Prediction:
    """`predict` without its interval; `layer_us` is one MoE layer in the steady state. `settings` as there."""
    settings["fabric_name"] = settings.pop("fabric", None)
    return evaluate(deployment(gpu, dp, batch=batch, overlap=overlap, **settings), tables, interval=False)


def layer_us(gpu: str, dp: int, batches: Sequence[float], **settings) -> dict[str, dict[float, float]]:
    """{schedule: {batch of a DP group: us of one MoE layer}}, TP1."""
    return {
        overlap: {batch: layer(gpu, dp, overlap, batch=batch, **settings).layer_us["total"] for batch in batches}
        for overlap in SCHEDULES
    }


def saved(
    us: Mapping[str, Mapping[float, float]], by: str = "microbatch", over: str = "dispatch"
) -> dict[float, float]:
    """{batch: percent of the time of `over` that `by` saves}; negative: it costs."""
    return {batch: 100 * (1 - us[by][batch] / us[over][batch]) for batch in us[over]}


def crossover(gains: Mapping[float, float]) -> float | None:
    """The batch from which on no gain is negative any more, on the line between its neighbours in log batch; the first
    batch if none is, None if the last still is."""
    batches = sorted(gains)
    losing = [i for i, batch in enumerate(batches) if gains[batch] < 0]
    if not losing:
        return batches[0]
    if losing[-1] == len(batches) - 1:
        return None
    low, high = batches[losing[-1]], batches[losing[-1] + 1]
    part = -gains[low] / (gains[high] - gains[low])
    return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))


def published_bar(ep: int, overlap: str) -> dict[str, float]:
    """{kind: us} of a bar of the study's breakdown, as far as it names them; "rest" is what it does not."""
    mode, parts = (NAMES[overlap] if ep > 8 else ""), {}
    for part in EXCHANGE_AND_EXPERTS:
        try:
            parts[part] = number("layer breakdown", part, ep=ep, mode=mode)
        except KeyError:  # the study does not say
            continue
    return parts | {"rest": number("layer breakdown", "one MoE layer, total", ep=ep, mode=mode) - sum(parts.values())}


def published_others() -> dict[str, float]:
    """us of all kinds but the study's three, where its text tells: EP8, and EP128's MicroBatch. EP8's exchange is
    what its text says EP128's MicroBatch has more."""
    bar = published_bar(128, "microbatch")
    more = number("layer breakdown", "communication of EP128 MicroBatch above EP8")
    ep8_exchange = bar["Dispatch"] + bar["Combine"] - more
    return {"EP8": published_bar(8, "none")["rest"] - ep8_exchange, "EP128 MicroBatch": bar["rest"]}


def published_hidden(overlap: str) -> float:
    """Percent of EP128's exchange that the study's `overlap` hides: what is missing against NoOverlap. For
    DispatchOverlap what it saves of the layer."""
    whole = sum(published_bar(128, "none")[part] for part in ("Dispatch", "Combine"))
    if overlap == "microbatch":
        bar = published_bar(128, overlap)
        return 100 * (1 - (bar["Dispatch"] + bar["Combine"]) / whole)
    less = sum(published_bar(128, "none").values()) - sum(published_bar(128, overlap).values())
    return 100 * less / whole
