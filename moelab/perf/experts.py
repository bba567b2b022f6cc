"""How many experts a batch wakes, and how many places a token is sent to.

**Activated experts.** A decode step reads the weights of every expert that at least one token chose. If each of T
tokens chooses k of E experts, any set as likely as any other and independently of the other tokens, an expert
stays asleep with probability (1 − k/E)^T. Of the e = E/EP experts of a GPU are then awake, on average,

    act_e = e · (1 − (1 − k/E)^T),      T = B·q·DP tokens of the whole deployment.

The group limit leaves k/E as it is, by symmetry, so it does not change this. Real routing does: texts repeat
themselves, so fewer experts wake than the formula says (notebooks/00_start_here shows by how many).

**Destinations.** Kernels that send a token once per place (rank or node), not once per expert, save where two of
its experts share a place. Without groups, a place with p of the E experts is missed with probability
C(E−p, k)/C(E, k). With groups the k experts lie in G of N groups of s = E/N: a place inside a group can be hit
only if that group is kept; a place of several groups has j of them kept with hypergeometric probability.
"""

from __future__ import annotations

from math import comb

import numpy as np

from moelab.config import ConfigError, ModelConfig, ParallelConfig


def total_tokens(batch: int, q_len: int, parallel: ParallelConfig) -> int:
    """T = B·q·DP: tokens of a step in the whole deployment. B counts the requests of one DP group."""
    return batch * q_len * parallel.dp


def active_experts(tokens, model: ModelConfig, parallel: ParallelConfig):
    """act_e: expected routed experts of one GPU and layer that T `tokens` (number or array) wake."""
    local = model.n_routed_experts / parallel.ep
    share = model.num_experts_per_tok / model.n_routed_experts
    return local * (1 - (1 - share) ** np.asarray(tokens, dtype=float))[()]


def tokens_per_expert(batch: int, q_len: int, model: ModelConfig, parallel: ParallelConfig) -> float:
    """Mean rows of one expert's GEMM: B·q·k·DP / E."""
    return total_tokens(batch, q_len, parallel) * model.num_experts_per_tok / model.n_routed_experts


def destinations(places: int, model: ModelConfig, group_limited: bool = True) -> float:
    """Expected number of distinct places, out of `places` with equal shares of the experts (ranks: EP; nodes:
    EP / GPUs per node), that hold at least one of a token's k experts. The sender's own place counts like any.

    Raises ConfigError where experts or groups do not divide evenly over the places.
    """
    experts, k = model.n_routed_experts, model.num_experts_per_tok
    if places < 1 or experts % places:
        raise ConfigError(f"places is {places}: legal are the divisors of {experts} experts")
    here = experts // places
    groups, kept = (model.n_group, model.topk_group) if group_limited else (1, 1)
    size = experts // groups
    pool = kept * size  # experts that a token may choose from, once its groups are settled
    if size % here == 0:
        return places * kept / groups * (1 - comb(pool - here, k) / comb(pool, k))
    if here % size:
        raise ConfigError(f"places is {places}: groups of {size} experts straddle places of {here}")
    inside = here // size  # whole groups of this place
    missed = 0.0
    for j in range(max(0, kept - (groups - inside)), min(inside, kept) + 1):
        chance = comb(inside, j) * comb(groups - inside, kept - j) / comb(groups, kept)
        missed += chance * comb(pool - j * size, k) / comb(pool, k)
    return places * (1 - missed)
