"""The campaign as a list of points, in the order of their worth.

A *point* is one command with the seconds it may take. Its *parts* are what the command can be given fewer of: numbers
of tokens, batches. Each has its *marks*: records that are there once the part has been run, so that the folder of
records alone says what is left, on whatever machine.

A decode point takes as many layers as fit for its largest batch, counted by `moelab.bench.decode_memory` with room for
timing each stage alone, and has a *shadow*: one rank of the same deployment on one GPU, the others stood in for.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from moelab.bench.decode_memory import RESERVE, foreseen
from moelab.bench.decode_setting import Setting
from moelab.config import ConfigError, preset
from moelab.hardware import gpu
from moelab.stages import SCHEDULES

SIZES = (8, 4, 0)  # GPUs of the node; 0: two processes on the CPU with a small model, to try the recipe
GPU = "H200"
FREE = 0.98  # share of a GPU's memory taken as free when a rank starts: its context and NCCL's buffers are off
TOKENS = (1, 8, 32, 128, 512, 1024, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BAR = 128  # requests of a DP group in the study's breakdown of a layer
KV_LEN, ACCEPTANCE = 5000, 0.6
ROUTINGS = ("uniform", "group-limited", "zipf")
# Files of GPU tests, each a point, and its seconds.
TESTS = {
    "tests/comm/test_exchange.py": 540, "tests/comm/test_graphs.py": 540, "tests/comm/test_stress.py": 540,
    "tests/comm/test_waits.py": 300, "tests/comm/test_large.py": 300, "tests/comm/test_lifecycle.py": 300,
    "tests/comm/test_reported.py": 300, "tests/engine": 540, "tests/model": 300,
}  # fmt: skip

Mark = tuple[str, str | None, str, dict[str, Any]]  # bench, backend if it matters, metric, some of the parameters


@dataclass(frozen=True)
class Point:
    """`options` lack the parts and the folder of records. `seconds`: to start, and for each part. `memory`: bytes of a
    rank, 0 where nothing was counted. `params`: what its records carry whatever the part. `all_layers`: of the model
    whose `params["layers"]` it takes."""

    name: str
    answers: str
    verb: str  # alltoall, decode, pytest
    options: tuple[str, ...]
    dp: int
    tp: int
    gpus: int
    seconds: tuple[int, int]
    parts: dict[str, list[Mark]]
    memory: int = 0
    all_layers: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    shadow: Point | None = None

    def limit_s(self, parts: int) -> int:
        """Seconds that the command may take with so many parts."""
        return self.seconds[0] + self.seconds[1] * parts

    def arguments(self, parts: list[str], records: str) -> list[str]:
        """Of the Python that runs it. `records`: a folder."""
        if self.verb == "pytest":
            return ["-m", "pytest", *self.options, *parts, "--record", records]
        of = {"alltoall": "--tokens", "decode": "--batch"}[self.verb]
        return ["-m", "moelab", "bench", self.verb, *self.options, of, ",".join(parts), "--records", records]


def points(gpus: int) -> list[Point]:
    """For a node of 8 or 4 GPUs, or 0: the same small, on the CPU. Raises ConfigError for another number."""
    if gpus not in SIZES:
        raise ConfigError(f"gpus is {gpus}: legal are {', '.join(map(str, SIZES))}; 0 tries the recipe on the CPU")
    real = list(_small() if gpus == 0 else _node(gpus))
    # Shadows want one GPU, which may be another machine's: the node is for what needs all of it.
    return real + [point.shadow for point in real if point.shadow is not None]


def _node(n: int) -> Iterator[Point]:
    deployments = [(n // tp, tp) for tp in (1, 2, 4, 8) if tp <= n]
    first, others = deployments[0], deployments[1:]
    for routing in ROUTINGS[:2]:
        yield _alltoall(*first, routing)
    for overlap in SCHEDULES:
        yield _decode(*first, 2, overlap, BATCHES)
    yield _tests("tests/comm/test_exchange.py", n)
    for overlap in SCHEDULES:
        yield _decode(*first, 2, overlap, (BAR,))
    for deployment in others:
        for overlap in SCHEDULES:
            yield _decode(*deployment, 2, overlap, BATCHES)
    yield _alltoall(*first, ROUTINGS[2])
    for deployment in others:
        for routing in ROUTINGS:
            yield _alltoall(*deployment, routing)
    for deployment in deployments:
        for overlap in SCHEDULES:
            yield _decode(*deployment, 1, overlap, BATCHES)
    for path in list(TESTS)[1:]:
        yield _tests(path, n)


def _small() -> Iterator[Point]:
    small = ("--device", "cpu", "--hidden", "256", "--experts", "16", "--top-k", "4")
    params = {"dp": 2, "tp": 1, "routing": "uniform", "hidden": 256}
    yield Point(
        "alltoall dp2 tp1 uniform", "that the exchange's times come back", "alltoall",
        (*small, "--dp", "2", "--routing", "uniform"), 2, 1, 0, (60, 20),
        {"128": [("alltoall", "dense-split", "sent", params | {"tokens": 128})]}, params=params,
    )  # fmt: skip
    yield _decode(2, 1, 1, "none", (2,), model="tinyseek", kv_len=66, device="cpu")
    yield _tests("tests/test_stages.py", 0, 60)


def _alltoall(dp: int, tp: int, routing: str) -> Point:
    """All backends. Done, of some tokens, once our pair and NCCL's padded one are there: what comes behind may be
    impossible, and others are compared at TP 1 only."""
    params = {"dp": dp, "tp": tp, "routing": routing, "hidden": 7168, "experts": 256, "top_k": 8, "payload": "fp8"}
    backends = ("nvshmem", "nccl-padded") if tp == 1 else ("nvshmem",)
    marks = {
        str(tokens): [("alltoall", backend, "pair_fused", params | {"tokens": tokens}) for backend in backends]
        for tokens in TOKENS
    }
    options = ("--graph", "--dp", f"{dp}", "--tp", f"{tp}", "--routing", routing)
    what = f"EP{dp * tp} beside every peer, {routing} routing"
    return Point(
        f"alltoall dp{dp} tp{tp} {routing}", what, "alltoall", options, dp, tp, dp * tp, (90, 30), marks, params=params
    )


def _tests(path: str, gpus: int, seconds: int = 0) -> Point:
    marker = "gpu" if gpus else "not gpu"
    params = {"paths": path, "marker": marker}
    return Point(
        path, "whether what is timed is right" if "comm" in path else "whether it is right", "pytest", ("-m", marker),
        gpus, 1, gpus, (seconds or TESTS[path], 0), {path: [("tests", "pytest", "passed", params)]}, params=params,
    )  # fmt: skip


def _decode(
    dp: int, tp: int, q_len: int, overlap: str, batches: tuple[int, ...], *, model: str = "deepseek-v3",
    kv_len: int = KV_LEN, device: str = "cuda",
) -> Point:  # fmt: skip
    on_gpu = device == "cuda"
    setting = Setting(
        model, dp, tp, batches, draft_tokens=q_len - 1, acceptance=ACCEPTANCE, kv_len=kv_len, kv_dtype="bf16",
        overlap=overlap, shadow=True, layers=None, routing="uniform", fabric="nvlink", device=device, graph=on_gpu,
    )  # fmt: skip
    # A rank's memory is counted as its shadow's, which needs no built kernels: their windows are small either way.
    layers, memory = None, 0
    if on_gpu:
        layers, memory = most_layers(replace(setting, overlap="none"), gpu(GPU).memory_bytes * FREE)
    params = {
        "model": model, "dp": dp, "tp": tp, "q_len": q_len, "kv_len": kv_len, "kv_dtype": "bf16", "overlap": overlap,
        "layers": layers or setting.config.num_hidden_layers, "mode": "graph" if on_gpu else "eager",
    }  # fmt: skip
    # The last that is measured of a batch: by graphs the head alone; eagerly all stages come together.
    last = ("stage", {"stage": "head", "of": "step"}) if on_gpu else ("step_over_stages", {})

    def marks(own: dict[str, Any]) -> dict[str, list[Mark]]:
        return {str(b): [("decode", None, last[0], params | own | last[1] | {"batch": b})] for b in batches}

    options = ["--model", model, "--dp", f"{dp}", "--tp", f"{tp}", "--kv-len", f"{kv_len}", "--overlap", overlap]
    options += ["--draft-tokens", f"{q_len - 1}", *(["--acceptance", f"{ACCEPTANCE}"] if q_len > 1 else [])]
    options += ["--layers", f"{layers}"] if layers else []
    options += ["--device", device]
    bar = " bar" if batches == (BAR,) else ""
    deployment = f"dp{dp} tp{tp} q{q_len}{bar} {overlap}"
    of = f"{batches[0]}…{batches[-1]}" if len(batches) > 1 else f"{batches[0]}"
    what = "the study's bar, batch 128" if bar else f"steps and layers of EP{dp * tp}, batch {of}"
    real = Point(
        f"decode {deployment}", what, "decode", tuple(options), dp, tp, dp * tp if on_gpu else 0, (180, 30),
        marks({"shadow": False}), memory, preset(model).num_hidden_layers, params | {"shadow": False},
    )  # fmt: skip
    stood_in = {"shadow": True, "routing": setting.routing, "fabric": setting.fabric}
    shadow = replace(
        real, name=f"shadow {deployment}", answers="the prediction of one rank for it", gpus=1 if on_gpu else 0,
        options=(*options, "--shadow", "--routing", setting.routing, "--fabric", setting.fabric),
        parts=marks(stood_in), params=params | stood_in,
    )  # fmt: skip
    return replace(real, shadow=shadow)


@functools.cache
def most_layers(setting: Setting, capacity: float) -> tuple[int, int]:
    """(layers, bytes of a rank): the most that fit for the largest batch, with two layers' activations beside, without
    which stages are not timed alone. Raises ConfigError where not even one MoE layer fits."""
    config = preset(setting.model)

    def size(layers: int) -> int | None:
        need = foreseen(replace(setting, layers=layers), max(setting.batches))
        return need.total if need.total + 2 * need.activations <= capacity * (1 - RESERVE) else None

    if (whole := size(config.num_hidden_layers)) is not None:
        return config.num_hidden_layers, whole
    first = config.first_k_dense_replace + 1
    fits = bisect.bisect_left(range(first, config.num_hidden_layers), True, key=lambda n: size(n) is None)
    if not fits:
        raise ConfigError(f"batch is {max(setting.batches)}: not one MoE layer fits beside the cache; give fewer")
    return first + fits - 1, size(first + fits - 1)
