"""`sweep`: predictions of every combination of settings as a DataFrame; the study's own sweep; Pareto frontiers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moelab.config import ConfigError
from moelab.perf.deployment import deployment
from moelab.perf.prediction import Prediction, evaluate
from moelab.perf.tables import NOTHING_RECORDED, Tables, load
from moelab.stages import CATEGORIES

if TYPE_CHECKING:
    import pandas as pd

STUDY_TP, STUDY_BATCHES = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128)
STUDY_GPUS = {8: "h200", 16: "h100", 32: "h100", 64: "h100", 128: "h100"}


def sweep(
    gpu: str | Sequence[str] = "h200",
    *,
    ep: int | Sequence[int] | None = None,
    dp: int | Sequence[int] | None = None,
    tp: int | Sequence[int] = 1,
    tables: Tables | None = None,
    records: str | Path | None = None,
    scale: Mapping[str, float] | None = None,
    **settings,
) -> pd.DataFrame:
    """One row per combination. Every argument may be one value or a list; `settings` are those of `predict` (batch and
    kv_len have to be among them; acceptance is one number here). Give `ep` (GPUs of an instance, dp = ep/tp) or `dp`.
    Combinations that cannot be are left out; what does not fit the memory stays in, with `fits` False.

    Columns: the settings; step_ms with step_low and step_high (80 %), tok_s_per_request, tok_s_per_gpu,
    tok_s_per_node, fits, largest_batch, weakest (the longest extrapolated term, or ""), layer_us and one column per
    category, `layer_<category>`. Raises ConfigError if no combination is possible.
    """
    import pandas as pd

    if (ep is None) == (dp is None):
        raise ConfigError("give ep (GPUs of an instance) or dp (groups of tp GPUs), one of them")
    tables = load(records) if tables is None else tables
    axes = {name: _values(value) for name, value in settings.items()}
    groups = _values(ep if dp is None else dp)
    rows, refused = [], None
    for gpu_name, size, ranks in itertools.product(_values(gpu), groups, _values(tp)):
        if dp is None and size % ranks:
            continue
        for values in itertools.product(*axes.values()):
            given = dict(zip(axes, values, strict=True))
            given["fabric_name"] = given.pop("fabric", None)
            try:
                d = deployment(gpu_name, size if ep is None else size // ranks, ranks, **given)
            except ConfigError as error:
                refused = error
                continue
            rows.append(_row(evaluate(d, tables, scale)))
    if not rows:
        raise refused or ConfigError("no combination: every ep has to be a multiple of a tp")
    return pd.DataFrame(rows)


def study_sweep(
    kv_len: float = 5000,
    draft_tokens: int = 1,
    acceptance: float = 0.6,
    alltoall: str = "pplx-2025",
    tables: Tables = NOTHING_RECORDED,
    **settings,
) -> pd.DataFrame:
    """The study's: EP8 on H200, EP16 to EP128 on H100; TP 1, 2, 4, 8; batch 1 to 128; the best overlap of each. Its
    exchange of 2025 by default, `settings` as in `sweep`.

    `tables`: published ones alone unless given. Records exist of one kind of GPU, with kernels of their day: they
    would set today's H200 against H100 as it was, and the study compares the two."""
    import pandas as pd

    given = {"batch": list(STUDY_BATCHES), "kv_len": kv_len, "draft_tokens": draft_tokens, "acceptance": acceptance,
             "alltoall": alltoall, "tables": tables} | settings  # fmt: skip
    return pd.concat([sweep(g, ep=ep, tp=list(STUDY_TP), **given) for ep, g in STUDY_GPUS.items()], ignore_index=True)


def frontier(frame: pd.DataFrame, x: str = "tok_s_per_request", y: str = "tok_s_per_node") -> pd.DataFrame:
    """The rows of a sweep that fit and that no other one beats in both x and y, from small to large x."""
    fits = frame[frame["fits"]].sort_values([x, y], ascending=False)
    return fits[fits[y] > fits[y].cummax().shift(fill_value=float("-inf"))].iloc[::-1]


def throughput_at(frame: pd.DataFrame, speed: float, y: str = "tok_s_per_node") -> float:
    """The most `y` at `speed` tok/s per request or more: between two points of the frontier on the line that joins
    them (in log y), 0 beyond its fast end."""
    import numpy as np

    edge = frontier(frame, y=y)
    x, top = edge["tok_s_per_request"].to_numpy(), edge[y].to_numpy()
    if not len(x) or speed > x[-1]:
        return 0.0
    return float(np.exp(np.interp(speed, x, np.log(top))))


def _values(value) -> list:
    return list(value) if isinstance(value, (list, tuple, range)) else [value]


def _row(p: Prediction) -> dict:
    d = p.deployment
    low, high = p.interval["step_ms"]
    outside = [(o.ms, name) for name, o in p.origins.items() if o.origin == "extrapolated"]
    return {
        "gpu": d.gpu.name, "ep": d.parallel.ep, "dp": d.parallel.dp, "tp": d.parallel.tp, "batch": d.batch,
        "kv_len": d.kv_len, "draft_tokens": d.draft_tokens, "acceptance": d.acceptance[0] if d.acceptance else 0.0,
        "overlap": p.overlap, "fabric": d.fabric, "alltoall": d.alltoall, "imbalance": d.imbalance,
        "redundant_experts": d.redundant, "step_ms": p.step_ms, "step_low": low, "step_high": high,
        "tok_s_per_request": p.tok_s_per_request, "tok_s_per_gpu": p.tok_s_per_gpu,
        "tok_s_per_node": p.tok_s_per_node, "fits": p.fits, "largest_batch": p.largest_batch,
        "weakest": max(outside)[1] if outside else "", "layer_us": p.layer_us["total"],
        **{f"layer_{c}": p.layer_us[c] for c in CATEGORIES},
    }  # fmt: skip
