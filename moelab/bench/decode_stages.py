"""The parts of a decode step, each alone: one stage of all layers after one another.

A `Part` holds a call for each layer. Together they run through the layers' own weights and through the whole cache, so
that by the time a layer's turn comes again the others have pushed it out of the L2, as in a step. What a stage reads
besides is the same for all layers: the state that one layer had when it came to that stage in a whole step, which lies
in the L2 as what the stage before has just written. Which experts tokens go to, and how many rows each got, is every
layer's own; the rows themselves are those of the exchange that was last in their slot.

The stages before the experts run over the whole batch in a dense layer, and in an MoE layer with MicroBatch over either
half; the parts are of one kind of layer then, and the dense layers' run on the weights of all layers, since three do
not push each other out. Stages that compute nothing (the all-reduce of one rank) have no part.

Dispatch and combine have an order and slots: the part "exchange" runs all four halves of a layer, one exchange at a
time, and `decode_timer.split_calls` tells which of the two took how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from moelab.engine.executor import run_layer, run_moe_layers
from moelab.model.batch import State
from moelab.model.deepseek import DeepSeek
from moelab.model.layer import DecoderLayer
from moelab.stages import ATTENTION, DENSE, MOE, Stage

Call = Callable[[], object]
EXCHANGE = "exchange"
CATEGORY = {s.name.removesuffix("_send").removesuffix("_recv"): s.category for s in (*ATTENTION, *DENSE, *MOE)}
OWN = ("topk_ids", "topk_weights", "counts")  # what every layer keeps of its own; some kB
LARGE = ("rows", "gate_up", "act", "expert_out")  # not kept for a stage that does not read them


@dataclass(frozen=True)
class Part:
    """`calls`: one for each layer and micro-batch; `layers` of them are run. `of`: "moe" or "dense" layers, or both."""

    name: str
    category: str
    of: tuple[str, ...]
    layers: int
    calls: list[Call]
    pairs: list[tuple[Call, Call]] = field(default_factory=list)  # of the exchange: dispatch and combine

    def run(self) -> None:
        for call in self.calls:
            call()


@dataclass
class Seen:
    """What a walk through the layers left. `states`, by (kind of layer, micro-batch, stage), are as the stage found
    them in the last layer of the kind; `entered`, by kind, as the first layer did; `own` by (MoE layer,
    micro-batch)."""

    states: dict[tuple[str, int, str], State] = field(default_factory=dict)
    entered: dict[str, State] = field(default_factory=dict)
    own: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)

    def enter(self, kind: str) -> State:
        """A state for the first layer of the kind, whose stream may be changed."""
        state = self.entered[kind]
        return replace(state, residual=state.residual.clone())

    def counts(self, layers: int) -> list[list[Tensor]]:
        """Of each MoE layer, rows of every expert [E/ep], by micro-batch."""
        return [[own["counts"] for (number, _), own in self.own.items() if number == layer] for layer in range(layers)]


class _Watched:
    """A layer that keeps the states it is run with."""

    def __init__(self, layer: DecoderLayer, number: int, kind: str, seen: Seen, kept: bool) -> None:
        self.stages, self._layer, self._number, self._kind = layer.stages, layer, number, kind
        self._seen, self._kept, self._micro = seen, kept, []  # micro-batches, by identity, in order

    def run(self, stage: Stage, state: State) -> None:
        if not any(state is known for known in self._micro):
            self._micro.append(state)
        micro = next(i for i, known in enumerate(self._micro) if known is state)
        if self._kept:
            unread = [name for name in LARGE if name not in stage.reads]
            self._seen.states[self._kind, micro, stage.name] = replace(state, **dict.fromkeys(unread))
        self._layer.run(stage, state)
        if self._kind == "moe" and stage.name in ("gate", "dispatch_recv"):
            own = self._seen.own.setdefault((self._number, micro), {})
            own |= {name: value.clone() for name in OWN if (value := getattr(state, name)) is not None}


def watch(model: DeepSeek, state: State, overlap: str) -> Seen:
    """Take `state` through all layers and keep what `parts` needs. Collective."""
    seen = Seen()
    dense, moe = model.dense_layers, model.moe_layers
    seen.entered["dense"] = replace(state, residual=state.residual.clone())  # which the layers change in place
    for number, layer in enumerate(dense):
        run_layer(_Watched(layer, number, "dense", seen, number == len(dense) - 1), state)
    seen.entered["moe"] = replace(state, residual=state.residual.clone())
    watched = [_Watched(layer, number, "moe", seen, number == len(moe) - 1) for number, layer in enumerate(moe)]
    run_moe_layers(watched, state, overlap)
    return seen


def parts(model: DeepSeek, seen: Seen, overlap: str) -> list[Part]:
    """In the order of the stages. Runs of a part with an exchange in it are collective."""
    dense, moe = model.dense_layers, model.moe_layers
    halves = overlap == "microbatch"
    whole = "dense" if halves or not moe else "moe"
    found = []
    for stage in ATTENTION:
        if stage.name == "tp_reduce" and model.parallel.tp == 1:
            continue
        if dense or not halves:  # the whole batch, on all layers
            kinds = ("dense",) if halves else (*(("dense",) if dense else ()), *(("moe",) if moe else ()))
            calls = [_call(layer, stage, seen, (whole, 0)) for layer in model.layers]
            found.append(Part(stage.name, stage.category, kinds, len(model.layers), calls))
        if halves and moe:
            calls = [_call(x, stage, seen, ("moe", micro), i) for i, x in enumerate(moe) for micro in (0, 1)]
            found.append(Part(stage.name, stage.category, ("moe",), len(moe), calls))
    for stage in DENSE if dense else ():
        calls = [_call(layer, stage, seen, ("dense", 0)) for layer in dense]
        found.append(Part(stage.name, stage.category, ("dense",), len(dense), calls))
    micros = (0, 1) if halves else (0,)
    for stage in MOE if moe else ():
        if stage.name == "dispatch_send":
            pairs = [_exchange(layer, seen, micro, i) for i, layer in enumerate(moe) for micro in micros]
            calls = [call for pair in pairs for call in pair]
            found.append(Part(EXCHANGE, "", ("moe",), len(moe), calls, pairs))
        elif not stage.communicates:
            calls = [_call(x, stage, seen, ("moe", micro), i) for i, x in enumerate(moe) for micro in micros]
            found.append(Part(stage.name, stage.category, ("moe",), len(moe), calls))
    return found


def _fresh(seen: Seen, kind: str, micro: int, stage: str, number: int | None) -> State:
    own = {} if number is None else seen.own.get((number, micro), {})
    return replace(seen.states[kind, micro, stage], **own)


def _call(layer: DecoderLayer, stage: Stage, seen: Seen, of: tuple[str, int], number: int | None = None) -> Call:
    def call() -> State:
        state = _fresh(seen, *of, stage.name, number)
        layer.run(stage, state)
        return state

    return call


def _exchange(layer: DecoderLayer, seen: Seen, micro: int, number: int) -> tuple[Call, Call]:
    """Dispatch and combine of a layer; the second goes on with the first one's handle."""
    stage = {stage.name: stage for stage in MOE}
    flight: list[State] = []

    def dispatch() -> None:
        state = _fresh(seen, "moe", micro, "dispatch_send", number)
        layer.run(stage["dispatch_send"], state)
        layer.run(stage["dispatch_recv"], state)
        flight.append(state)

    def combine() -> None:
        state = flight.pop()
        state.expert_out = seen.states["moe", micro, "combine_send"].expert_out
        state.shared = seen.states["moe", micro, "combine_recv"].shared
        layer.run(stage["combine_send"], state)
        layer.run(stage["combine_recv"], state)

    return dispatch, combine
