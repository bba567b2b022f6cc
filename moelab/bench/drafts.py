"""What drafts bring on real text: acceptance by depth, tokens of a step, and how long the step is.

Requests go on from texts that the model was not trained on; all of them decode together, with each number of drafts in
an engine of its own. The engines' steps take turns, and a turn is timed only while every request of every engine still
decodes, so that a disturbance of the machine meets all alike. Then

    speed of a request = tokens of a step and request / time of a step

and what 1 + A tokens bring is seen beside what the longer step costs: the MTP layer's passes, and more rows to verify.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch

from moelab.bench.timer import BenchError
from moelab.engine.engine import Engine
from moelab.engine.sequence import Sampling
from moelab.model.deepseek import DeepSeek
from moelab.results import Provenance, Record

BENCH = "drafts"


@dataclass
class Drafted:
    """Of one number of drafts: `us` of the timed steps; `tokens`, of all requests together, of every step in which all
    decoded; accepted and tried by depth over the whole run; `texts`, the tokens of each request."""

    draft_tokens: int
    us: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def acceptance(self) -> list[float]:
        """By depth, of those whose forerunners were all accepted."""
        return [a / t for a, t in zip(self.accepted, self.tried, strict=True)]

    @property
    def standard_errors(self) -> list[float]:
        """Of `acceptance`, as if every draft were a throw of its own."""
        return [sqrt(a * (1 - a) / t) for a, t in zip(self.acceptance, self.tried, strict=True)]


@torch.no_grad()
def drafted(
    model: DeepSeek, prompts: list[list[int]], max_tokens: int, drafts: Sequence[int], temperature: float = 0.0,
    seed: int = 0, warmup: int = 2,
) -> list[Drafted]:  # fmt: skip
    """All `prompts` with each of `drafts` (0: none), to `max_tokens` new tokens or their end. `model` whole, in one
    process, for steps of all requests with their drafts; prompts are fed in pieces where it takes no more at once."""
    room = sum(len(ids) + max_tokens + 64 for ids in prompts)
    found, engines, turns = [Drafted(n) for n in drafts], [], 0
    for n in drafts:
        engine = Engine(model, room, draft_tokens=n)
        sequences = [engine.add(i, ids, Sampling(max_tokens, temperature, seed)) for i, ids in enumerate(prompts)]
        engines.append((engine, sequences))
    while any(engine.running or engine.waiting for engine, _ in engines):
        taken = {}
        for one, (engine, sequences) in zip(found, engines, strict=True):
            if not (engine.running or engine.waiting):
                continue
            decoding = all(s.num_output and not s.finished for s in sequences)
            start = time.perf_counter()
            tokens = engine.step()
            us = (time.perf_counter() - start) * 1e6
            if decoding and not any(s.finished for s in sequences):
                taken[one.draft_tokens] = us
                one.tokens.append(len(tokens))
        if len(taken) == len(found):
            turns += 1
            for one in found if turns > warmup else ():
                one.us.append(taken[one.draft_tokens])
    for one, (engine, sequences) in zip(found, engines, strict=True):
        one.accepted, one.tried = engine.acceptance.accepted, engine.acceptance.tried
        one.texts = [s.output for s in sequences]
        if not one.us:
            raise BenchError(
                f"with {one.draft_tokens} drafts no step was timed in which all {len(prompts)} requests decode: "
                f"max_tokens is {max_tokens}, give more; or a model whose steps take more tokens, so that prompts are "
                f"fed sooner (it takes {model.all_to_all.spec.max_tokens})"
            )
    return found


def records(
    found: Sequence[Drafted], provenance: Provenance, model: str, requests: int, temperature: float
) -> list[Record]:
    """Metric "step" in us, "tokens" of a step and request, and for every depth "acceptance" with the drafts tried."""
    made = []
    for one in found:
        params = {"model": model, "batch": requests, "draft_tokens": one.draft_tokens, "temperature": temperature}
        common = {"bench": BENCH, "backend": "reference", "provenance": provenance}
        made.append(Record.from_samples(one.us, metric="step", unit="us", clock="wall", params=params, **common))
        mean = sum(one.tokens) / len(one.tokens) / requests
        made.append(Record.from_samples([mean], metric="tokens", unit="1", clock="none", params=params, **common))
        for depth, (share, tried) in enumerate(zip(one.acceptance, one.tried, strict=True), start=1):
            at = params | {"depth": depth, "tried": tried}
            made.append(Record.from_samples([share], metric="acceptance", unit="1", clock="none", params=at, **common))
    return made
