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
from moelab.engine.batch import MAX_ABSORBED_Q_LEN, build, choose
from moelab.engine.executor import check_overlap, run_layers
from moelab.engine.kv_cache import PagedCache, pages_for
from moelab.engine.sequence import Sampling, Sequence
from moelab.engine.speculative import Acceptance, Drafter, verify
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

    def __init__(self, model: DeepSeek, cache_tokens: int = 16384, overlap: str = "none", draft_tokens: int = 0):
        """`cache_tokens`: what the cache holds. A step takes as many tokens as the model's exchange was made for.

        The same on every rank: `overlap`, none, dispatch or microbatch (`moelab.stages`); `draft_tokens`, how many the
        MTP layer drafts in a step (`moelab.engine.speculative`). With a `Timeline` set as `timeline`, the stages of
        each step are recorded in it.
        """
        check_overlap(overlap)
        if draft_tokens < 0:
            raise MoelabError(f"draft_tokens is {draft_tokens}: give 0 or more")
        self.model, self.overlap = model, overlap
        self.device = model.embed_w.device
        self.cache = PagedCache(
            model.num_caches, pages_for(cache_tokens), model.config.latent_dim, model.embed_w.dtype, self.device
        )
        self.drafter = Drafter(model, self.cache.rows, draft_tokens, overlap) if draft_tokens else None
        self.acceptance = Acceptance.none(draft_tokens)
        self.max_absorbed_q_len = max(MAX_ABSORBED_Q_LEN, 1 + draft_tokens)
        self.timeline: Timeline | None = None
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
        batch = build(chosen, self.device, self.max_absorbed_q_len)
        state = self.model.begin(batch, self.cache.rows)
        run_layers(self.model, state, self.overlap, self.timeline)
        hidden = self.model.finish(state)
        tokens, fed, first = [], [], 0
        for sequence, count in chosen:
            start = sequence.num_cached
            tokens += self._advance(sequence, hidden[first : first + count])
            if not sequence.finished:
                fed.append((sequence, start, hidden[first : first + sequence.num_cached - start]))
            first += count
        if self.drafter is not None:
            state = self.drafter.draft(fed, bool(chosen), self.timeline)
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

    def _advance(self, sequence: Sequence, hidden: torch.Tensor) -> list[Token]:
        """Take in the hidden states [n, H] of what was fed of `sequence`; its new tokens, none within a prompt."""
        num_drafts = sequence.num_cached + len(hidden) - len(sequence.tokens)
        if num_drafts < 0:
            sequence.num_cached += len(hidden)
            return []
        new = verify(self.model.logits(hidden[-1 - num_drafts :]), sequence, num_drafts)
        return self._extend(sequence, new, num_drafts)

    def _extend(self, sequence: Sequence, new: list[int], num_drafts: int = 0) -> list[Token]:
        """Append new tokens up to the one that ends the request. Cached is then all but the last of them."""
        eos = self.model.config.eos_token_id
        if eos in new:
            new = new[: new.index(eos) + 1]
        self.acceptance.count(sequence.drafts[:num_drafts], new)
        sequence.drafts, sequence.draft_probabilities = [], []
        sequence.tokens += new
        sequence.num_cached = len(sequence.tokens) - 1
        sequence.finished = new[-1] == eos or sequence.num_output == sequence.sampling.max_tokens
        if sequence.finished:
            self.cache.give_back(sequence.pages)
            sequence.pages = []
        last = len(new) - 1
        return [Token(sequence, token, sequence.finished and i == last) for i, token in enumerate(new)]
