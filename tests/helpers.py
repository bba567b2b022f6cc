"""Running the reference model in one process, on pages in no particular order."""

from __future__ import annotations

import torch

from moelab.config import ParallelConfig
from moelab.engine.executor import run_layer, run_layers
from moelab.engine.kv_cache import PAGE_SIZE, PagedCache
from moelab.model.batch import Batch, Chunk, State
from moelab.model.deepseek import DeepSeek


def load_alone(folder, max_tokens: int = 512, **options) -> DeepSeek:
    """The whole model in this process."""
    return DeepSeek.load(folder, ParallelConfig(), max_tokens, **options)


class Session:
    """Some sequences of one model, each with shuffled pages; every call feeds each of them its next tokens."""

    def __init__(self, model: DeepSeek, num_sequences: int = 1, length: int = 512):
        self.model = model
        per_sequence = -(-length // PAGE_SIZE)
        pages = torch.randperm(num_sequences * per_sequence + 3)
        self.pages = list(pages[: num_sequences * per_sequence].view(num_sequences, -1))
        self.cache = PagedCache(
            model.num_caches, len(pages), model.config.latent_dim, model.embed_w.dtype, model.embed_w.device
        ).rows
        self.lengths = [0] * num_sequences
        self.mtp_lengths = [0] * num_sequences

    def feed(self, *tokens: list[int], absorbed: bool) -> torch.Tensor:
        """New tokens of every sequence (may be none) -> their normed hidden states, one after another."""
        state = self.model.begin(self._batch(tokens, self.lengths, absorbed), self.cache)
        run_layers(self.model, state)
        return self.model.finish(state)

    def draft(self, hidden: torch.Tensor, *next_tokens: list[int], absorbed: bool) -> torch.Tensor:
        """The MTP layer: hidden states, and for each the token after -> u, one after another."""
        batch = self._batch(next_tokens, self.mtp_lengths, absorbed)
        mtp = self.model.mtp
        state = self.model.begin(batch, self.cache, mtp.project(self.model.embed(batch.tokens), hidden))
        run_layer(mtp.layer, state)
        return mtp.finish(state)

    def _batch(self, tokens: tuple[list[int], ...], lengths: list[int], absorbed: bool) -> Batch:
        chunks, slots, positions = [], [], []
        for i, new in enumerate(tokens):
            if not len(new):
                continue
            span = torch.arange(lengths[i], lengths[i] + len(new))
            lengths[i] += len(new)
            chunks.append(Chunk(len(new), lengths[i], self.pages[i].to(self.cache.device)))
            slots.append(self.pages[i][span // PAGE_SIZE] * PAGE_SIZE + span % PAGE_SIZE)
            positions.append(span)
        empty = torch.empty(0, dtype=torch.int64)
        flat = torch.tensor([t for new in tokens for t in new], dtype=torch.int64)
        columns = (flat, torch.cat([empty, *positions]), torch.cat([empty, *slots]))
        return Batch(*(column.to(self.cache.device) for column in columns), chunks, absorbed, bool(chunks))


def one_state(model: DeepSeek, tokens: list[int]) -> State:
    """The state of a single sequence about to enter the first layer."""
    session = Session(model)
    return model.begin(session._batch((tokens,), session.lengths, absorbed=False), session.cache)
