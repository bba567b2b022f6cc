"""What a rank does for `moelab generate`: loads its share, runs its DP group's prompts, sends tokens."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from moelab.comm.choice import default_group
from moelab.config import ConfigError, ModelConfig, ParallelConfig
from moelab.engine.engine import Engine
from moelab.engine.graphs import sizes_up_to, uncapturable
from moelab.engine.kv_cache import PAGE_SIZE, pages_for
from moelab.engine.memory import available_bytes, need
from moelab.engine.sequence import Sampling
from moelab.launch.worker import Context
from moelab.model.arithmetic import Arithmetic, Plain
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from moelab.ops.mla_decode import MAX_Q_LEN

log = logging.getLogger(__name__)

# Room for this many tokens is always enough to go on, where one sequence does not need more by itself: others
# wait.
MAX_CACHE_TOKENS = 65536


def generate(context: Context, job: dict[str, Any]) -> None:
    """For `launch`. Each group's first rank emits {prompt, token, last}, at the end, if it drafts, {drafts:
    [[accepted, tried] of each depth]}; before, rank 0 emits {loaded, layers} after each layer, and {ready}."""
    parallel = ParallelConfig(job["dp"], job["tp"], gpus_per_node=context.world_size)

    def progress(done: int, total: int) -> None:
        if context.rank == 0:
            context.emit({"loaded": done, "layers": total})

    group = parallel.dp_group(context.rank)
    mine = {i: ids for i, ids in enumerate(job["prompts"]) if i % parallel.dp == group}
    cache_tokens = _cache_tokens(mine.values(), job["max_tokens"] + job["draft_tokens"])
    config = ModelConfig.from_hf(job["folder"])
    arithmetic = _arithmetic(config, context.device)
    longest = max((len(ids) for ids in mine.values()), default=0) + job["max_tokens"]
    sharing = context.world_size if context.device == "cpu" else -(-context.world_size // torch.cuda.device_count())
    needed = need(config, parallel, arithmetic, job["step_tokens"], cache_tokens)
    needed.check(available_bytes(context.device, sharing), longest)

    model = DeepSeek.load(
        job["folder"], parallel, job["step_tokens"], rank=context.rank, arithmetic=arithmetic, device=context.device,
        group=default_group(parallel.ep, context.device), progress=progress,
    )  # fmt: skip
    engine = Engine(
        model, cache_tokens, job["overlap"], job["draft_tokens"], batch_sizes=_batch_sizes(model, parallel, job),
        max_kv_len=longest,
    )  # fmt: skip
    sampling = Sampling(job["max_tokens"], job["temperature"], job["seed"])
    for number, ids in mine.items():
        engine.add(number, ids, sampling)
    dist.barrier()  # so that "ready" is true of all
    if context.rank == 0:
        context.emit({"ready": f"{arithmetic}, {model.all_to_all.backend} exchange"})
    speaks = parallel.tp_rank(context.rank) == 0
    for token in engine.run():
        if speaks:
            context.emit({"prompt": token.sequence.id, "token": token.id, "last": token.last})
    if speaks and engine.drafter:
        fate = zip(engine.acceptance.accepted, engine.acceptance.tried, strict=True)
        context.emit({"drafts": list(fate)})
    model.close()


def _arithmetic(config: ModelConfig, device: str) -> Arithmetic:
    """float32 on the CPU; on a GPU block FP8, or bfloat16 for a model whose sizes do not allow it."""
    if device == "cpu":
        return Plain()
    try:
        BlockFp8().check(config)
    except ConfigError as error:
        log.info("bfloat16 in place of FP8: %s", error)
        return Plain(torch.bfloat16)
    return BlockFp8()


def _batch_sizes(model: DeepSeek, parallel: ParallelConfig, job: dict[str, Any]) -> tuple[int, ...]:
    """Of the captured steps, the same on every rank: up to the largest batch that a DP group has, where its tokens fit
    into a step. None where a step cannot be captured."""
    q_len = 1 + job["draft_tokens"]
    most = min(-(-len(job["prompts"]) // parallel.dp), job["step_tokens"] // q_len)
    if not most or q_len > MAX_Q_LEN or model.embed_w.device.type != "cuda":
        return ()
    if why := uncapturable(model):
        log.info("no CUDA graphs: %s", why)
        return ()
    return sizes_up_to(most)


def _cache_tokens(prompts, max_tokens: int) -> int:
    """For prompts and what follows them: new tokens, and drafts behind the last."""
    needs = [pages_for(len(ids) + max_tokens) * PAGE_SIZE for ids in prompts]
    return min(sum(needs), max(MAX_CACHE_TOKENS, *needs)) if needs else PAGE_SIZE
