"""Steps of several batch sizes, on a GPU each a CUDA graph: a step of n requests replays the smallest that holds them.

Each DP group picks by its own n. Nothing is agreed between groups and nobody pads to a common size: the exchange knows
its counts on the device and has the same shape for every T (`moelab.comm`), so a group that replays its graph of 3
meets one that replays its graph of 64, or that of 0, which makes the same exchanges with no tokens.

The largest is captured first, and all take their memory from one pool: only one of them runs at a time, so the smaller
ones fit into what the largest left. Attention plans anew before each replay, outside the graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from moelab.config import ConfigError
from moelab.engine.batch import Piece
from moelab.engine.decode import Body, DecodeStep, Output
from moelab.engine.executor import Observe
from moelab.engine.places import Inputs, Places
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from moelab.ops.mla_decode import MAX_Q_LEN, MlaDecode

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Batch sizes for at most `most` requests: those of SIZES below it, and itself."""
    return (*(size for size in SIZES if size < most), most)


def uncapturable(model: DeepSeek) -> str | None:
    """Why this model's steps cannot be captured, and what to do; None if they can."""
    all_to_all = model.all_to_all
    if not isinstance(model.arithmetic, BlockFp8):
        return f"a step in {model.arithmetic} asks the host for counts and cannot be captured: take BlockFp8 arithmetic"
    if not all_to_all.on_device:
        return (
            f"a step over the {all_to_all.backend} exchange asks the host and cannot be captured: construct the model "
            "with kernels (`moelab.comm.choice.default_group`)"
        )
    if model.layers[0].tp_group.on_host:
        return (
            "attention is summed over gloo, on the host, and such a step cannot be captured: start the ranks with "
            "NCCL, one on a GPU, or take tp 1"
        )
    return None


def places_for(inputs: Inputs, sizes: Iterable[int], halves: bool, decode: Callable[[int], MlaDecode]) -> list[Places]:
    """For batches of each of `sizes` requests and of none, the largest first. `decode(n)`: attention for n requests."""
    sizes = sorted(sizes)
    if sizes[0] < 0 or sizes[-1] < 1:
        raise ConfigError(f"batch sizes are {sizes}: give positive numbers")
    if inputs.q_len > MAX_Q_LEN:
        raise ConfigError(
            f"{inputs.q_len} tokens of a request in a step: attention takes at most {MAX_Q_LEN}, so draft at most "
            f"{MAX_Q_LEN - 1}, or run without batch sizes"
        )
    return [Places(inputs, size, halves, decode) for size in sorted({0, *sizes}, reverse=True)]


class Pool:
    """Memory that captured steps share: only one of them runs at a time. What a capture gives back can be had again on
    the stream that it was taken on, hence one stream for all."""

    def __init__(self) -> None:
        self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()


class DecodeGraphs:
    """`body` on each of `places`. Collective: every rank makes it with the same sizes, for each of which it runs once
    before it is captured."""

    def __init__(self, body: Body, places: Iterable[Places], capture: bool = True, pool: Pool | None = None) -> None:
        """`places`: the largest first. `capture`: on a GPU; without it every step runs eagerly on the same tensors.
        `pool`: of other graphs whose memory these may use, since no two run at the same time. What those put out
        outlasts a run of these."""
        self._steps = {mine.size: DecodeStep(body, mine) for mine in places}
        self.sizes, self.inputs = sorted(self._steps), self._steps[0].places.inputs
        if capture and self.inputs.tokens.is_cuda:
            pool = pool or Pool()
            for step in self._steps.values():
                step.capture(pool.stream, pool.handle)

    @property
    def max_batch(self) -> int:
        return self.sizes[-1]

    def step(self, num_requests: int) -> DecodeStep:
        """The smallest that holds so many."""
        return self._steps[self.sizes[bisect_left(self.sizes, num_requests)]]

    def serves(self, pieces: list[Piece]) -> bool:
        return len(pieces) <= self.max_batch and all(len(p.tokens) <= self.inputs.q_len for p in pieces)

    def run(
        self, pieces: list[Piece], hidden: list[Tensor] | None = None, observe: Observe | None = None
    ) -> tuple[Output, list[int]]:
        """A step of these requests: what it comes to, and the first row of each. Collective. `hidden`: states [n, H]
        that the tokens of each request start from."""
        step = self.step(len(pieces))
        first = step.fill(pieces)
        if hidden:
            rows = [row + i for row, states in zip(first, hidden, strict=True) for i in range(len(states))]
            where = torch.tensor(rows, device=self.inputs.hidden.device)
            self.inputs.hidden.index_copy_(0, where, torch.cat(hidden))
        return step.run(observe), first
