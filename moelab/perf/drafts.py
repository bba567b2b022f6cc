"""What accepted drafts are worth: 1 + A + A² + … tokens of a step, against the step that they make longer.

A step with n drafts has n + 1 rows of each request to attend, route and exchange, and n passes of the MTP layer. What
waits for memory barely notices, what computes or sends pays for every row; so the price of a draft grows with the
batch, and with it the acceptance from which drafting pays at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moelab.perf.deployment import deployment, tokens_per_step
from moelab.perf.prediction import evaluate
from moelab.perf.tables import Tables

Steps = Mapping[int, Mapping[float, float]]


def step_ms(
    gpu: str, dp: int, batches: Sequence[float], drafts: Sequence[int], *, kv_len: float, tables: Tables, **settings
) -> dict[int, dict[float, float]]:
    """{drafts: {batch of a DP group: ms of a step}}, TP1, the best schedule of each. `settings` as in `predict`."""
    settings["fabric_name"] = settings.pop("fabric", None)

    def ms(n: int, batch: float) -> float:
        chance = 0.5 if n else 0.0  # a step takes as long whatever becomes of its drafts
        d = deployment(gpu, dp, batch=batch, kv_len=kv_len, draft_tokens=n, acceptance=chance, **settings)
        return evaluate(d, tables, interval=False).step_ms

    return {n: {batch: ms(n, batch) for batch in batches} for n in drafts}


def gain(steps: Steps, n: int, acceptance: float) -> dict[float, float]:
    """{batch: percent of speed that `n` drafts bring a request over none}; negative: they cost. `steps` with 0."""
    tokens = tokens_per_step(n, acceptance)
    return {batch: 100 * (tokens * steps[0][batch] / ms - 1) for batch, ms in steps[n].items()}


def break_even(steps: Steps, n: int) -> dict[float, float]:
    """{batch: acceptance from which `n` drafts pay}, by halving; above 1 they never do, and the excess is not a chance
    but what is missing (1 + a token of one draft)."""

    def least(ratio: float) -> float:
        low, high = 0.0, 4.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (low, middle) if tokens_per_step(n, middle) >= ratio else (middle, high)
        return high

    return {batch: least(ms / steps[0][batch]) for batch, ms in steps[n].items()}


def best(steps: Steps, acceptance: float) -> dict[float, int]:
    """{batch: the number of drafts that gives a request most tokens in a second}; the fewest of equals."""
    return {
        batch: max(sorted(steps), key=lambda n: tokens_per_step(n, acceptance) / steps[n][batch]) for batch in steps[0]
    }


def tokens(acceptance: Sequence[float], drafts: int) -> float:
    """Tokens of a step with so many drafts, from the chance of each depth if all before it were accepted."""
    total = chance = 1.0
    for a in acceptance[:drafts]:
        chance *= a
        total += chance
    return total
