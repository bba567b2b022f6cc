"""Which experts each token goes to, drawn: the routings of `moelab bench alltoall`. A token has no expert twice.

uniform         any set of K experts as likely as any other
group-limited   DeepSeek-V3's: 4 of 8 groups of experts for each token, all K among those (a rank of EP8 holds one
                group, so that a token goes to 4 ranks at most)
zipf            expert number i in a drawn order is i times rarer than the first
hot             everybody wants the experts of rank 0, which takes in all rows through one port
"""

from __future__ import annotations

import numpy as np

from moelab.config import ConfigError

ROUTINGS = ("uniform", "group-limited", "zipf", "hot")
GROUPS, KEPT_GROUPS = 8, 4


def draw(routing: str, tokens: int, experts: int, top_k: int, ep: int, generator: np.random.Generator) -> np.ndarray:
    """[tokens, top_k] int32, the experts of each token. Raises ConfigError for an unknown routing and for experts that
    do not divide into it."""
    if routing not in ROUTINGS:
        raise ConfigError(f"routing is {routing!r}: legal are {', '.join(map(repr, ROUTINGS))}")
    scores = generator.gumbel(size=(tokens, experts))  # the largest of score + log(weight) are a draw by weight
    if routing == "group-limited":
        if experts % GROUPS or top_k > experts // GROUPS * KEPT_GROUPS:
            raise ConfigError(
                f"routing 'group-limited' takes {KEPT_GROUPS} of {GROUPS} groups: {experts} experts with top_k {top_k} "
                f"do not fit; give experts a multiple of {GROUPS}, at least {2 * top_k}"
            )
        kept = generator.random((tokens, GROUPS)).argsort(1) < KEPT_GROUPS
        scores[~kept.repeat(experts // GROUPS, 1)] -= 1e6
    elif routing == "zipf":
        scores -= np.log(1 + generator.permutation(experts))
    elif routing == "hot":
        scores[:, : experts // ep] += 1e6
    return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32)
