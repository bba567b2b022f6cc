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

from moelab.config import ConfigError, ModelConfig


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


def even_ids(steps: int, tokens: int, model: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    """[steps, tokens, k] of a router without preferences: every token keeps some groups and of them k experts, any as
    likely as any other. Exact, where `by_chance` is quick."""
    groups = rng.permuted(np.tile(np.arange(model.n_group), (steps, tokens, 1)), axis=-1)[..., : model.topk_group]
    size = model.n_routed_experts // model.n_group
    pool = (groups[..., None] * size + np.arange(size)).reshape(steps, tokens, -1)
    return rng.permuted(pool, axis=-1)[..., : model.num_experts_per_tok]


def uneven_experts(num_experts: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """[E] made-up shares of rows with mean 1, log-normal, whose standard deviation is `spread` on average. The shape is
    an assumption; it was fitted to real routing of DeepSeek-V3 (MMLU-Pro) in DeepEP's pull request 393."""
    sigma = np.sqrt(np.log(1 + spread**2))
    rows = rng.lognormal(-(sigma**2) / 2, sigma, num_experts)
    return rows / rows.mean()


def rows_by_expert(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """[layers, E]: rows of each expert over everything in `ids` [texts, layers, positions, K]; -1 counts nowhere."""
    layers = np.moveaxis(np.asarray(ids), 1, 0).reshape(ids.shape[1], -1)
    return np.stack([np.bincount(x[x >= 0], minlength=num_experts) for x in layers])


def rows_by_step(ids: np.ndarray, tokens: int, num_experts: int) -> np.ndarray:
    """[layers, steps, E]: rows of each expert in steps of one token from each of `tokens` texts, as in decoding.
    `ids` [texts, layers, positions, K]; texts that do not fill a step are left out."""
    texts, layers, positions, k = ids.shape
    if not 1 <= tokens <= texts:
        raise ConfigError(f"tokens is {tokens}: legal are 1 to {texts}, the number of texts")
    steps = np.asarray(ids)[: texts // tokens * tokens].reshape(-1, tokens, layers, positions, k)
    steps = steps.transpose(2, 0, 3, 1, 4).reshape(layers, -1, tokens * k)
    chosen = steps[..., None] == np.arange(num_experts)
    return chosen.sum(-2)


def places_by_token(ids: np.ndarray, num_experts: int, places: int) -> float:
    """Mean number of distinct places, out of `places` with equal runs of experts, that a token of `ids` [..., K] goes
    to; the model of it is `moelab.perf.experts.destinations`."""
    at = np.sort(np.asarray(ids) // (num_experts // places), axis=-1)
    return float((1 + (np.diff(at, axis=-1) != 0).sum(-1)).mean())
