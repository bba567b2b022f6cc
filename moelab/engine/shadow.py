"""A shadow rank: one rank of an EP × DP × TP deployment, whole and of full size, on one GPU, with nobody else there.

Its own are the weights of its share, random ones made on the device, and everything that it computes. What stands in
for something, `stood_in` names, with its bytes, SMs and the time it was asked to take and took:

    weights     random FP8 (`RandomWeights`), so the text means nothing and its router spreads tokens evenly
    arrivals    the tokens of other ranks: `routing` says how many rows each of this rank's experts gets (`RankLoad`),
                for as many tokens in every DP group as this one has
    dispatch,   the same bytes moved here, and a wait by the law of `fabric` (`StandIn`); this rank's tokens go where
    combine     its own router sends them
    tp_reduce   likewise (`StandInReduce`); every rank of the group is taken to bring what this one brings

The law (`moelab.perf.fabric`) is that of a balanced exchange: where a routing overloads this rank, its experts take
longer here, and the fabric does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from moelab.comm.stand_in import StandIn
from moelab.comm.stand_in_clock import Holds
from moelab.comm.stand_in_reduce import StandInReduce
from moelab.config import ConfigError, ModelConfig, ParallelConfig
from moelab.engine.routing import HELDOUT, capture_routing, heldout_windows
from moelab.hardware import GPU
from moelab.hardware import gpu as find_gpu
from moelab.model.arithmetic import Arithmetic
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from moelab.model.random_weights import RandomWeights
from moelab.model.tokenizer import Tokenizer
from moelab.perf import fabric as fabrics
from moelab.perf import tables
from moelab.perf.balance import rows_by_expert
from moelab.perf.rank_load import rank_load

FABRICS = ("none", "nvlink", "ib400", "efa")
WINDOWS, WINDOW_TOKENS = 16, 256  # of held-out text that tinyseek's router is asked about
ASSUMED_GPU = "H200"  # whose law counts where there is no GPU that the laws know


def shadow_rank(
    config: ModelConfig,
    parallel: ParallelConfig,
    *,
    max_tokens: int,
    layers: int | None = None,
    routing: str = "equal",
    fabric: str = "none",
    device: torch.device | str = "cpu",
    seed: int = 0,
    rank: int = 0,
    library: str = "deepep",
    num_sms: int = 0,
    arithmetic: Arithmetic | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DeepSeek:
    """The model as `rank` of `parallel` has it. Needs no process group; not collective.

    - `max_tokens`: of a DP group in a step, as in the deployment.
    - `layers`: see `first_layers`; None: all.
    - `routing`: "equal", "uniform", "zipf" or "tinyseek" (`moelab.perf.rank_load`).
    - `fabric`: "none" (no waits), "nvlink", "ib400" or "efa", between nodes; inside one it is NVLink. `library`: whose
      law.
    - `num_sms`: that the exchange and the all-reduce take, 0: all.
    - `arithmetic`: `BlockFp8` unless given.

    Raises ConfigError for what no such deployment has.
    """
    arithmetic = arithmetic or BlockFp8()
    config = first_layers(config, layers)
    times = law(config, parallel, fabric, library, _gpu(torch.device(device)))
    shares = tinyseek_shares(config.n_routed_experts, seed) if routing == "tinyseek" else None
    load = rank_load(routing, config, parallel, max_tokens, rank, seed=seed, shares=shares)
    group = StandIn(load, times.dispatch, times.combine, rank, num_sms, times.source)
    tp_group = None
    if parallel.tp > 1:
        row_bytes = config.hidden_size * arithmetic.dtype.itemsize
        tp_group = StandInReduce(parallel.tp, times.reduce, max_tokens, row_bytes, device, num_sms, times.source)
    return DeepSeek.load(
        RandomWeights(config, device, seed, arithmetic.dtype), parallel, max_tokens, rank=rank, arithmetic=arithmetic,
        device=str(device), group=group, tp_group=tp_group, progress=progress,
    )  # fmt: skip


def first_layers(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The model with `layers` of its main layers: its first ones, the dense ones among them; where that would leave no
    MoE layer, as many MoE layers alone. Raises ConfigError for more than there are."""
    if layers is None:
        return config
    if not 1 <= layers <= config.num_hidden_layers:
        raise ConfigError(f"layers is {layers}: legal are 1…{config.num_hidden_layers}")
    dense = config.first_k_dense_replace
    return config.replace(num_hidden_layers=layers, first_k_dense_replace=dense if layers > dense else 0)


@dataclass(frozen=True)
class Law:
    """Tokens of a DP group -> µs."""

    dispatch: Callable[[int], float]
    combine: Callable[[int], float]
    reduce: Callable[[int], float]
    source: str


def law(config: ModelConfig, parallel: ParallelConfig, fabric: str, library: str, gpu: GPU) -> Law:
    """What an exchange, and an all-reduce, of this deployment take on `fabric`. TP ranks share a group's sending, and
    each gets the whole result. Raises ConfigError for an unknown fabric or library, and NVLink between nodes."""
    if fabric not in FABRICS:
        raise ConfigError(f"fabric is {fabric!r}: legal are {', '.join(map(repr, FABRICS))}")
    if fabric == "none":
        return Law(_no_time, _no_time, _no_time, "none: no waits")
    fabrics.check(fabric, library, parallel)
    exchange = fabrics.Exchange(gpu, config, parallel, library, fabric, tables.load())
    sources = dict.fromkeys(exchange.law(stage).source for stage in ("dispatch", "combine"))
    return Law(
        lambda tokens: exchange.time("dispatch", tokens / parallel.tp).us,
        lambda tokens: exchange.time("combine", tokens).us,
        lambda tokens: exchange.reduce(tokens, parallel.tp).us,
        f"{exchange.road}: {'; '.join(sources)}",
    )


def _no_time(tokens: int) -> float:
    return 0.0


def _gpu(device: torch.device) -> GPU:
    if device.type != "cuda":
        return find_gpu(ASSUMED_GPU)
    return find_gpu(torch.cuda.get_device_name(device))


def tinyseek_shares(num_experts: int, seed: int = 0) -> np.ndarray:
    """[MoE layers of tinyseek, num_experts]: shares of the experts, mean 1, as its router has them on text that it was
    not trained on. Another number of experts than its own has the same distribution in each layer, in a drawn order."""
    shares = _measured_shares()
    if num_experts == shares.shape[1]:
        return shares
    at = (np.arange(num_experts) + 0.5) / num_experts
    spread = np.quantile(shares, at, axis=1, method="inverted_cdf").T
    return np.random.default_rng(seed).permuted(spread / spread.mean(1, keepdims=True), axis=1)


@functools.cache
def _measured_shares() -> np.ndarray:
    folder = HELDOUT.parent
    model = DeepSeek.load(folder, ParallelConfig(), WINDOW_TOKENS)
    texts = heldout_windows(Tokenizer(folder, model.config.bos_token_id), WINDOWS, WINDOW_TOKENS)
    # The first token is the same everywhere.
    ids = np.stack([ids.numpy() for ids in capture_routing(model, texts)])[:, :, 1:]
    model.close()
    rows = rows_by_expert(ids, model.config.n_routed_experts)
    return rows / rows.mean(1, keepdims=True)


@dataclass(frozen=True)
class StoodIn:
    """One thing that stood in for another; numbers since construction, or since `clear`."""

    what: str  # weights, arrivals, dispatch, combine, tp_reduce
    by: str
    calls: int = 0
    sent_bytes: int = 0  # per call, on average: written by the sending kernel
    received_bytes: int = 0  # per call, on average: written by the receiving one (combine: read)
    num_sms: int = 0
    held_us: dict[float, np.ndarray] = field(default_factory=dict)  # {asked: held, of all that came in time to wait}
    exposed_us: float = 0.0  # per call, on average: time spent waiting


def stood_in(model: DeepSeek) -> list[StoodIn]:
    """Everything that is not real about a shadow rank. Waits for the device. Raises ConfigError for a real one."""
    stand_in = model.all_to_all.group
    if not isinstance(stand_in, StandIn):
        raise ConfigError("this model is no shadow rank: shadow_rank makes one")
    found = [
        StoodIn("weights", "random FP8, of variance 1/K"),
        StoodIn("arrivals", f"routing {stand_in.load.routing}, by {len(stand_in.load.counts)} draws in turn"),
    ]
    moved, held = stand_in.moved(), stand_in.held()
    for what in ("dispatch", "combine"):
        sent, received = moved[f"{what}_send"], moved[f"{what}_recv"]
        found.append(
            StoodIn(
                what, stand_in.law, received.calls, sent.bytes // max(sent.calls, 1),
                received.bytes // max(received.calls, 1), stand_in.programs, held[what].by_asked(), _mean(held[what]),
            )
        )  # fmt: skip
    reduce = model.layers[0].tp_group
    if isinstance(reduce, StandInReduce):
        (calls, size), held = reduce.moved(), reduce.held()
        half = size // max(calls, 1) // 2
        found.append(StoodIn("tp_reduce", reduce.law, calls, half, half, reduce.programs, held.by_asked(), _mean(held)))
    return found


def clear(model: DeepSeek) -> None:
    """Count from here, on the current stream."""
    model.all_to_all.group.clear()
    reduce = model.layers[0].tp_group
    if isinstance(reduce, StandInReduce):
        reduce.clear()


def _mean(holds: Holds) -> float:
    return float(holds.exposed_us.mean()) if len(holds.exposed_us) else 0.0
