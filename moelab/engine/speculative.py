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

from dataclasses import dataclass

import torch

from moelab.config import ConfigError
from moelab.engine.batch import Piece, lay_out
from moelab.engine.executor import Observe, run_moe_layers
from moelab.engine.sampler import DRAFT, VERIFY, distribution, draw, generator, sample
from moelab.engine.sequence import Sequence
from moelab.model.batch import State
from moelab.model.deepseek import DeepSeek


def verify(logits: torch.Tensor, sequence: Sequence, num_drafts: int) -> list[int]:
    """The next tokens of `sequence`, 1 to 1 + num_drafts: its first drafts as far as they stand, then one of the
    model's own. logits float32 [1 + num_drafts, vocab]: after the sequence's last token, and after each draft."""
    new: list[int] = []
    for row, draft, q in zip(logits, sequence.drafts[:num_drafts], sequence.draft_probabilities, strict=False):
        new.append(_judge(row, draft, q, sequence, ahead=len(new)))
        if new[-1] != draft:
            return new
    return [*new, sample(logits[num_drafts], sequence, ahead=len(new))]


def _judge(logits: torch.Tensor, draft: int, q: torch.Tensor | None, sequence: Sequence, ahead: int) -> int:
    """The draft if it stands, otherwise what replaces it (never the draft itself)."""
    if sequence.sampling.temperature == 0:
        return int(logits.argmax())
    p = distribution(logits, sequence)
    source = generator(sequence, ahead, VERIFY)
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


class Drafter:
    """Drafts for all requests of one rank, `draft_tokens` for each."""

    def __init__(self, model: DeepSeek, cache: torch.Tensor, draft_tokens: int, overlap: str):
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

    def draft(
        self, fed: list[tuple[Sequence, int, torch.Tensor]], has_work: bool, observe: Observe | None = None
    ) -> State:
        """Give every unfinished sequence its next drafts; the state of the last pass. Collective.

        fed: sequence, first position, and normed hidden states [n, H] of what the model has confirmed in this step.
        """
        pieces = [Piece(s, start, s.tokens[start + 1 : start + 1 + len(rows)]) for s, start, rows in fed]
        hidden = [rows for _, _, rows in fed]
        for depth in range(self.draft_tokens):
            state = self._forward(pieces, hidden, has_work, observe)
            u = self.mtp.finish(state)
            going_on, hidden, end = [], [], 0
            for sequence, start, tokens in pieces:
                end += len(tokens)
                if depth < self._wanted(sequence):
                    self._propose(sequence, self.model.logits(u[end - 1]))
                    going_on.append(Piece(sequence, start + len(tokens), sequence.drafts[-1:]))
                    hidden.append(u[end - 1 : end])
            pieces = going_on
        return state

    def _forward(self, pieces: list[Piece], hidden: list[torch.Tensor], has_work: bool, observe: Observe | None):
        model = self.model
        batch = lay_out(pieces, model.embed_w.device, has_work, 1 + self.draft_tokens)
        joined = torch.cat([model.embed_w[:0], *hidden])
        state = model.begin(batch, self.cache, self.mtp.project(model.embed(batch.tokens), joined))
        run_moe_layers([self.mtp.layer], state, self.overlap, observe, first=len(model.moe_layers))
        return state

    def _wanted(self, sequence: Sequence) -> int:
        """None in the middle of a prompt; never more than leave room for the token that follows them."""
        if sequence.num_cached < len(sequence.tokens) - 1:
            return 0
        return min(self.draft_tokens, sequence.sampling.max_tokens - sequence.num_output - 1)

    @staticmethod
    def _propose(sequence: Sequence, logits: torch.Tensor) -> None:
        """Draft as the request samples; above temperature 0 the distribution is kept for the verdict."""
        if sequence.sampling.temperature == 0:
            draft, q = int(logits.argmax()), None
        else:
            q = distribution(logits, sequence)
            draft = draw(q, generator(sequence, len(sequence.drafts), DRAFT))
        sequence.drafts.append(draft)
        sequence.draft_probabilities.append(q)
