"""Walking a schedule: the engine's reading of `moelab.stages`.

Which schedule is a setting of the deployment, never of a rank or of a batch: a rank with one request, or none, runs
MicroBatch with an empty half and so makes the same exchanges as all others.
"""

from __future__ import annotations

from collections.abc import Callable

from moelab.config import ConfigError
from moelab.engine.halves import join, split
from moelab.model.batch import State
from moelab.model.deepseek import DeepSeek
from moelab.model.layer import DecoderLayer
from moelab.stages import SCHEDULES, Launch

Observe = Callable[[Launch, State], None]  # called after a stage, with what was run and the state as it then is


def check_overlap(overlap: str) -> None:
    """Raise `ConfigError` unless there is such a schedule."""
    if overlap not in SCHEDULES:
        raise ConfigError(f"overlap is {overlap!r}: legal are {', '.join(SCHEDULES)}")


def run_layers(model: DeepSeek, state: State, overlap: str = "none", observe: Observe | None = None) -> None:
    """Take `state` through all layers of the main model, in place. Collective: all ranks walk the same schedule.

    The dense layers run the whole batch. To `observe` they have the numbers before 0, which is the first MoE layer.
    """
    dense = model.dense_layers
    for number, layer in enumerate(dense, -len(dense)):
        run_layer(layer, state, number, observe)
    run_moe_layers(model.moe_layers, state, overlap, observe)


def run_moe_layers(
    layers: list[DecoderLayer], state: State, overlap: str = "none", observe: Observe | None = None, first: int = 0
) -> None:
    """Take `state` through MoE layers, in place; `observe` counts them from `first`. Collective."""
    parts = split(state) if overlap == "microbatch" else (state,)
    for launch in SCHEDULES[overlap](len(layers)):
        part = parts[launch.micro_batch]
        layers[launch.layer].run(launch.stage, part)
        if observe is not None:
            observe(Launch(launch.micro_batch, first + launch.layer, launch.stage), part)
    if len(parts) == 2:
        join(state, parts)


def run_layer(layer: DecoderLayer, state: State, number: int = 0, observe: Observe | None = None) -> None:
    """One layer with the whole batch, stage after stage as they are listed."""
    for stage in layer.stages:
        layer.run(stage, state)
        if observe is not None:
            observe(Launch(0, number, stage), state)
