"""Prefill apart from decode: how many GPUs each needs so that neither waits for the other.

A request brings `prompt_len` tokens and takes `output_len` away. Prefill GPUs that do p tokens a second each and decode
GPUs that do d each serve equally many requests if

    n_prefill · p / prompt_len = n_decode · d / output_len

The first token comes after the prefill alone (and a queue, which is not modelled); later ones every step / tokens per
step. Together, on the same GPUs, prefills would stand between decode steps: `interference_ms`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moelab.config import ConfigError
from moelab.perf.prediction import Prediction
from moelab.perf.prefill import Prefill


@dataclass(frozen=True)
class Match:
    """`prefill_gpus` for each decode GPU; what one GPU of both kinds together serves, in output tok/s; the times a
    user sees (ms); which of the limits they break, if any."""

    prefill_gpus: float
    tok_s_per_gpu: float
    ttft_ms: float
    tpot_ms: float
    broken: tuple[str, ...]


def match(
    decode: Prediction,
    prefill: Prefill,
    output_len: float,
    max_ttft_ms: float = math.inf,
    max_tpot_ms: float = math.inf,
) -> Match:
    """Rates of `decode` and `prefill` matched. Raises ConfigError for an output of no tokens."""
    if output_len < 1:
        raise ConfigError(f"output_len is {output_len}: legal is 1 or more tokens; nearest: 1")
    requests = decode.tok_s_per_gpu / output_len  # a second, of one decode GPU
    needed = requests * prefill.prompt_len / prefill.tok_s_per_gpu
    tpot = 1e3 / decode.tok_s_per_request
    broken = [
        f"{name} {value:.1f} ms is above {limit:g}"
        for name, value, limit in (("TTFT", prefill.ttft_ms, max_ttft_ms), ("TPOT", tpot, max_tpot_ms))
        if value > limit
    ]
    return Match(needed, decode.tok_s_per_gpu / (1 + needed), prefill.ttft_ms, tpot, tuple(broken))


def interference_ms(batch: float, ttft_ms: float, output_len: float) -> float:
    """What prefills on the same GPUs add to a decode step: for each of `batch` requests one per output_len tokens."""
    return batch * ttft_ms / output_len
