"""`ExchangeSpec`: everything that all ranks must agree on, and the sizes that follow from it.

Symbols: M `max_tokens` (the most tokens one DP group may send), H hidden, E experts, K top-k, L = E/ep local experts,
S = ceil(H/128) scales per token.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import torch

from moelab.config import ConfigError, ParallelConfig
from moelab.ops.layout import FORMATS, round_up

ALIGN = 128  # rows; the block of a grouped GEMM that must not straddle two experts

PAYLOADS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "f32": torch.float32}
LAYOUTS = ("expert_padded", "contiguous_128")


@dataclass(frozen=True)
class ExchangeSpec:
    """The shape of an exchange. Raises `ConfigError` for what no backend serves."""

    parallel: ParallelConfig
    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    payload: str = "bf16"
    slots: int = 2
    layout: str = "expert_padded"
    scales: str = "row"

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden", "max_tokens", "slots"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}: give a positive integer")
        for name, legal in (("payload", tuple(PAYLOADS)), ("layout", LAYOUTS), ("scales", FORMATS)):
            value = getattr(self, name)
            if value not in legal:
                raise ConfigError(f"{name} is {value!r}: legal are {', '.join(map(repr, legal))}")
        ep = self.parallel.ep
        if self.num_experts % ep:
            legal = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ConfigError(
                f"num_experts is {self.num_experts}, which does not divide over ep = {ep} ranks: "
                f"legal ep for it are {legal}"
            )
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k is {self.top_k}: legal are 1…{self.num_experts}, the number of experts")
        if self.row_bytes % 16:
            raise ConfigError(
                f"hidden is {self.hidden}: a {self.payload} row must be a multiple of 16 bytes, "
                f"so hidden a multiple of {16 // self.payload_dtype.itemsize}"
            )
        if self.payload != "fp8" and self.scales != "row":
            raise ConfigError(f"scales is {self.scales!r} but a {self.payload} payload has none: leave it at 'row'")

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.parallel.ep

    @property
    def payload_dtype(self) -> torch.dtype:
        """Of `x` and of the rows on the expert side."""
        return PAYLOADS[self.payload]

    @property
    def output_dtype(self) -> torch.dtype:
        """Of the experts' outputs on the way back: never quantised, float32 in the float32 reference."""
        return torch.float32 if self.payload == "f32" else torch.bfloat16

    @property
    def num_scales(self) -> int:
        """Scales per token that travel with it, one for each 128 values; 0 unless the payload is fp8."""
        return -(-self.hidden // 128) if self.payload == "fp8" else 0

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.payload_dtype.itemsize

    @property
    def wire_row_bytes(self) -> int:
        """Bytes of one dispatched row as packed: values, float32 scales, int32 token index."""
        return self.row_bytes + 4 * self.num_scales + 4

    @property
    def output_row_bytes(self) -> int:
        return self.hidden * self.output_dtype.itemsize

    @property
    def header_bytes(self) -> int:
        """One message of counts: has_work and a count for each local expert of the receiver, int32."""
        return 4 * (1 + self.local_experts)

    @property
    def expert_rows(self) -> int:
        """The most rows one expert can get: dp·M, since a token goes to an expert at most once."""
        return self.parallel.dp * self.max_tokens

    @property
    def capacity(self) -> int:
        """Rows of the contiguous_128 layout that always suffice.

        A token has at most min(K, L) rows here and rounding up to 128 adds at most 127 to each expert; nor can any
        expert need more than dp·M rounded up.
        """
        worst = self.expert_rows * min(self.top_k, self.local_experts) + (ALIGN - 1) * self.local_experts
        return min(worst // ALIGN * ALIGN, self.local_experts * round_up(self.expert_rows, ALIGN))

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Of the expert side's rows and outputs: [L, dp·M, H] padded, or [capacity, H] contiguous."""
        if self.layout == "expert_padded":
            return self.local_experts, self.expert_rows, self.hidden
        return self.capacity, self.hidden

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def check_same(rank: int, ours: str, peer: int, theirs: str) -> None:
    """Raise `ConfigError` unless the settings of two ranks, JSON objects, are the same."""
    mine, other = json.loads(ours), json.loads(theirs)
    for name in mine | other:
        if mine.get(name) != other.get(name):
            raise ConfigError(
                f"{name} is {mine.get(name)!r} on rank {rank} but {other.get(name)!r} on rank {peer}: "
                "give every rank the same"
            )
