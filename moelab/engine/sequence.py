"""A request and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: `temperature` 0 takes the likeliest; otherwise drawn, reproducibly from `seed`."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Sequence:
    """Prompt and output ids, and how many of them the cache holds."""

    id: int
    tokens: list[int]
    sampling: Sampling
    num_prompt: int = field(init=False)
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    finished: bool = False
    drafts: list[int] = field(default_factory=list)  # guesses of what follows `tokens`
    draft_probabilities: list = field(default_factory=list)  # of each [vocab], what it was drawn from; None if greedy

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def max_cached(self) -> int:
        """Rows of cache it may come to need; its last token is never fed back."""
        return self.num_prompt + self.sampling.max_tokens - 1
