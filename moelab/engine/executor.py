"""Walking a schedule: the engine's reading of `moelab.stages`."""

from __future__ import annotations

from collections.abc import Callable

from moelab.model.batch import State
from moelab.model.deepseek import DeepSeek
from moelab.model.layer import DecoderLayer
from moelab.stages import Launch, dispatch_overlap, no_overlap

ONE_BATCH = {"none": no_overlap, "dispatch": dispatch_overlap}  # schedules over one undivided batch


def run_layers(
    model: DeepSeek, state: State, overlap: str = "none", observe: Callable[[Launch, State], None] | None = None
) -> None:
    """Take `state` through all layers of the main model, in place. Collective: all ranks walk the same schedule.

    `observe` is called after each stage of an MoE layer, with what was run and the state as it then is.
    """
    for layer in model.dense_layers:
        run_layer(layer, state)
    moe_layers = model.moe_layers
    for launch in ONE_BATCH[overlap](len(moe_layers)):
        moe_layers[launch.layer].run(launch.stage, state)
        if observe is not None:
            observe(launch, state)


def run_layer(layer: DecoderLayer, state: State) -> None:
    """One layer, stage after stage: a dense one, or the MTP layer."""
    for stage in layer.stages:
        layer.run(stage, state)
