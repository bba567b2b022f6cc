"""One setting of an exchange that is timed, what it has to move, and the least time in which that can be done.

**Bound.** A token crosses to a rank once at least, however many of its experts are there, and its outputs come back
once at least, summed there. With the copies that the busiest rank sends or takes in,

    dispatch ≥ t0 + max(copies · (H·b + 4S + 16 + 8K) / link,   (x read + rows written) / memory)
    combine  ≥ t0 + max(copies · 2H / link,                     (outputs read + sums written) / memory)

t0: a flag to a peer and the peer's back, measured in the same run; link: the line rate of one direction; memory: its
data sheet. Link and memory may work at once, hence the larger of the two, not their sum. 16 + 8K bytes are a header
and the ids and weights that go with a token. For an exchange that sends a row per expert, or a padded block, the bound
is the same: it is the task's, not the method's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from moelab.bench.alltoall_routing import draw
from moelab.config import ConfigError, ParallelConfig

PAYLOADS = {"fp8": 1, "bf16": 2}  # bytes of a value
METADATA_BYTES, ID_AND_WEIGHT_BYTES = 16, 8


@dataclass(frozen=True)
class Setting:
    """`tokens` of each DP group, all of which bring as many."""

    dp: int
    tp: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    payload: str
    routing: str
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "tokens", "hidden", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give 1 or more")
        if self.payload not in PAYLOADS:
            raise ConfigError(f"dtype is {self.payload!r}: legal are {', '.join(map(repr, PAYLOADS))}")
        if self.experts % self.ep:
            raise ConfigError(f"experts is {self.experts}, which does not divide over dp·tp = {self.ep} ranks")
        if self.top_k > self.experts:
            raise ConfigError(f"top_k is {self.top_k}: there are {self.experts} experts")

    @property
    def ep(self) -> int:
        return self.dp * self.tp

    @property
    def local_experts(self) -> int:
        return self.experts // self.ep

    @property
    def num_scales(self) -> int:
        return -(-self.hidden // 128) if self.payload == "fp8" else 0

    @property
    def row_bytes(self) -> int:
        """A dispatched token: values and float32 scales."""
        return self.hidden * PAYLOADS[self.payload] + 4 * self.num_scales

    @property
    def packet_bytes(self) -> int:
        """The same with a header and the token's ids and weights."""
        return self.row_bytes + METADATA_BYTES + ID_AND_WEIGHT_BYTES * self.top_k

    @property
    def output_bytes(self) -> int:
        return 2 * self.hidden

    def params(self) -> dict[str, int | str]:
        """As they stand in a Record. `tokens` are a DP group's."""
        params = asdict(self) | {"ep": self.ep}
        del params["seed"]
        return params

    def parallel(self) -> ParallelConfig:
        return ParallelConfig(self.dp, self.tp, gpus_per_node=max(8, self.ep))

    def ids(self) -> list[np.ndarray]:
        """The routing of each DP group, [tokens, top_k] int32, the same wherever it is drawn."""
        generator = np.random.default_rng([self.seed, self.tokens])
        return [draw(self.routing, self.tokens, self.experts, self.top_k, self.ep, generator) for _ in range(self.dp)]


@dataclass(frozen=True)
class Copies:
    """[ep, ep]: what rank s (row) sends to rank d (column) in dispatch, the own rank included: `tokens`, each once a
    rank, and `rows`, one for each (token, expert)."""

    setting: Setting
    tokens: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, setting: Setting, ids: Sequence[np.ndarray] | None = None) -> Copies:
        tokens, rows = (np.zeros((setting.ep, setting.ep), int) for _ in range(2))
        for group, chosen in enumerate(setting.ids() if ids is None else ids):
            there = (chosen // setting.local_experts)[..., None] == np.arange(setting.ep)  # [T, K, ep]
            for i in range(setting.tp):  # TP rank i sends tokens i, i + tp, …
                tokens[group * setting.tp + i] = there[i :: setting.tp].any(1).sum(0)
                rows[group * setting.tp + i] = there[i :: setting.tp].sum((0, 1))
        return cls(setting, tokens, rows)

    def home(self, sent: np.ndarray) -> np.ndarray:
        """[ep, ep]: what goes back: to every TP rank of the group that a row came from."""
        tp = self.setting.tp
        by_group = sent.reshape(self.setting.dp, tp, -1).sum(1)  # [dp, ep]
        return by_group.T.repeat(tp, 1)

    def sent_bytes(self, scheme: str = "rank", returned: str = "sum", value_bytes: int = 2) -> tuple[int, int]:
        """(dispatch, combine): what the rank that sends most puts on the link. `scheme`: a token once a "rank", or a
        row for each "expert"; `returned`: one "sum" of a rank for a token, or all "rows", of `value_bytes` a value."""
        setting = self.setting
        out = self.tokens * setting.packet_bytes if scheme == "rank" else self.rows * setting.row_bytes
        back = self.home(self.tokens if returned == "sum" else self.rows) * setting.hidden * value_bytes
        return int(_away(out).sum(1).max()), int(_away(back).sum(1).max())


@dataclass(frozen=True)
class Bound:
    """Least times in us; see the module's text."""

    dispatch: float
    combine: float

    @property
    def pair(self) -> float:
        return self.dispatch + self.combine


def bound(copies: Copies, t0_us: float, link_gb_s: float, memory_gb_s: float) -> Bound:
    """t0: the floor of one direction; rates in GB/s of a GPU, of one direction of its link."""
    setting = copies.setting
    sent, back = _away(copies.tokens), _away(copies.home(copies.tokens))
    rows = copies.rows.sum(0).max()  # of the busiest rank's experts
    mine = setting.tokens / setting.tp

    def least(matrix: np.ndarray, bytes_each: int, local: float) -> float:
        busiest = max(matrix.sum(1).max(), matrix.sum(0).max())
        return t0_us + max(busiest * bytes_each / link_gb_s, local / memory_gb_s) / 1e3

    return Bound(
        least(sent, setting.packet_bytes, (mine + rows) * setting.row_bytes),
        least(back, setting.output_bytes, (rows + setting.tokens) * setting.output_bytes),
    )


def slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """The largest of each repetition over the ranks, in order. Raises ValueError if their numbers differ."""
    return [max(times) for times in zip(*of_ranks, strict=True)]


def _away(matrix: np.ndarray) -> np.ndarray:
    return matrix * (1 - np.eye(len(matrix), dtype=int))
