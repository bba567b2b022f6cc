"""Speculative decoding with the MTP layer: more tokens from a step, of the same text.

A step takes a request's last token and k drafts of what follows, 1 + k rows in one forward; the model's own opinion
after each row says how many drafts stand. The MTP layer then drafts anew (`moelab.model.mtp`): first it reads every
position that the model has just confirmed, with the model's hidden state and the token that came after, prompts
included; then it goes on from its own output, one position at a time.

**Lossless.** At temperature 0 a draft stands if it is the model's likeliest token, so the text is the plain one. Above
0, with p the model's distribution and q the one that draft x was drawn from, x stands with probability min(1, p(x) /
q(x)); the first that falls is replaced by a draw from max(p − q, 0), normalised. A token then has distribution p: it is
a draft that stands with min(p, q) in all, and replacement gives the rest of p (Leviathan et al., arXiv 2211.17192; Chen
et al., arXiv 2302.01318). Whether a draft stands and what it is are decided by draws of their own.

**The cache.** Rows of drafts that fell lie beyond `num_cached`: the next step begins there and overwrites each before
anything looks so far.

**Steps stay alike.** All ranks make `draft_tokens` passes of the MTP layer in every step, for however many requests,
none included. A request near its end has fewer drafts; it takes no part in the later passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from moelab.config import ConfigError
from moelab.engine.batch import Piece, lay_out
from moelab.engine.decode import Body, Output
from moelab.engine.executor import Observe, run_moe_layers
from moelab.engine.graphs import DecodeGraphs
from moelab.engine.kv_cache import LayerCaches
from moelab.engine.places import Inputs, Places
from moelab.engine.sampler import DRAFT, VERIFY, Opinion, distribution, draw, generator, sample
from moelab.engine.sequence import Sequence
from moelab.model.batch import Batch
from moelab.model.deepseek import DeepSeek


def verify(opinion: Opinion, sequence: Sequence, num_drafts: int) -> list[int]:
    """The next tokens of `sequence`, 1 to 1 + num_drafts: its first drafts as far as they stand, then one of the
    model's own. `opinion` has 1 + num_drafts rows: after the sequence's last token, and after each draft."""
    new: list[int] = []
    for row, draft in enumerate(sequence.drafts[:num_drafts]):
        new.append(_judge(opinion, row, draft, sequence))
        if new[-1] != draft:
            return new
    return [*new, sample(opinion, num_drafts, sequence, ahead=len(new))]


def _judge(opinion: Opinion, row: int, draft: int, sequence: Sequence) -> int:
    """The draft of this row if it stands, otherwise what replaces it (never the draft itself)."""
    if sequence.sampling.temperature == 0:
        return opinion.best[row]
    p, q = distribution(opinion.logits[row], sequence), sequence.draft_probabilities[row]
    source = generator(sequence, row, VERIFY)
    if torch.rand((), generator=source) * q[draft] < p[draft]:
        return draft
    rest = (p - q).clamp(min=0)
    return draw(rest if rest.any() else p, source)  # p = q but for rounding has no rest


@dataclass
class Acceptance:
    """How drafts have fared, by their depth: `tried[i]` of those whose forerunners all stood, `accepted[i]` of them."""

    tried: list[int]
    accepted: list[int]

    @classmethod
    def none(cls, draft_tokens: int) -> Acceptance:
        return cls([0] * draft_tokens, [0] * draft_tokens)

    def count(self, drafts: list[int], new: list[int]) -> None:
        """Of one request and step: what was verified, and the tokens that it came to."""
        for depth, (draft, token) in enumerate(zip(drafts, new, strict=False)):
            self.tried[depth] += 1
            self.accepted[depth] += draft == token


class Ahead(NamedTuple):
    """The first pass of a step, made before the step's tokens were known to the host."""

    output: Output
    first: dict[int, int]  # id(sequence) -> its first row


class Drafter:
    """Drafts for all requests of one rank, `draft_tokens` for each."""

    def __init__(self, model: DeepSeek, cache: LayerCaches, draft_tokens: int, overlap: str):
        """`cache`: the rows of all layers, of which the MTP layer's are the last."""
        if model.mtp is None:
            raise ConfigError(f"draft_tokens is {draft_tokens} and the model has no MTP layer to draft with: give 0")
        most = model.all_to_all.spec.max_tokens
        if draft_tokens >= most:
            raise ConfigError(
                f"draft_tokens is {draft_tokens}: one request then brings {1 + draft_tokens} tokens to a step of at "
                f"most {most}; give {most - 1} or fewer, or construct the model with more max_tokens"
            )
        self.model, self.mtp, self.cache = model, model.mtp, cache
        self.draft_tokens, self.overlap = draft_tokens, overlap
        self.graphs: dict[int, DecodeGraphs] = {}  # by the tokens that a request brings to a pass

    def use_graphs(
        self,
        first: list[Places],
        later: list[Places] | None,
        make: Callable[[Body, list[Places]], DecodeGraphs],
    ) -> None:
        """Take passes of known shape from graphs. `first`: the places of the model's own steps, on which the first pass
        runs as well, for it reads the same positions. `later`: for one token of a request, None if there is but one
        pass. Collective."""
        for places in (first, later) if later else (first,):
            inputs = places[0].inputs

            def body(batch: Batch, observe: Observe | None, inputs: Inputs = inputs) -> Output:
                output = self._pass(batch, inputs.hidden[: batch.num_tokens], observe)
                output.best = self.model.logits(output.hidden).argmax(-1)
                return output

            self.graphs[inputs.q_len] = make(body, places)

    def follow(
        self, pieces: list[Piece], first: list[int], output: Output, observe: Observe | None = None
    ) -> Ahead | None:
        """The first pass behind the model's step of these pieces, without a look at what the step came to. Collective.
        `first`: the first row of each piece.

        At temperature 0 the device knows as much as the host: the token after a row is the likeliest one, and a row
        stands if its draft and all before it were that. So nothing waits between step and pass; places and attention's
        plan are those of the step. None where the step was not of fixed shape, a request is sampled or still in its
        prompt: then it is for `draft` to make the pass.
        """
        graphs = self.graphs.get(1 + self.draft_tokens)
        known = all(p.sequence.sampling.temperature == 0 and p.start == len(p.sequence.tokens) - 1 for p in pieces)
        if graphs is None or output.best is None or not known:
            return None
        inputs, rows = graphs.inputs, len(output.best)
        q_len = inputs.q_len
        drafts, likeliest = inputs.tokens[:rows].view(-1, q_len)[:, 1:], output.best.view(-1, q_len)[:, :-1]
        inputs.real[:rows].view(-1, q_len)[:, 1:] &= (drafts == likeliest).cumprod(-1).bool()
        inputs.tokens[:rows] = output.best
        inputs.hidden[:rows] = output.hidden
        ran = graphs.step(len(pieces)).run(observe)
        return Ahead(ran, {id(p.sequence): row for p, row in zip(pieces, first, strict=True)})

    def draft(
        self,
        fed: list[tuple[Sequence, int, range]],
        hidden: torch.Tensor,
        has_work: bool,
        observe: Observe | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Give every unfinished sequence its next drafts. Collective.

        fed: sequence, first position, and the rows of what the model has confirmed in this step, in its normed hidden
        states [T, H]. `ahead`: the first pass, if `follow` has made it.
        """
        pieces = [Piece(s, start, s.tokens[start + 1 : start + 1 + len(rows)]) for s, start, rows in fed]
        rows = [rows for _, _, rows in fed]
        for depth in range(self.draft_tokens):
            graphs = self.graphs.get(1 if depth else 1 + self.draft_tokens)
            if ahead is not None and depth == 0:
                output, first = ahead.output, [ahead.first[id(piece.sequence)] for piece in pieces]
            elif graphs is not None and graphs.serves(pieces):
                output, first = graphs.run(pieces, [hidden[r.start : r.stop] for r in rows], observe)
            else:
                states = [hidden[r.start : r.stop] for r in rows]
                output, first = self._eager(pieces, states, has_work, observe)
            ends = [row + len(piece.tokens) - 1 for row, piece in zip(first, pieces, strict=True)]
            on = [i for i, piece in enumerate(pieces) if depth < self._wanted(piece.sequence)]
            views = output.fetch().opinions(self.model, [(pieces[i].sequence, [ends[i]]) for i in on])
            for i, view in zip(on, views, strict=True):
                self._propose(pieces[i].sequence, view)
            hidden, rows = output.hidden, [range(ends[i], ends[i] + 1) for i in on]
            pieces = [
                Piece(p.sequence, p.start + len(p.tokens), p.sequence.drafts[-1:]) for p in (pieces[i] for i in on)
            ]

    def _eager(
        self, pieces: list[Piece], hidden: list[torch.Tensor], has_work: bool, observe: Observe | None
    ) -> tuple[Output, list[int]]:
        batch = lay_out(pieces, self.model.embed_w.device, has_work, 1 + self.draft_tokens)
        joined = torch.cat([self.model.embed_w[:0], *hidden])
        return self._pass(batch, joined, observe), [0, *accumulate(len(p.tokens) for p in pieces)][: len(pieces)]

    def _pass(self, batch: Batch, hidden: torch.Tensor, observe: Observe | None) -> Output:
        """The MTP layer over a batch of next tokens and the states [T, H] that they follow."""
        model = self.model
        state = model.begin(batch, self.cache, self.mtp.project(model.embed(batch.tokens), hidden))
        run_moe_layers([self.mtp.layer], state, self.overlap, observe, first=len(model.moe_layers))
        return Output(self.mtp.finish(state))

    def _wanted(self, sequence: Sequence) -> int:
        """None in the middle of a prompt; never more than leave room for the token that follows them."""
        if sequence.num_cached < len(sequence.tokens) - 1:
            return 0
        return min(self.draft_tokens, sequence.sampling.max_tokens - sequence.num_output - 1)

    @staticmethod
    def _propose(sequence: Sequence, opinion: Opinion) -> None:
        """Draft as the request samples; above temperature 0 the distribution is kept for the verdict."""
        if sequence.sampling.temperature == 0:
            draft, q = opinion.best[0], None
        else:
            q = distribution(opinion.logits[0], sequence)
            draft = draw(q, generator(sequence, len(sequence.drafts), DRAFT))
        sequence.drafts.append(draft)
        sequence.draft_probabilities.append(q)
