"""`Deployment`: everything that a prediction depends on, checked, with the usual choice for what is left open.

Drafts are a chain, each accepted with the chance of its depth if the one before was; or a tree, where there are more
drafts than depths: the chance is then that any draft of a depth is accepted, and all of them are verified.

A batch counts the requests of one DP group and may be fractional: a mean batch of 7.4 is a measurement's, not an
engine's. EP is dp·tp, every GPU holding whole experts; `ep=1` cuts every expert over the GPUs of one node instead, as
tensor-parallel engines do, with all-reduces in place of the exchange.

What is impossible raises ConfigError that names the nearest legal choice. A batch that does not fit the memory is
possible: `Prediction.fits` says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from moelab.config import ConfigError, ModelConfig, ParallelConfig, preset
from moelab.hardware import GPU
from moelab.hardware import gpu as find_gpu
from moelab.perf import fabric, memory
from moelab.stages import SCHEDULES

OVERLAPS = (*SCHEDULES, "best")
RESERVE = 0.07  # share of the memory that the runtime keeps: activations, fragmentation
GRAPHS_BYTES = 0.5e9  # CUDA graphs of all batch sizes; an assumption


@dataclass(frozen=True)
class Deployment:
    """See the module's text; built by `deployment`, which checks and fills in."""

    gpu: GPU
    model: ModelConfig
    parallel: ParallelConfig
    expert_tp: bool
    batch: float
    kv_len: float
    draft_tokens: int
    acceptance: tuple[float, ...]  # of each depth, given that the one before was accepted
    overlap: str
    fabric: str
    alltoall: str
    imbalance: float
    redundant: int
    kv_dtype: str
    expert_dtype: str
    capacity: float
    reserve: float

    @property
    def q_len(self) -> int:
        return 1 + self.draft_tokens

    @property
    def slots(self) -> float:
        """Experts (or copies) on one GPU."""
        return (self.model.n_routed_experts + self.redundant) / self.parallel.ep

    @property
    def tokens_per_step(self) -> float:
        """Of one request: the model's own and the drafts accepted before the first refused one."""
        total, chance = 1.0, 1.0
        for a in self.acceptance:
            chance *= a
            total += chance
        return total


def tokens_per_step(draft_tokens: int, acceptance: float) -> float:
    """Σ aⁱ for i = 0…n: 1.6, 1.96 and 2.176 for one to three drafts that are each accepted with 0.6."""
    return sum(acceptance**i for i in range(draft_tokens + 1))


def deployment(
    gpu: str | GPU,
    dp: int,
    tp: int = 1,
    *,
    ep: int | None = None,
    batch: float,
    kv_len: float,
    draft_tokens: int = 0,
    acceptance: float | Sequence[float] = 0.0,
    overlap: str = "best",
    fabric_name: str | None = None,
    alltoall: str = "deepep",
    imbalance: float = 1.0,
    redundant_experts: int = 0,
    model: str | ModelConfig = "deepseek-v3",
    kv_dtype: str = "bf16",
    expert_dtype: str = "fp8",
    capacity: float | None = None,
    reserve: float = RESERVE,
) -> Deployment:
    """Check everything; arguments as in `moelab.perf.predict`. Raises ConfigError."""
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    model = preset(model) if isinstance(model, str) else model
    for name, value in (("dp", dp), ("tp", tp)):
        _require(isinstance(value, int) and value >= 1, name, value, "an integer from 1", 1)
    fabric_name = (fabric_name or fabric.default_fabric(gpu, dp * tp)).lower()
    node = 72 if fabric_name == "nvl72" else 8
    _check_tp(model, tp, node)
    parallel = ParallelConfig(dp, tp, node)
    expert_tp = _check_ep(model, parallel, ep)
    if expert_tp:
        _require(redundant_experts == 0, "redundant_experts", redundant_experts, "0 where ep is 1", 0)
    else:
        memory.check_slots(model, parallel, redundant_experts)
    fabric.check(fabric_name, alltoall, parallel)
    _require(_number(batch) and batch > 0, "batch", batch, "above 0", 1)
    _require(_number(kv_len) and kv_len >= 1, "kv_len", kv_len, "1 or more tokens", 1)
    _require(isinstance(draft_tokens, int) and 0 <= draft_tokens <= 63, "draft_tokens", draft_tokens, "0…63", 0)
    _choose("overlap", overlap, OVERLAPS)
    _choose("kv_dtype", kv_dtype, ("bf16", "fp8"))
    _choose("expert_dtype", expert_dtype, ("fp8", "fp4"))
    _require(expert_dtype == "fp8" or gpu.name == "GB200", "expert_dtype", expert_dtype, f"fp8 on {gpu.name}", "fp8")
    _require(_number(imbalance) and imbalance >= 1, "imbalance", imbalance, "1 (balanced) or more", 1)
    imbalance = float(imbalance) if parallel.ep > 1 else 1.0  # one GPU is its own mean
    capacity = gpu.memory_bytes if capacity is None else capacity
    _require(_number(capacity) and capacity > 0, "capacity", capacity, "bytes above 0", gpu.memory_bytes)
    _require(_number(reserve) and 0 <= reserve < 1, "reserve", reserve, "0 <= … < 1", RESERVE)
    return Deployment(
        gpu, model, parallel, expert_tp, float(batch), float(kv_len), draft_tokens, _depths(draft_tokens, acceptance),
        overlap, fabric_name, alltoall, imbalance, redundant_experts, kv_dtype, expert_dtype, float(capacity),
        float(reserve),
    )  # fmt: skip


def _depths(drafts: int, acceptance: float | Sequence[float]) -> tuple[float, ...]:
    depths = [acceptance] * drafts if _number(acceptance) else list(acceptance)
    ok = len(depths) <= drafts and bool(depths) == bool(drafts)
    _require(ok, "acceptance", acceptance, f"one number, or one per depth, at most {drafts}", 0.6)
    for value in [acceptance] if _number(acceptance) else depths:
        _require(_number(value) and 0 <= value <= 1, "acceptance", value, "0…1", min(max(value, 0), 1))
    return tuple(float(x) for x in depths)


def _check_tp(model: ModelConfig, tp: int, node: int) -> None:
    def legal(n: int) -> bool:
        try:
            memory.check_heads(model, ParallelConfig(1, n, node))
        except ConfigError:
            return False
        return True

    if not legal(tp):
        choices = [n for n in range(1, node + 1) if legal(n)]
        nearest = min(choices, key=lambda n: (abs(n - tp), n))
        raise ConfigError(f"tp is {tp}: legal on nodes of {node} GPUs are {choices}; nearest: {nearest}")


def _check_ep(model: ModelConfig, parallel: ParallelConfig, ep: int | None) -> bool:
    """Whether experts are cut by TP."""
    if ep is None or ep == parallel.ep:
        return False
    if ep != 1:
        other = " (or 1, every expert cut by TP)" if parallel.dp == 1 else ""
        raise ConfigError(f"ep is {ep}, dp·tp is {parallel.ep}: nearest legal: ep {parallel.ep}{other}")
    blocks = model.moe_intermediate_size // 128 if model.weight_block_size else model.moe_intermediate_size
    if blocks % parallel.ep or parallel.ep > parallel.gpus_per_node or parallel.dp > 1:
        legal = [n for n in range(1, parallel.gpus_per_node + 1) if blocks % n == 0]
        nearest = min(legal, key=lambda n: (abs(n - parallel.ep), n))
        raise ConfigError(
            f"ep is 1 with dp {parallel.dp} and tp {parallel.tp}: experts are cut over one TP group; "
            f"nearest legal: dp 1, tp {nearest}"
        )
    return True


def _number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and abs(value) < 1e18


def _require(ok: bool, name: str, value, legal: str, nearest) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}: legal is {legal}; nearest: {nearest}")


def _choose(name: str, value: str, legal: Sequence[str]) -> None:
    if value not in legal:
        close = difflib.get_close_matches(str(value), legal, n=1, cutoff=0.3) or [legal[0]]
        raise ConfigError(f"{name} is {value!r}: legal are {', '.join(legal)}; nearest: {close[0]}")
