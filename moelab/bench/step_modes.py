"""Steps of `moelab bench decode` by graph and by eager calls, side by side, from records.

A pair is one setting at one batch, recorded both ways. Eager steps are launched one after another without a pause, so
what they take is the longer of two: what the device needs, and what the host needs to launch it.
"""

from __future__ import annotations

from typing import Any

from moelab.bench.decode import BENCH, LATER
from moelab.results import Record, Store

MODES = ("eager", "graph")
OWN = ("mode", "batch", "max_tokens")  # in which the records of a pair or of a curve may differ
Modes = dict[str, dict[int, Record]]  # mode -> batch -> step


def both(store: Store, gpu: str) -> tuple[dict[str, Any], Modes]:
    """(what all have in common, the steps) of the setting with the most batches recorded both ways, then of the one
    with the most layers; ({}, {}) where no batch of any was."""
    settings: dict[tuple, Modes] = {}
    for record in store.records(BENCH, metric="step", gpu=gpu):
        common = tuple(sorted((k, v) for k, v in (LATER | record.params).items() if k not in OWN))
        modes = settings.setdefault((common, record.backend, record.gpu_count), {mode: {} for mode in MODES})
        modes[record.params["mode"]][record.params["batch"]] = record
    paired = {key: len(modes["eager"].keys() & modes["graph"].keys()) for key, modes in settings.items()}
    best = max(paired, key=lambda key: (paired[key], dict(key[0])["layers"]), default=None)
    if best is None or not paired[best]:
        return {}, {}
    common, backend, gpu_count = best
    batches = sorted(settings[best]["eager"].keys() & settings[best]["graph"].keys())
    steps = {mode: {batch: settings[best][mode][batch] for batch in batches} for mode in MODES}
    return dict(common) | {"backend": backend, "gpu_count": gpu_count}, steps


def lessons(common: dict[str, Any], steps: Modes) -> list[str]:
    """What the records say, in sentences with their numbers."""
    if not steps:
        return []
    gains = {batch: eager.p50 / steps["graph"][batch].p50 for batch, eager in steps["eager"].items()}
    first, last = min(gains), max(gains)
    of = f"{common['model']}, {common['layers']} layers, {common['gpu_count']} GPU{'s' * (common['gpu_count'] > 1)}"
    return [
        f"{of}: a replayed step takes **{steps['graph'][first].p50:,.0f} µs** at batch {first}, an eager one "
        f"{steps['eager'][first].p50:,.0f} ({gains[first]:.1f}×); at batch {last} "
        f"{steps['graph'][last].p50:,.0f} and {steps['eager'][last].p50:,.0f} ({gains[last]:.2f}×)."
    ]


def title(common: dict[str, Any], gpu: str) -> str:
    """What the setting was, for a figure."""
    kind = ", one shadow rank" if common["shadow"] else ""
    return (
        f"{common['model']}, {common['layers']} layers, EP{common['ep']}{kind}, KV {common['kv_len']:,}, "
        f"{common['gpu_count']} × {gpu}"
    )
