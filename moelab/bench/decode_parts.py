"""What attention takes of a recorded layer, and what a pass of the MTP layer takes beside a recorded step.

Both as shares, by batch, of settings that `decode_study.plain` keeps. A pass is the first one, which runs over as many
tokens of a request as the step; the model's runs over the last token of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from moelab.bench.decode import BENCH, LATER
from moelab.bench.decode_study import OWN, QUIET, Layer, modelled
from moelab.config import preset
from moelab.perf import schedules
from moelab.perf.tables import Tables
from moelab.results import Record, Store

Curves = dict[str, dict[float, float]]  # deployment, fabric and schedule -> batch -> percent


def attention(found: Sequence[Layer]) -> Curves:
    """Percent of a layer's time that its MLA kernels take alone, of layers in which nothing overlaps and that were
    recorded at two batches or more."""
    shares: Curves = {}
    for layer in found:
        if layer.params["overlap"] == "none" and "MLA" in layer.kinds:
            shares.setdefault(_name(layer), {})[layer.params["batch"]] = 100 * layer.kinds["MLA"].p50 / layer.record.p50
    return {name: at for name, at in shares.items() if len(at) > 1}


def drafts(store: Store, found: Sequence[Layer], tables: Tables) -> tuple[Curves, Curves]:
    """(recorded, modelled): a pass of the MTP layer in percent of the main model's step, where all layers of the model
    were run and a fabric was stood in for."""
    steps, passes = (_by_setting(store, found, metric) for metric in ("step", "draft"))
    recorded: Curves = {}
    counted: Curves = {}
    for layer in found:
        p, setting = layer.params, _setting(layer.params)
        whole = p["layers"] == preset(p["model"]).num_hidden_layers
        if p["fabric"] == QUIET or not whole or not (setting in steps and setting in passes):
            continue
        of = modelled(layer, tables)
        step_us = 1e3 * of.step_ms - of.tail_us["draft"] - of.tail_us["host"]
        name = _name(layer)
        recorded.setdefault(name, {})[p["batch"]] = 100 * passes[setting].p50 / steps[setting].p50
        counted.setdefault(name, {})[p["batch"]] = 100 * of.tail_us["draft"] / step_us
    return recorded, counted


def lessons(gpu: str, share: Curves, recorded: Curves, counted: Curves) -> list[str]:
    """What `attention` and `drafts` found, in sentences with their numbers."""

    def ends(at: dict[float, float], digits: int) -> str:
        return f"{at[min(at)]:.{digits}f} to {at[max(at)]:.{digits}f} %"

    found = []
    if share:
        each = ", ".join(
            f"{ends(at, 0)} ({name.removesuffix(', NoOverlap')}, batch {min(at)} to {max(at)})"
            for name, at in share.items()
        )
        found.append(f"Of a layer recorded on {gpu} MLA takes {each}.")
    if recorded:
        each = ", ".join(f"{ends(at, 1)} ({name}; modelled {ends(counted[name], 1)})" for name, at in recorded.items())
        at = sorted(next(iter(recorded.values())))
        found.append(
            f"A pass of the MTP layer takes, of the step, recorded on {gpu}, batch {at[0]} to {at[-1]}: {each}."
        )
    return found


def _setting(params: dict) -> tuple:
    return tuple(sorted((k, v) for k, v in (LATER | params).items() if k not in OWN))


def _by_setting(store: Store, found: Sequence[Layer], metric: str) -> dict[tuple, Record]:
    gpu = found[0].record.gpu if found else None
    records = store.records(BENCH, metric=metric, gpu=gpu) if found else []
    return {_setting(r.params): r for r in records if r.params.get("of", "first") == "first"}


def _name(layer: Layer) -> str:
    p = layer.params
    return f"EP{p['ep']}, {p['fabric'].replace(QUIET, 'no fabric')}, {schedules.NAMES[p['overlap']]}"
