"""Named settings for `predict`, each with what it assumes: where the study wanted to go next.

A preset is a starting point, not a finding: nobody here measured any of them. Every setting may be changed
(`moelab predict --scenario NAME --batch 64`), and the prediction says which of its terms are extrapolated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moelab.config import ConfigError
from moelab.hardware import unknown
from moelab.perf.disaggregation import Match, match
from moelab.perf.prediction import Prediction, predict
from moelab.perf.prefill import prefill
from moelab.perf.tables import Tables


@dataclass(frozen=True)
class Scenario:
    """`settings` of `predict`; `prefill`: those of `prefill`, where prompts have GPUs of their own."""

    name: str
    title: str
    assumes: tuple[str, ...]
    settings: Mapping[str, object]
    prefill: Mapping[str, object] = field(default_factory=dict)
    output_len: float = 1000.0


SCENARIOS = {
    s.name: s
    for s in (
        Scenario(
            "gb200-nvl72",
            "one rack of GB200: EP72 over NVLink alone",
            (
                "peaks of the data sheet; kernels reach Hopper's shares of them (scaled from H200 and H800)",
                "exchange as TensorRT-LLM's one-sided kernels at EP8 on GB200, one row per GPU and token",
                "32 redundant experts, 4 on each GPU; FP8 weights, BF16 cache; MTP 1 at 0.6",
            ),
            {"gpu": "gb200", "dp": 72, "tp": 1, "batch": 128, "kv_len": 5000, "draft_tokens": 1, "acceptance": 0.6,
             "redundant_experts": 32, "fabric": "nvl72"},
        ),
        Scenario(
            "prefill-disaggregation",
            "prompts on GPUs of their own: EP32 prefills for EP128, on H100",
            (
                "prompts of 4,000 tokens in batches of four, answers of 1,000; caches cost nothing to move",
                "prefill as multi-head attention, two micro-batches over one exchange; nothing waits in a queue",
                "decode is never interrupted; MTP 1 at 0.6",
            ),
            {"gpu": "h100", "dp": 128, "tp": 1, "batch": 64, "kv_len": 4500, "draft_tokens": 1, "acceptance": 0.6},
            {"gpu": "h100", "dp": 32, "tp": 1, "prompt_len": 4000, "prompts": 4},
        ),
        Scenario(
            "eagle-tree",
            "a tree of 6 drafts in 3 depths instead of one MTP draft, EP128 on H100",
            (
                "two drafts a depth; the chance that one of them is taken is 0.75, 0.65, 0.55",
                "all 7 tokens are verified: attention and both exchanges grow with them",
                "a draft of one depth costs one MTP layer for both its tokens",
            ),
            {"gpu": "h100", "dp": 128, "tp": 1, "batch": 16, "kv_len": 5000, "draft_tokens": 6,
             "acceptance": (0.75, 0.65, 0.55)},
        ),
        Scenario(
            "nics-2x400g",
            "two 400 Gb/s NICs for every H100, EP128",
            (
                "the law's latency stays, its rate doubles: 94 GB/s, which no library was seen to reach",
                "all else as the study's, with today's exchange",
            ),
            {"gpu": "h100", "dp": 128, "tp": 1, "batch": 128, "kv_len": 5000, "draft_tokens": 1, "acceptance": 0.6,
             "fabric": "ib800"},
        ),
    )
}  # fmt: skip


def scenario(name: str) -> Scenario:
    if name not in SCENARIOS:
        raise unknown("scenario", name, list(SCENARIOS))
    return SCENARIOS[name]


def run(name: str, tables: Tables | None = None, **changes) -> Prediction:
    """The preset's prediction, with some settings changed."""
    return predict(**{**scenario(name).settings, **changes}, tables=tables)


def run_matched(name: str, tables: Tables | None = None) -> Match:
    """Decode and prefill of a preset that has both, their rates matched."""
    chosen = scenario(name)
    if not chosen.prefill:
        having = [s.name for s in SCENARIOS.values() if s.prefill]
        raise ConfigError(f"scenario {name!r} has no GPUs for prefill; those that have: {', '.join(having)}")
    return match(run(name, tables), prefill(**chosen.prefill, tables=tables), chosen.output_len)
