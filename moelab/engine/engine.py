"""The engine of one rank: takes requests, steps, gives tokens.

Every rank of a deployment calls `step` again and again. A step makes the same exchanges on every rank, whatever its DP
group has to do, nothing included: no rank tells another how large its batch is. A group without requests learns from
the bit that travels with each dispatch whether any group still has some; when none has, `all_idle` is true on all ranks
after the same step, and they may stop together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelab.config import MoelabError
from moelab.engine.batch import build, choose
from moelab.engine.executor import check_overlap, run_layers
from moelab.engine.kv_cache import PagedCache, pages_for
from moelab.engine.sampler import sample
from moelab.engine.sequence import Sampling, Sequence
from moelab.engine.timeline import Timeline
from moelab.model.deepseek import DeepSeek


@dataclass(frozen=True)
class Token:
    """One new token of a request."""

    sequence: Sequence
    id: int
    last: bool


class Engine:
    """Continuous batching over one rank's model; the ranks of a TP group must be given the same requests."""

    def __init__(self, model: DeepSeek, cache_tokens: int = 16384, overlap: str = "none"):
        """`cache_tokens`: what the cache holds. A step takes as many tokens as the model's exchange was made for.
        `overlap`: none, dispatch or microbatch (`moelab.stages`), the same on every rank. With a `Timeline` set
        as `timeline`, the stages of each step are recorded in it."""
        check_overlap(overlap)
        self.model, self.overlap = model, overlap
        self.timeline: Timeline | None = None
        dtype, device = model.embed_w.dtype, model.embed_w.device
        pages = pages_for(cache_tokens)
        self.cache = PagedCache(model.num_caches, pages, model.config.latent_dim, dtype, device)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.all_idle = False

    def add(self, id: int, prompt: list[int], sampling: Sampling) -> Sequence:
        """Queue a request. Raises if it could never run, naming what is too long."""
        sequence = Sequence(id, list(prompt), sampling)
        limit = self.model.config.max_position_embeddings
        if not prompt:
            raise MoelabError("the prompt is empty: give at least one token")
        if sampling.max_tokens < 1:
            raise MoelabError(f"max_tokens is {sampling.max_tokens}: give 1 or more")
        if sequence.max_cached + 1 > limit:
            raise MoelabError(
                f"{len(prompt)} prompt tokens and {sampling.max_tokens} new ones exceed the model's {limit} positions"
            )
        bad = [token for token in prompt if not 0 <= token < self.model.config.vocab_size]
        if bad:
            raise MoelabError(f"token id {bad[0]} is outside the vocabulary of {self.model.config.vocab_size}")
        if pages_for(sequence.max_cached) > self.cache.num_pages:
            self.cache.take(sequence.max_cached)  # raises
        self.waiting.append(sequence)
        return sequence

    def step(self) -> list[Token]:
        """Run one step and give its new tokens. Collective over all ranks."""
        if self.timeline is not None:
            self.timeline.begin()
        self._admit()
        chosen = choose(self.running, self.model.all_to_all.spec.max_tokens)
        state = self.model.begin(build(chosen, self.model.embed_w.device), self.cache.rows)
        run_layers(self.model, state, self.overlap, self.timeline)
        hidden = self.model.finish(state)
        tokens, end = [], 0
        for sequence, count in chosen:
            end += count
            sequence.num_cached += count
            if sequence.num_cached == len(sequence.tokens):
                tokens.append(self._extend(sequence, self.model.logits(hidden[end - 1])))
        self.running = [sequence for sequence in self.running if not sequence.finished]
        all_idle = state.all_idle
        self.all_idle = not chosen if all_idle is None else all_idle
        return tokens

    def run(self):
        """Step until no rank has work, yielding tokens as they come. Collective: all ranks must exhaust it."""
        self.all_idle = False
        while not self.all_idle:
            yield from self.step()

    def _admit(self) -> None:
        """Move waiting requests to the running ones while the cache has room for all they may come to need."""
        while self.waiting:
            pages = self.cache.take(self.waiting[0].max_cached)
            if pages is None:
                return
            sequence = self.waiting.pop(0)
            sequence.pages = pages
            self.running.append(sequence)

    def _extend(self, sequence: Sequence, logits: torch.Tensor) -> Token:
        token = sample(logits, sequence)
        sequence.tokens.append(token)
        at_end = token == self.model.config.eos_token_id
        sequence.finished = at_end or sequence.num_output == sequence.sampling.max_tokens
        if sequence.finished:
            self.cache.give_back(sequence.pages)
            sequence.pages = []
        return Token(sequence, token, sequence.finished)
