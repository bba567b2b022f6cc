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
    eager, graph = steps["eager"], steps["graph"]
    first, last = min(eager), max(eager)
    of = f"{common['model']}, {common['layers']} layers, {common['gpu_count']} × {graph[first].gpu}"
    said = [
        f"{of}, recorded: a replayed step takes **{graph[first].p50:,.0f} µs** at batch {first}, an eager one "
        f"{_spread(eager[first])}: **{eager[first].p50 / graph[first].p50:.1f}×**; at batch {last} "
        f"{graph[last].p50:,.0f} and {_spread(eager[last])}: {eager[last].p50 / graph[last].p50:.2f}×."
    ]
    if eager[last].p50 < 1.2 * eager[first].p50 and graph[last].p50 > 1.2 * graph[first].p50:
        low, high = (f(record.p50 / 1e3 for record in eager.values()) for f in (min, max))
        said.append(
            f"Between those batches a replayed step grows {graph[last].p50 / graph[first].p50:.1f}×; an eager one "
            f"takes {low:.0f} to {high:.0f} ms whatever the batch: it waits for the host, and varies with it."
        )
    return said


def _spread(record: Record) -> str:
    return f"{record.p50:,.0f} (p20–p80 {record.p20:,.0f}–{record.p80:,.0f})"


def title(common: dict[str, Any], gpu: str) -> str:
    """What the setting was, for a figure."""
    kind = ", one shadow rank" if common["shadow"] else ""
    return (
        f"{common['model']}, {common['layers']} layers, EP{common['ep']}{kind}, KV {common['kv_len']:,}, "
        f"{common['gpu_count']} × {gpu}: recorded"
    )
