"""What a deployment costs: parameters, memory, activated experts, bytes moved, and time.

    predict(...)     one decode step of a deployment: time, speed, memory, interval, origins      prediction
    sweep(...)       a DataFrame of many                                                          sweeps

Counted: `params`, `memory`, `experts`, `traffic`, `costs`. Timed, in the order in which a prediction uses them:
`tables` and `sources` (what was measured), `kernels` and `laws` with `fabric` (what follows for this GPU and fabric),
`layer` (every stage of a layer as a `term`), `overlap` (the schedules of `moelab.stages` walked with these times),
`prediction`. On top: `sweeps`, `plan`, `prefill` and `disaggregation`, `scenarios`; `calibrate` for one's own records;
`validate` and `points` for how far off all this is.

Formulas over `ModelConfig` and `ParallelConfig` and tables of measured times; numpy at most, no torch. Symbols,
everywhere in this package:

    H hidden · I expert width · h heads · E routed experts · k experts per token · L layers
    EP = DP·TP · e = E/EP experts per GPU · X = 3HI parameters of one expert · A attention parameters of one
    layer, of which A₀ = (q_lora + latent)·H are repeated on every TP rank
    B requests of one DP group · q tokens per request and step, 1 + drafts · t = B·q tokens of one DP group
    T = t·DP tokens of the whole deployment · kv tokens in a request's cache

GB = 1e9 bytes. Weights in block FP8 count 1 byte, BF16 2.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moelab.perf.prediction import Prediction, predict
    from moelab.perf.sweeps import sweep

__all__ = ["Prediction", "predict", "sweep"]
_HOME = {"Prediction": "prediction", "predict": "prediction", "sweep": "sweeps"}


def __getattr__(name: str):
    """Loaded at first use: counting parameters needs none of the tables."""
    if name not in _HOME:
        raise AttributeError(f"module 'moelab.perf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moelab.perf.{_HOME[name]}"), name)
