"""What a step brings to one rank of a deployment: rows for each of its experts, and tokens, for T tokens of every DP
group, T = 0 … M.

| routing  | a token's K experts                                                                                  |
|----------|------------------------------------------------------------------------------------------------------|
| equal    | none drawn: of the T·dp·K rows every expert gets as many as any other, to within one                  |
| uniform  | any as likely as any other, within the groups that the model's router keeps (`balance.even_ids`)      |
| zipf     | expert number i in a drawn order is i times rarer than the first, without groups                      |
| tinyseek | by given shares of the experts, without groups: those that tinyseek's router has on held-out text     |

A draw holds M tokens for each group, of which a step takes the first T, so one draw serves every T. There are several
draws, because the layers of a step do not route alike. They do not depend on the rank: the loads of all ranks together
are T·dp·K rows, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moelab.config import ConfigError, ModelConfig, ParallelConfig
from moelab.perf.balance import even_ids
from moelab.perf.experts import destinations

ROUTINGS = ("equal", "uniform", "zipf", "tinyseek")


@dataclass(frozen=True)
class RankLoad:
    """`counts[d, T, e]`: rows for local expert e in draw d; `arrivals[d, T]`: tokens that these rows are of."""

    routing: str
    counts: np.ndarray  # [draws, M + 1, L] int32
    arrivals: np.ndarray  # [draws, M + 1] int32

    @property
    def max_tokens(self) -> int:
        return self.counts.shape[1] - 1


def rank_load(
    routing: str,
    model: ModelConfig,
    parallel: ParallelConfig,
    max_tokens: int,
    rank: int = 0,
    draws: int = 8,
    seed: int = 0,
    shares: np.ndarray | None = None,
) -> RankLoad:
    """The load of `rank`. `shares` [..., E], any positive weights of the experts, are "tinyseek"'s; the rows of several
    dimensions serve one draw after another. Raises ConfigError for arguments that do not fit."""
    if routing not in ROUTINGS:
        raise ConfigError(f"routing is {routing!r}: legal are {', '.join(map(repr, ROUTINGS))}")
    for name, value in (("max_tokens", max_tokens), ("draws", draws)):
        if value < 1:
            raise ConfigError(f"{name} is {value}: give a positive number")
    if not 0 <= rank < parallel.ep:
        raise ConfigError(f"rank is {rank}: legal are 0…{parallel.ep - 1}")
    parallel.check(model)
    if (shares is None) == (routing == "tinyseek"):
        given = "None" if shares is None else "given"
        raise ConfigError(f"shares are {given} with routing {routing!r}: they belong to 'tinyseek', which needs them")
    if routing == "equal":
        return _equal(model, parallel, max_tokens, rank)
    weights = None
    if shares is not None:
        weights = np.asarray(shares, dtype=float).reshape(-1, model.n_routed_experts)
    rng = np.random.default_rng(seed)
    found = []
    for draw in range(draws):
        if routing == "uniform":
            ids = even_ids(parallel.dp, max_tokens, model, rng)
        else:
            chances = (
                1 / (1 + rng.permutation(model.n_routed_experts)) if weights is None else weights[draw % len(weights)]
            )
            groups = [by_weight(chances, max_tokens, model.num_experts_per_tok, rng) for _ in range(parallel.dp)]
            ids = np.stack(groups)
        found.append(_counted(ids, parallel.experts(rank, model.n_routed_experts)))
    counts, arrivals = (np.stack(part).astype(np.int32) for part in zip(*found, strict=True))
    return RankLoad(routing, counts, arrivals)


def by_weight(weights: np.ndarray, tokens: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """[tokens, top_k]: experts of each token, one after another by `weights` [E], none twice. (The largest of
    log(weight) + Gumbel noise are such a draw.)"""
    scores = np.log(weights) + rng.gumbel(size=(tokens, len(weights)))
    return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]


def _counted(ids: np.ndarray, experts: range) -> tuple[np.ndarray, np.ndarray]:
    """ids [dp, M, K] -> counts [M + 1, L], arrivals [M + 1] of the first T tokens of each group."""
    _, tokens, _ = ids.shape
    here = (ids >= experts.start) & (ids < experts.stop)
    _, token, _ = np.nonzero(here)
    cells = np.bincount(token * len(experts) + ids[here] - experts.start, minlength=tokens * len(experts))
    each = np.stack([here.any(-1).sum(0), *cells.reshape(tokens, -1).T], axis=-1)  # [M, 1 + L]
    upto = np.concatenate([np.zeros((1, each.shape[1]), dtype=int), np.cumsum(each, axis=0)])
    return upto[:, 1:], upto[:, 0]


def _equal(model: ModelConfig, parallel: ParallelConfig, max_tokens: int, rank: int) -> RankLoad:
    experts, k = model.n_routed_experts, model.num_experts_per_tok
    tokens = np.arange(max_tokens + 1) * parallel.dp
    mine = np.asarray(parallel.experts(rank, experts))
    rows = (tokens * k)[:, None]
    counts = (mine + 1) * rows // experts - mine * rows // experts
    total = counts.sum(1)
    # Groups that straddle ranks have no formula; a router without groups spreads a little more.
    local, group = experts // parallel.ep, experts // model.n_group
    aligned = group % local == 0 or local % group == 0
    expected = np.rint(tokens * destinations(parallel.ep, model, group_limited=aligned) / parallel.ep).astype(int)
    arrivals = np.clip(expected, np.maximum(counts.max(1), -(-total // min(k, local))), total)
    return RankLoad("equal", counts[None].astype(np.int32), arrivals[None].astype(np.int32))
