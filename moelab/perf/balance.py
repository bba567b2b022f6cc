"""Where copies of experts stand so that GPUs get equal work, and how unequal it is.

The step waits for the GPU with the most rows, so what counts is λ = max / mean of the rows per GPU. Two things raise
it:

 * structure: some experts are chosen more often, in all steps. Known from earlier steps, so it can be planned for.
 * chance: a step has few tokens, and they do not fall evenly even where the router is even. No plan helps.

Planning as deepseek-ai/EPLB does ("global" policy), in two greedy steps. `replicate`: with more slots than experts, the
next copy goes to the expert with the most rows per copy. `pack`: the copies, heaviest first, each go to the GPU with
the least load that has a free slot (and, if there is one, does not hold that expert yet: two copies on one GPU share
nothing). A token is sent to any copy of its expert, so copies share the rows evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moelab.config import ConfigError


@dataclass(frozen=True)
class Placement:
    """`slots[g]`: the experts of GPU g, as many on every GPU; `copies[e]`: how often expert e stands somewhere."""

    slots: np.ndarray  # [GPUs, slots of a GPU] int
    copies: np.ndarray  # [E] int

    def loads(self, rows: np.ndarray) -> np.ndarray:
        """[…, GPUs]: rows of each GPU for the `rows` [..., E] of the experts, shared evenly by their copies."""
        return (np.asarray(rows, dtype=float) / self.copies)[..., self.slots].sum(-1)


def in_order(num_experts: int, gpus: int) -> Placement:
    """Experts 0, 1, … in order, as many on every GPU: what a checkpoint gives."""
    if gpus < 1 or num_experts % gpus:
        legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ConfigError(f"gpus is {gpus}: {num_experts} experts divide only over {legal}")
    return Placement(np.arange(num_experts).reshape(gpus, -1), np.ones(num_experts, dtype=int))


def balanced(rows: np.ndarray, gpus: int, redundant: int = 0) -> Placement:
    """Placement of the experts of one layer and `redundant` copies beside them, planned for `rows` [E].

    Raises ConfigError where experts and copies do not fill all GPUs alike."""
    rows = np.asarray(rows, dtype=float)
    total = len(rows) + redundant
    if redundant < 0 or gpus < 1 or total % gpus:
        fewest = -len(rows) % max(gpus, 1)
        raise ConfigError(
            f"redundant is {redundant}: {len(rows)} experts and the copies have to fill {gpus} GPUs alike; "
            f"legal are {fewest}, {fewest + gpus}, {fewest + 2 * gpus}, …"
        )
    copies = replicate(rows, total)
    return Placement(pack(rows, copies, gpus), copies)


def replicate(rows: np.ndarray, slots: int) -> np.ndarray:
    """[E] copies of each expert, one at least, `slots` in all."""
    copies = np.ones(len(rows), dtype=int)
    for _ in range(slots - len(rows)):
        copies[np.argmax(rows / copies)] += 1
    return copies


def pack(rows: np.ndarray, copies: np.ndarray, gpus: int) -> np.ndarray:
    """[GPUs, slots]: which expert's copy stands where."""
    each = int(copies.sum()) // gpus
    weights = rows / copies
    held: list[list[int]] = [[] for _ in range(gpus)]
    load = np.zeros(gpus)
    for expert in sorted(range(len(rows)), key=lambda e: -weights[e]):
        for _ in range(copies[expert]):
            free = [g for g in range(gpus) if len(held[g]) < each]
            best = min(free, key=lambda g: (expert in held[g], load[g], g))
            held[best].append(expert)
            load[best] += weights[expert]
    return np.array(held)


def imbalance(loads: np.ndarray) -> np.ndarray | float:
    """λ = max / mean over the last axis."""
    loads = np.asarray(loads, dtype=float)
    return (loads.max(-1) / loads.mean(-1))[()]


def by_chance(
    tokens: int, top_k: int, gpus: int, rng: np.random.Generator, shares: np.ndarray | None = None, draws: int = 200
) -> np.ndarray:  # fmt: skip
    """[draws] λ of one step of `tokens` tokens in all, each row falling on GPU g with `shares`[g] (even by default),
    independently. A token's k experts differ, which makes real steps a little more even: by (E − k)/E in variance."""
    shares = np.full(gpus, 1 / gpus) if shares is None else np.asarray(shares) / np.sum(shares)
    return imbalance(rng.multinomial(tokens * top_k, shares, size=draws))


def uneven_experts(num_experts: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """[E] made-up shares of rows with mean 1, log-normal, whose standard deviation is `spread` on average. The shape is
    an assumption; it was fitted to real routing of DeepSeek-V3 (MMLU-Pro) in DeepEP's pull request 393."""
    sigma = np.sqrt(np.log(1 + spread**2))
    rows = rng.lognormal(-(sigma**2) / 2, sigma, num_experts)
    return rows / rows.mean()
