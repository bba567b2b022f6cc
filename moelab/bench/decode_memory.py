"""A decode step's memory, foreseen and measured, part by part.

Foreseen: `moelab.engine.memory.need`; to "activations" belong attention's as well, its plans, and the logits of the
largest step. All captured steps, draft passes too, live in one pool. Measured, on a GPU:

    weights       bytes of the model's tensors
    exchange      what torch allocated while the model was loaded, less those and the experts' scratch; and the window,
                  which is not torch's
    KV cache      bytes of its tensors
    activations   the experts' scratch, and what torch reserved beside the cache while the engine was made and run,
                  attention's buffers included
    total         what the device lost from before the model was loaded

Of a CPU only the tensors that this process holds are known: weights and cache.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator

import torch
from torch import Tensor

from moelab.bench.decode_setting import Setting
from moelab.bench.decode_timer import Ranks
from moelab.comm import build
from moelab.comm.device_exchange import make_shape
from moelab.comm.library import load
from moelab.comm.spec import ExchangeSpec
from moelab.comm.stand_in import window_bytes
from moelab.engine import memory
from moelab.engine.attention import decode_class
from moelab.engine.kv_cache import PAGE_SIZE, pages_for
from moelab.engine.memory import Need
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from moelab.ops.mla_flashinfer import WORKSPACE_BYTES, FlashInferDecode

# Share of the free memory for graphs, loaded kernels, what falls between the blocks of a pool, and for a pass's values
# once more while it runs for the first time, beside the memory that captured passes share.
RESERVE = 0.01
CUBLAS_BYTES, STREAMS = (
    32 << 20,
    2,
)  # what cuBLAS works in on Hopper, and where: on the captures' stream and the others'
PARTS = ("weights", "exchange", "KV cache", "activations", "total")


def foreseen(setting: Setting, batch: int) -> Need:
    """What a rank needs for steps of `batch` requests and of fewer."""
    config, parallel, arithmetic = setting.config, setting.parallel, BlockFp8()
    tokens, pages, most = batch * setting.q_len, batch * pages_for(setting.kv_len), setting.max_tokens(batch)
    attention = memory.attention_bytes(config, parallel, arithmetic, tokens)
    if setting.device == "cuda":
        attention += _plan_bytes(setting) + batch * setting.q_len * config.vocab_size * 4  # the logits, in float32
        attention += STREAMS * CUBLAS_BYTES
    return memory.need(
        config, parallel, arithmetic, most, pages * PAGE_SIZE, kv_dtype=setting.kv_dtype,
        window_bytes=sum(beside_rows(setting, most)), attention=attention,
    )  # fmt: skip


def _plan_bytes(setting: Setting) -> int:
    """FlashInfer's workspaces: one for steps of all sizes and the first draft pass, one for the passes after it."""
    flashinfer = decode_class(setting.device, setting.kv_dtype == "fp8") is FlashInferDecode
    return (2 if setting.draft_tokens > 1 else 1) * WORKSPACE_BYTES if flashinfer else 0


def fitting(setting: Setting, capacity: float) -> tuple[int, ...]:
    """The batches that were asked for, if they fit into `capacity` bytes, or the largest that does. Raises OutOfMemory
    with the arithmetic and the batch that would fit; nothing has been allocated."""
    counted = foreseen(setting, max(setting.batches, default=1))
    if setting.batches and counted.fits(capacity, RESERVE):
        return setting.batches
    largest = memory.largest_batch(lambda batch: foreseen(setting, batch), capacity, RESERVE)
    if setting.batches or not largest:
        counted.check(capacity, setting.kv_len, RESERVE, largest)
    return (largest,)


def beside_rows(setting: Setting, max_tokens: int) -> tuple[int, int]:
    """Bytes that the exchange takes beside the rows it receives: (not torch's, torch's). The kernels' window, which is
    NVSHMEM's where there are several ranks, and their state; or a stand-in's windows. Builds the kernels if they are
    not."""
    config = setting.config
    spec = ExchangeSpec(
        setting.parallel, config.n_routed_experts, config.num_experts_per_tok, config.hidden_size, max_tokens,
        slots=memory.SLOTS, **BlockFp8.exchange,
    )  # fmt: skip
    if setting.shadow:
        reduced = max_tokens * config.hidden_size * 2 if setting.tp > 1 else 0  # the TP all-reduce's stand-in
        return 0, window_bytes(spec) + reduced
    if setting.device == "cpu" or build.unavailable() is not None:
        return 0, 0
    alone = setting.processes == 1
    _, window, state = make_shape(spec, load(), "rows" if alone else "bf16", all_mapped=True)  # as `default_group` does
    return (0, window + state) if alone else (window, state)


def room_for_parts(need: Need, ranks: Ranks) -> bool:
    """Whether all ranks have memory to keep the states that stages alone start from, and to run them: two layers' of
    activations. Collective."""
    if ranks.device.type != "cuda":
        return True
    gc.collect()
    torch.cuda.empty_cache()
    return ranks.most(2 * need.activations - torch.cuda.mem_get_info(ranks.device)[0]) <= 0


def totals(need: Need) -> dict[str, int]:
    """What was foreseen by PARTS."""
    activations = need.activations + need.attention
    parts = {"weights": need.weights, "exchange": need.exchange, "KV cache": need.kv_cache, "activations": activations}
    return parts | {"total": need.total}


class Measured:
    """Bytes by part as they are allocated; on the CPU of the tensors it is shown."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self.bytes: dict[str, int] = {}
        self._free = torch.cuda.mem_get_info(device)[0] if self._on_gpu else 0
        self._mark()

    def loaded(self, model: DeepSeek, window: int) -> None:
        """The model is there; `window`: bytes of the exchange that are not torch's."""
        self.bytes["weights"] = sum(tensor.nbytes for tensor in tensors(model))
        if self._on_gpu:
            self._scratch = model.scratch.nbytes
            self.bytes["exchange"] = self._grown() - self.bytes["weights"] - self._scratch + window
        self._mark()

    def ran(self, cache: object) -> None:
        """The engine is there with its cache, and has run a step."""
        self.bytes["KV cache"] = sum(tensor.nbytes for tensor in tensors(cache))
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            grown = torch.cuda.memory_reserved(self._device) - self._reserved
            self.bytes["activations"] = self._scratch + grown - self.bytes["KV cache"]
            self.bytes["total"] = self._free - torch.cuda.mem_get_info(self._device)[0]

    def _mark(self) -> None:
        """What comes is counted from here."""
        if self._on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            self._allocated = torch.cuda.memory_allocated(self._device)
            self._reserved = torch.cuda.memory_reserved(self._device)

    def _grown(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._allocated


def tensors(thing: object, seen: set | None = None) -> Iterator[Tensor]:
    """All tensors in a tree of the model's dataclasses, lists and tuples, each once."""
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        if (thing.data_ptr(), thing.shape) not in seen:
            seen.add((thing.data_ptr(), thing.shape))
            yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors(part, seen)
    elif dataclasses.is_dataclass(thing) and type(thing).__module__.startswith(("moelab.model", "moelab.ops")):
        for field in dataclasses.fields(thing):
            yield from tensors(getattr(thing, field.name), seen)
