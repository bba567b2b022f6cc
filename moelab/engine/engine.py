"""The engine of one rank: takes requests, steps, gives tokens.

Every rank of a deployment calls `step` again and again. A step makes the same exchanges on every rank, whatever its DP
group has to do, nothing included: no rank tells another how large its batch is. A group without requests learns from
the bit that travels with each dispatch whether any group still has some; when none has, `all_idle` is true on all ranks
after the same step, and they may stop together.

A step in which every request brings one token and its drafts, at most, has a known shape and comes from
`moelab.engine.graphs` where batch sizes are given; any other, with prompts in it, is laid out anew and runs eagerly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from moelab.config import ConfigError, MoelabError
from moelab.engine.attention import decode_for
from moelab.engine.batch import MAX_ABSORBED_Q_LEN, Piece, choose, lay_out, pieces_of
from moelab.engine.decode import Output, decode_body, run_model
from moelab.engine.executor import check_overlap
from moelab.engine.graphs import DecodeGraphs, Pool, places_for, uncapturable
from moelab.engine.kv_cache import PAGE_SIZE, PagedCache, pages_for
from moelab.engine.places import Inputs, Places
from moelab.engine.sampler import Opinion
from moelab.engine.sequence import Sampling, Sequence
from moelab.engine.speculative import Acceptance, Drafter, verify
from moelab.engine.timeline import Timeline
from moelab.model.deepseek import DeepSeek
from moelab.ops.multiprocessors import at_most


@dataclass(frozen=True)
class Token:
    """One new token of a request."""

    sequence: Sequence
    id: int
    last: bool


class Engine:
    """Continuous batching over one rank's model; the ranks of a TP group must be given the same requests."""

    def __init__(
        self,
        model: DeepSeek,
        cache_tokens: int = 16384,
        overlap: str = "none",
        draft_tokens: int = 0,
        *,
        batch_sizes: Iterable[int] = (),
        capture: bool = True,
        cache_dtype: torch.dtype | None = None,
        max_kv_len: int | None = None,
        compute_sms: int | None = None,
    ):
        """`cache_tokens`: what the cache holds. A step takes as many tokens as the model's exchange was made for.

        The same on every rank: `overlap`, none, dispatch or microbatch (`moelab.stages`); `draft_tokens`, how many the
        MTP layer drafts in a step (`moelab.engine.speculative`); `batch_sizes`, of the decode steps with a fixed shape,
        none if empty. On a GPU those are captured in CUDA graphs, unless `capture` is False; the construction is then
        collective. `cache_dtype`: float8_e4m3fn, or by default the model's. `max_kv_len`: tokens of the longest
        request, by default all that the cache holds; steps of fixed shape keep a page table of it for each request.

        Not compared: `compute_sms`, how many multiprocessors our kernels share their work among
        (`moelab.ops.multiprocessors`, which says what does not follow), None for all; what the exchange takes is a
        setting of its group (`default_group`, `shadow_rank`), and ranks may differ in it as well.

        With a `Timeline` set as `timeline`, the stages of each step are recorded in it, and no graph is replayed.
        Before the first exchange ranks compare these settings, and where they differ all raise `ConfigError`.
        """
        check_overlap(overlap)
        if draft_tokens < 0:
            raise MoelabError(f"draft_tokens is {draft_tokens}: give 0 or more")
        self.model, self.overlap = model, overlap
        self.device = model.embed_w.device
        self.cache = PagedCache(
            model.num_caches,
            pages_for(cache_tokens),
            model.config.latent_dim,
            cache_dtype or model.arithmetic.dtype,
            self.device,
        )
        held = self.cache.num_pages * PAGE_SIZE
        self.max_kv_len = min(held, max_kv_len or held)
        self.drafter = Drafter(model, self.cache.rows, draft_tokens, overlap) if draft_tokens else None
        self.acceptance = Acceptance.none(draft_tokens)
        self.q_len = 1 + draft_tokens
        self.max_absorbed_q_len = max(MAX_ABSORBED_Q_LEN, self.q_len)
        self.timeline: Timeline | None = None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.all_idle = False
        sizes = sorted(batch_sizes)
        # A rank with others would make exchanges that its peers do not, and be waited for in vain or taken for another.
        self._to_agree = dict(overlap=overlap, draft_tokens=draft_tokens, batch_sizes=sizes, capture=capture)
        self.compute_sms = compute_sms
        with at_most(compute_sms, self.device):
            self.graphs = self._make_graphs(sizes, capture) if sizes else None

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
        if pages_for(self._room(sequence)) > self.cache.num_pages:
            self.cache.take(self._room(sequence))  # raises
        if sequence.max_cached > self.max_kv_len:
            raise MoelabError(
                f"a request of {sequence.max_cached} tokens exceeds max_kv_len, {self.max_kv_len}: shorten it, or "
                "construct the engine with more"
            )
        self.waiting.append(sequence)
        return sequence

    def step(self) -> list[Token]:
        """Run one step and give its new tokens. Collective over all ranks."""
        with at_most(self.compute_sms, self.device):
            return self._step()

    def _step(self) -> list[Token]:
        self._agree()
        if self.timeline is not None:
            self.timeline.begin()
        self._admit()
        most = None if self.graphs is None else self.graphs.max_batch
        pieces = pieces_of(choose(self.running, self.model.all_to_all.spec.max_tokens, most))
        output, first = self._forward(pieces)
        output.fetch()
        ahead = self.drafter.follow(pieces, first, output, self.timeline) if self.drafter else None
        ends = [row + len(piece.tokens) for row, piece in zip(first, pieces, strict=True)]
        done = [(p, end) for p, end in zip(pieces, ends, strict=True) if _num_drafts(p) >= 0]  # not within a prompt
        rows = [(piece.sequence, list(range(end - 1 - _num_drafts(piece), end))) for piece, end in done]
        opinions = iter(output.opinions(self.model, rows))
        all_idle = output.all_idle
        self.all_idle = not pieces if all_idle is None else all_idle
        tokens, fed = [], []
        for piece, row in zip(pieces, first, strict=True):
            sequence = piece.sequence
            tokens += self._advance(piece, next(opinions) if _num_drafts(piece) >= 0 else None)
            if not sequence.finished:
                fed.append((sequence, piece.start, range(row, row + sequence.num_cached - piece.start)))
        if self.drafter is not None:
            self.drafter.draft(fed, output.hidden, bool(pieces), self.timeline, ahead)
        self.running = [sequence for sequence in self.running if not sequence.finished]
        return tokens

    def run(self):
        """Step until no rank has work, yielding tokens as they come. Collective: all ranks must exhaust it."""
        self.all_idle = False
        while not self.all_idle:
            yield from self.step()

    def _agree(self) -> None:
        """Once, before the first exchange, which waits for all ranks as well."""
        if self._to_agree:
            self.model.all_to_all.agree(**self._to_agree)
            self._to_agree = {}

    def _make_graphs(self, sizes: list[int], capture: bool) -> DecodeGraphs:
        all_to_all, config = self.model.all_to_all, self.model.config
        spec = all_to_all.spec
        captures = capture and self.device.type == "cuda"
        if captures and (why := uncapturable(self.model)):
            raise ConfigError(f"{why}, or give capture=False")
        if sizes[-1] * self.q_len > spec.max_tokens:
            raise ConfigError(
                f"a batch of {sizes[-1]} requests with {self.q_len} tokens each exceeds the exchange's max_tokens, "
                f"{spec.max_tokens}: give smaller batch sizes, or construct the model with more"
            )
        pool = Pool() if captures else None
        self._agree()
        max_kv_len = min(config.max_position_embeddings, self.max_kv_len) + self.q_len  # filled up behind its end

        halves, fp8_cache = self.overlap == "microbatch", not isinstance(self.cache.rows, torch.Tensor)

        def places(q_len: int) -> list[Places]:
            hidden = config.hidden_size if self.drafter else 0
            inputs = Inputs(sizes[-1], q_len, self.device, hidden, self.model.arithmetic.dtype)
            return places_for(inputs, sizes, halves, decode_for(self.model, max_kv_len, q_len, fp8_cache))

        mine = places(self.q_len)
        graphs = DecodeGraphs(decode_body(self.model, self.cache.rows, self.overlap), mine, capture, pool)
        if self.drafter is not None:
            one = places(1) if self.drafter.draft_tokens > 1 else None
            self.drafter.use_graphs(mine, one, lambda body, mine: DecodeGraphs(body, mine, capture, pool))
        return graphs

    def _forward(self, pieces: list[Piece]) -> tuple[Output, list[int]]:
        """The step's output, and the first row of each piece."""
        if self.graphs is not None and self.graphs.serves(pieces):
            return self.graphs.run(pieces, observe=self.timeline)
        batch = lay_out(pieces, self.device, bool(pieces), self.max_absorbed_q_len)
        output = run_model(self.model, self.cache.rows, self.overlap, batch, self.timeline)
        return output, [0, *accumulate(len(p.tokens) for p in pieces)][: len(pieces)]

    def _room(self, sequence: Sequence) -> int:
        """Rows of cache it may come to need. A step of fixed shape fills it up behind its last token."""
        return sequence.max_cached + (self.q_len if self.graphs is not None else 0)

    def _admit(self) -> None:
        """Move waiting requests to the running ones while the cache has room for all they may come to need."""
        while self.waiting:
            pages = self.cache.take(self._room(self.waiting[0]))
            if pages is None:
                return
            sequence = self.waiting.pop(0)
            sequence.pages = pages
            self.running.append(sequence)

    def _advance(self, piece: Piece, opinion: Opinion | None) -> list[Token]:
        """Take in what was fed of a request; its new tokens, none within a prompt."""
        if opinion is None:
            piece.sequence.num_cached += len(piece.tokens)
            return []
        num_drafts = _num_drafts(piece)
        return self._extend(piece.sequence, verify(opinion, piece.sequence, num_drafts), num_drafts)

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


def _num_drafts(piece: Piece) -> int:
    """How many of its tokens are drafts; negative within a prompt."""
    return piece.start + len(piece.tokens) - len(piece.sequence.tokens)
