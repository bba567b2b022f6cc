"""Absorbed and expanded attention, run both on the same cache: the same hidden states, and what each takes.

A cache is filled with a text; then its last q tokens are run again, by each way in turn. What counts as attention is
what the ways differ in: bmm_k, mla and bmm_v of all layers of the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from moelab.engine.batch import Piece, lay_out
from moelab.engine.executor import run_layers
from moelab.engine.kv_cache import PagedCache, pages_for
from moelab.engine.sequence import Sampling, Sequence
from moelab.engine.timeline import Timeline
from moelab.model.deepseek import DeepSeek
from moelab.results import Provenance, Record

BENCH = "attention_ways"
ATTENTION = ("bmm_k", "mla", "bmm_v")
WAYS = ("absorbed", "expanded")


@dataclass(frozen=True)
class Both:
    """Of one q_len: samples of attention's time by way; how far the hidden states lie apart, over the largest of them;
    the share of tokens whose likeliest successor is the same."""

    q_len: int
    us: dict[str, list[float]]
    difference: float
    same_top1: float


@torch.no_grad()
def both(model: DeepSeek, tokens: list[int], q_lens: Many[int], repeats: int = 5, warmup: int = 1) -> list[Both]:
    """`model` whole, in one process, for steps of as many tokens as the text has; each of `q_lens` below its length."""
    pages = pages_for(len(tokens))
    cache = PagedCache(model.num_caches, pages, model.config.latent_dim, model.embed_w.dtype, model.embed_w.device)
    sequence = Sequence(0, list(tokens), Sampling(1), pages=list(range(pages)))
    timeline = Timeline(model.embed_w.device)

    def run(q_len: int, way: str) -> tuple[torch.Tensor, float]:
        start = len(tokens) - q_len
        piece = Piece(sequence, start, tokens[start:])
        batch = lay_out([piece], model.embed_w.device, True, q_len if way == "absorbed" else 0)
        timeline.begin()
        state = model.begin(batch, cache.rows)
        run_layers(model, state, observe=timeline)
        hidden = model.finish(state)
        return hidden, sum(s.end_us - s.start_us for s in timeline.spans() if s.stage in ATTENTION)

    run(len(tokens), "expanded")
    found = []
    for q_len in q_lens:
        us: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(warmup + repeats):
            hidden = {}
            for way in WAYS:
                hidden[way], took = run(q_len, way)
                us[way] += [took] if repeat >= warmup else []
        a, b = (hidden[way].float() for way in WAYS)
        top = [model.logits(x).argmax(-1) for x in (hidden[way] for way in WAYS)]
        same = (top[0] == top[1]).float().mean()
        found.append(Both(q_len, us, float((a - b).abs().max() / b.abs().max()), float(same)))
    return found


def records(found: Many[Both], provenance: Provenance, model: str, kv_len: int, warmup: int = 1) -> list[Record]:
    """{way, q_len}: us of attention in all layers of a step."""
    return [
        Record.from_samples(
            samples, bench=BENCH, backend="reference", metric="attention", unit="us", clock="wall", warmup=warmup,
            params={"way": way, "q_len": one.q_len, "kv_len": kv_len, "model": model}, provenance=provenance,
        )
        for one in found
        for way, samples in one.us.items()
    ]  # fmt: skip
