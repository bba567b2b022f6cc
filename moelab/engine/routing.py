"""Which experts a model sends real tokens to: the router's choices, layer by layer, without generating anything.

The prompt's tokens run through all layers once (as prefill does), and an observer takes `topk_ids` after each gate. One
process holds the whole model; how its tokens would be spread over ranks is for the caller to say.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from moelab.config import MoelabError, ParallelConfig
from moelab.engine.batch import build
from moelab.engine.executor import run_layers
from moelab.engine.kv_cache import PagedCache, pages_for
from moelab.engine.sequence import Sampling, Sequence
from moelab.model.batch import State
from moelab.model.deepseek import DeepSeek
from moelab.model.tokenizer import Tokenizer
from moelab.stages import Launch

HELDOUT = Path(__file__).resolve().parents[1] / "data" / "tinyseek" / "heldout"


@torch.no_grad()
def capture_routing(model: DeepSeek, sequences: list[list[int]]) -> list[torch.Tensor]:
    """topk_ids [MoE layers, tokens, K] int64 of each sequence of token ids, none of them empty.

    `model` must be whole, in one process. A sequence longer than a step's `max_tokens` is fed in pieces.
    """
    step = model.all_to_all.spec.max_tokens
    return [_one(model, tokens, step) for tokens in sequences]


def _one(model: DeepSeek, tokens: list[int], step: int) -> torch.Tensor:
    pages = pages_for(len(tokens))
    cache = PagedCache(model.num_caches, pages, model.config.latent_dim, model.embed_w.dtype, model.embed_w.device)
    sequence = Sequence(0, list(tokens), Sampling(1), pages=list(range(pages)))
    pieces = []
    while sequence.num_cached < len(tokens):
        count = min(step, len(tokens) - sequence.num_cached)
        state = model.begin(build([(sequence, count)], model.embed_w.device), cache.rows)
        seen: list[torch.Tensor] = []

        def observe(launch: Launch, state: State, seen: list[torch.Tensor] = seen) -> None:
            if launch.stage.name == "gate":
                seen.append(state.topk_ids.cpu())

        run_layers(model, state, observe=observe)
        pieces.append(torch.stack(seen))
        sequence.num_cached += count
    return torch.cat(pieces, dim=1)


def rows_sent(parallel: ParallelConfig, num_experts: int, ids_by_group: list[np.ndarray]) -> np.ndarray:
    """[ep, E]: how many rows each rank sends for each expert, from one layer's ids [tokens, K] of each DP group; -1
    goes nowhere. TP rank i of a group sends its tokens i, i + tp, …"""
    sent = np.zeros((parallel.ep, num_experts), dtype=int)
    for rank in range(parallel.ep):
        mine = np.asarray(ids_by_group[parallel.dp_group(rank)])[parallel.tp_rank(rank) :: parallel.tp]
        sent[rank] = np.bincount(mine[mine >= 0], minlength=num_experts)
    return sent


def heldout_windows(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` tokens, evenly spaced over the texts held out from tinyseek's training; each begins
    with the beginning-of-sequence token."""
    text = b"".join(path.read_bytes() for path in sorted(HELDOUT.rglob("*.txt")))
    room = len(text) - 4 * length  # a token has at most four bytes of text here: tinyseek's are bytes
    if room < count:
        raise MoelabError(f"{len(text)} bytes of held-out text in {HELDOUT} are too few for {length} tokens")
    starts = [room * i // count for i in range(count)]
    return [tokenizer.encode(text[at : at + 4 * length].decode(errors="ignore"))[:length] for at in starts]
