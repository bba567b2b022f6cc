"""What `moelab bench decode` is asked to run: one deployment, one schedule, some batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from moelab.bench.timer import BenchError
from moelab.config import PRESETS, ConfigError, ModelConfig, ParallelConfig, preset
from moelab.engine.shadow import FABRICS, first_layers
from moelab.ops.layout import round_up
from moelab.perf.deployment import tokens_per_step
from moelab.perf.rank_load import ROUTINGS
from moelab.stages import SCHEDULES

KV_DTYPES = ("bf16", "fp8")
MAX_DRAFT_TOKENS = 3  # what the decode kernels take: four queries of a request
LARGE_EXPERT = 1 << 22  # hidden · width from which a CPU would take minutes for a step
PACKAGED = Path(__file__).parents[1] / "data" / "tinyseek"


@dataclass(frozen=True)
class Setting:
    """`comm_sms`, `compute_sms`: multiprocessors that the exchange's kernels take, and those of `moelab.ops`; 0: all.
    `batches` count requests of one DP group; none of them: the largest that fits, its step alone. `layers`: of the
    main model, None for all. `routing` and `fabric` are a shadow rank's; otherwise experts are the router's choice and
    the exchange is real. Raises ConfigError or BenchError for what cannot be run anywhere."""

    model: str
    dp: int
    tp: int
    batches: tuple[int, ...]
    draft_tokens: int
    acceptance: float
    kv_len: int
    kv_dtype: str
    overlap: str
    shadow: bool
    layers: int | None
    routing: str | None
    fabric: str | None
    device: str
    graph: bool
    seed: int = 0
    comm_sms: int = 0
    compute_sms: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", tuple(sorted(self.batches)))
        for name, value in (("batch", min(self.batches, default=1)), ("kv-len", self.kv_len)):
            _require(value >= 1, name, value, "1 or more")
        _require(0 <= self.draft_tokens <= MAX_DRAFT_TOKENS, "draft-tokens", self.draft_tokens, f"0…{MAX_DRAFT_TOKENS}")
        _require(0 <= self.acceptance <= 1, "acceptance", self.acceptance, "0…1")
        for name, value, legal in (
            ("overlap", self.overlap, tuple(SCHEDULES)), ("kv-dtype", self.kv_dtype, KV_DTYPES),
            ("routing", self.routing or "equal", ROUTINGS), ("fabric", self.fabric or "none", FABRICS),
            ("device", self.device, ("cuda", "cpu")),
        ):  # fmt: skip
            _require(value in legal, name, value, ", ".join(legal))
        for name, value in (("routing", self.routing), ("fabric", self.fabric)):
            if value is not None and not self.shadow:
                raise ConfigError(
                    f"{name} is {value}, which stands in for the other ranks of a shadow rank: add --shadow, or leave "
                    f"--{name} out"
                )
        for name, count in (("comm-sms", self.comm_sms), ("compute-sms", self.compute_sms)):
            _require(count >= 0, name, count, "numbers of SMs from 1 on, and 0 for all")
            if count and self.device == "cpu":
                raise BenchError(f"{name} is {count}, and a CPU has no SMs to share: leave --{name} out")
        if self.graph and self.device == "cpu":
            raise BenchError("a CPU has no CUDA graphs: leave --graph out, steps are then eager on the host's clock")
        config = self.config  # raises for an unknown model
        _require(self.kv_len >= self.q_len, "kv-len", self.kv_len, f"at least the {self.q_len} tokens of a step")
        if self.layers is not None and not self.random:
            raise ConfigError(f"layers is {self.layers}: a checkpoint is run whole; take --shadow or a preset's name")
        most = config.max_position_embeddings
        _require(self.kv_len <= most, "kv-len", self.kv_len, f"up to {most}, the model's positions")
        if self.draft_tokens and not config.num_nextn_predict_layers:
            raise ConfigError(f"draft-tokens is {self.draft_tokens} and the model has no MTP layer: give 0")
        self.parallel.check(config)

    @property
    def q_len(self) -> int:
        return 1 + self.draft_tokens

    @property
    def clock(self) -> str:
        """Of times, as in a Record."""
        return "graph" if self.graph else "event" if self.device == "cuda" else "wall"

    @property
    def parallel(self) -> ParallelConfig:
        """A shadow rank's nodes have 8 GPUs; what really runs here is one node."""
        return ParallelConfig(self.dp, self.tp, gpus_per_node=8 if self.shadow else max(8, self.dp * self.tp))

    @property
    def folder(self) -> Path | None:
        """Of the checkpoint; None where weights are drawn."""
        if self.model == "tinyseek":
            return PACKAGED
        if self.model in PRESETS:
            return None
        if not Path(self.model).is_dir():
            raise ConfigError(f"model is {self.model!r}: give {', '.join(PRESETS)}, or a checkpoint's folder")
        return Path(self.model)

    @property
    def random(self) -> bool:
        """Whether weights are drawn, not read."""
        return self.shadow or self.folder is None

    @property
    def config(self) -> ModelConfig:
        """With `layers` of the main model. Drawn weights have no MTP layer unless it drafts."""
        folder = self.folder
        config = preset(self.model) if folder in (None, PACKAGED) else ModelConfig.from_hf(folder)
        if not self.random:
            return config
        mtp = config.num_nextn_predict_layers if self.draft_tokens else 0
        return first_layers(config, self.layers).replace(num_nextn_predict_layers=mtp)

    @property
    def processes(self) -> int:
        return 1 if self.shadow else self.dp * self.tp

    @property
    def tokens_per_step(self) -> float:
        """Of a request, with the drafts that are accepted."""
        return tokens_per_step(self.draft_tokens, self.acceptance)

    def max_tokens(self, batch: int) -> int:
        """M: on a GPU rows that make every expert's room a multiple of 128, as DeepGEMM reads it."""
        return round_up(batch * self.q_len, 128 // gcd(self.dp, 128) if self.device == "cuda" else 1)

    def params(self, batch: int, max_tokens: int) -> dict[str, Any]:
        """As they stand in a Record."""
        config = self.config
        return {
            "model": self.model if self.model in PRESETS else Path(self.model).name, "dp": self.dp, "tp": self.tp,
            "ep": self.dp * self.tp, "batch": batch, "draft_tokens": self.draft_tokens, "q_len": self.q_len,
            "kv_len": self.kv_len, "kv_dtype": self.kv_dtype, "overlap": self.overlap,
            "layers": config.num_hidden_layers, "moe_layers": config.num_moe_layers, "max_tokens": max_tokens,
            "mode": "graph" if self.graph else "eager", "weights": "random" if self.random else "checkpoint",
            "shadow": self.shadow, "routing": (self.routing or "equal") if self.shadow else "router",
            "fabric": (self.fabric or "none") if self.shadow else "real",
            "comm_sms": self.comm_sms, "compute_sms": self.compute_sms,
        }  # fmt: skip

    def check_here(self) -> None:
        """Raise BenchError for what this machine cannot run in reasonable time, or has too few GPUs for."""
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device == "cuda" and count < self.processes:
            raise BenchError(
                f"each rank takes a GPU, ranks are {self.processes} and GPUs here {count}: take fewer, or --shadow for "
                "one rank of the deployment on one GPU; `moelab doctor` says what is missing"
            )
        for name, count in (("comm-sms", self.comm_sms), ("compute-sms", self.compute_sms)):
            if count and count > (most := torch.cuda.get_device_properties(0).multi_processor_count):
                raise BenchError(f"{name} is {count}: the GPU has {most}; give 1…{most}, or leave --{name} out for all")
        config = self.config
        if self.device == "cpu" and config.hidden_size * config.moe_intermediate_size > LARGE_EXPERT:
            raise BenchError(
                f"model {self.model} (hidden {config.hidden_size}) takes a GPU: on a CPU give --model tinyseek, which "
                "shows the method"
            )


def batches(given: Sequence[str]) -> tuple[int, ...]:
    """["1,16", "64"] -> (1, 16, 64); ["max"] -> (). Raises BenchError for what is neither."""
    texts = [text.strip() for several in given for text in several.split(",")]
    if texts == ["max"]:
        return ()
    for text in texts:
        if not text.isdecimal():
            raise BenchError(f"batch is {text!r}: give numbers, as 1,16,64, or max alone, the largest that fits")
    return tuple(dict.fromkeys(int(text) for text in texts))


def _require(ok: bool, name: str, value: Any, legal: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}: legal are {legal}")
