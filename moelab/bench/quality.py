"""What quantisation costs a real model: bits per byte of held-out text with operands that went through FP8.

A forward pass walks the stages of every layer (`moelab.stages`) in float32; the inputs of its matrix multiplications,
and on demand the weights, take a round trip through a scheme (`moelab.bench.schemes`) on the way. Accumulation stays
float32, so a difference is the operands' and nothing else's. Router, norms, embedding, head and softmax stay as they
are, as in DeepSeek-V3. Attention runs absorbed, as in decode, so the multiplications by k_b and v_b are among the
quantised; those inside attention are not, but the latent cache can be.

A text is predicted twice, with and without, and compared byte by byte: the difference of two runs on the same bytes has
a far smaller error than either. Windows of text are the sample, so that the standard error holds although the bytes of
a window depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from moelab.bench.schemes import round_trip
from moelab.config import MoelabError, ParallelConfig
from moelab.engine.batch import build
from moelab.engine.kv_cache import PagedCache, pages_for
from moelab.engine.sequence import Sampling, Sequence
from moelab.model.batch import State
from moelab.model.deepseek import DeepSeek
from moelab.model.layer import DecoderLayer
from moelab.model.moe import MLP, MoE
from moelab.ops.activation import silu_mul
from moelab.results import Provenance, Record

BENCH = "quantization"
METRICS = ("heldout_bits_per_byte", "bits_per_byte_lost", "bits_per_byte_lost_standard_error")

STEP = 16  # windows run together: what "per tensor" means for activations

# {stage: (what reads its result, where that stands in the state)}: the inputs of all multiplications but the shared
# expert's second. Experts read what the router reads too, in float32, so it is touched only after the router.
INPUTS = {
    "input_norm": ("qkv_a", "x"), "qkv_norm": ("q_b", "q_c"), "q_b": ("k_b", "q_nope"), "mla": ("v_b", "context"),
    "bmm_v": ("o_proj", "heads"), "gate": ("experts gate_up", "x"), "silu_mul_quant": ("experts down", "act"),
    "dense_silu_mul": ("dense down", "act"),
}  # fmt: skip
DENSE_INPUTS = INPUTS | {"post_norm": ("dense gate_up", "x")}


@dataclass(frozen=True)
class Variant:
    """Names of schemes; None leaves a part as it is: weights as the checkpoint holds them (tinyseek's: block FP8), the
    rest in float32."""

    name: str
    weights: str | None = None
    activations: str | None = None
    latent: str | None = None  # of the cache's rows, the rotary part left out


VARIANTS = (
    Variant("as shipped"),
    Variant("BF16", "BF16", "BF16"),
    Variant("1×128", None, "1×128"),
    Variant("1×128, also the latent cache", None, "1×128", "1×128"),
    Variant("1×128, scales 2ⁿ", "128×128, 2ⁿ", "1×128, 2ⁿ"),
    Variant("per row", "per row", "per row"),
    Variant("per tensor", "per tensor", "per tensor"),
    Variant("INT8 per tensor", "INT8 per tensor", "INT8 per tensor"),
)


@dataclass(frozen=True)
class Scored:
    """Bits of each scored byte [windows, bytes], float64, the last ones of windows of `window_tokens`."""

    variant: Variant
    bits: Tensor
    window_tokens: int

    @property
    def bits_per_byte(self) -> float:
        return float(self.bits.mean())

    def against(self, base: Scored) -> tuple[float, float]:
        """(mean, standard error) of the paired difference in bits per byte, windows as the sample."""
        if self.bits.shape != base.bits.shape:
            raise MoelabError(f"texts differ: {list(self.bits.shape)} bytes against {list(base.bits.shape)}")
        difference = (self.bits - base.bits).mean(1)
        return float(difference.mean()), float(difference.std() / len(difference) ** 0.5)

    def records(self, base: Scored, provenance: Provenance, model: str) -> list[Record]:
        """Bits per byte, the mean difference from `base` and its standard error."""
        v = self.variant
        params = {"model": model, "weights": v.weights, "activations": v.activations, "latent": v.latent,
                  "window_tokens": self.window_tokens, "scored_bytes": self.bits.numel()}  # fmt: skip
        values = (self.bits_per_byte, *self.against(base))
        return [
            Record.from_samples(
                [value], bench=BENCH, metric=metric, unit="bit/B", clock="none", params=params, provenance=provenance
            )
            for metric, value in zip(METRICS, values, strict=True)
        ]


@torch.no_grad()
def score(folder: str | Path, windows: list[list[int]], variant: Variant, scored: int) -> Scored:
    """The checkpoint in `folder` on `windows` of token ids, equal in length and each token a byte; the last `scored` of
    each window count. The model is loaded afresh, since its weights are changed. Raises MoelabError."""
    length = _length(windows)
    if not 0 < scored < length:
        raise MoelabError(f"scored is {scored}: legal are 1…{length - 1} for windows of {length} tokens")
    model = DeepSeek.load(folder, ParallelConfig(), max_tokens=min(len(windows), STEP) * length)
    if variant.weights:
        _quantize_weights(model, variant.weights)
    if variant.activations:
        for layer in (layer for layer in model.moe_layers if layer.feed_forward.shared_mlp):
            layer.feed_forward.shared_mlp = _SharedMLP(layer.feed_forward.shared_mlp, variant.activations)
    nats = []
    for start in range(0, len(windows), STEP):
        part = windows[start : start + STEP]
        state = _forward(model, part, lambda layer, stage, state: _quantize(layer, stage, state, variant))
        logits = model.logits(model.finish(state)).unflatten(0, (len(part), length))[:, -scored - 1 : -1]
        targets = torch.tensor(part)[:, -scored:]
        nats.append(cross_entropy(logits.transpose(1, 2), targets, reduction="none").double())
    model.close()
    return Scored(variant, torch.cat(nats) / math.log(2), length)


@torch.no_grad()
def capture(folder: str | Path, windows: list[list[int]]) -> dict[str, Tensor]:
    """{"layer 2: o_proj": [rows, K]}: the inputs of the multiplications of every layer as the model computes them on
    `windows`, float32. A row is a token, or a head's or an expert's part of one."""
    model, found = DeepSeek.load(folder, ParallelConfig(), max_tokens=len(windows) * _length(windows)), {}

    def keep(layer: DecoderLayer, stage: str, state: State) -> None:
        reader, name = _inputs(layer).get(stage, (None, None))
        if reader:
            found[f"layer {layer.attention.layer}: {reader}"] = _rows(state, name).clone()

    _forward(model, windows, keep)
    model.close()
    return found


def _forward(model: DeepSeek, windows: list[list[int]], after: Callable[[DecoderLayer, str, State], None]) -> State:
    """All windows through all layers in one step; `after` every stage."""
    length = _length(windows)
    cache = PagedCache(model.num_caches, len(windows) * pages_for(length), model.config.latent_dim, torch.float32)
    sequences = [Sequence(i, list(w), Sampling(1), pages=cache.take(length)) for i, w in enumerate(windows)]
    state = model.begin(build([(s, length) for s in sequences], "cpu", max_absorbed_q_len=length), cache.rows)
    for layer in model.layers:
        for stage in layer.stages:
            layer.run(stage, state)
            after(layer, stage.name, state)
    return state


def _inputs(layer: DecoderLayer) -> dict[str, tuple[str, str]]:
    return INPUTS if isinstance(layer.feed_forward, MoE) else DENSE_INPUTS


def _rows(state: State, name: str) -> Tensor:
    """[rows, K] of a value in the state; of an expert-major buffer the populated rows only."""
    value = getattr(state, name)
    return value[_populated(state)] if _is_padded(state, name) else value.flatten(0, -2)


def _is_padded(state: State, name: str) -> bool:
    return name == "act" and state.act.dim() == 3


def _populated(state: State) -> Tensor:
    """bool [experts, room]"""
    return torch.arange(state.act.shape[1]) < state.counts[:, None]


def _quantize(layer: DecoderLayer, stage: str, state: State, variant: Variant) -> None:
    reader, name = _inputs(layer).get(stage, (None, None))
    if reader and variant.activations:
        kept = round_trip(_rows(state, name), variant.activations)
        if _is_padded(state, name):
            state.act[_populated(state)] = kept
        else:
            setattr(state, name, kept.view_as(getattr(state, name)))
    if stage == "rope_append" and variant.latent:
        rows, slots, width = state.cache[layer.attention.layer].flatten(0, 1), state.batch.slots, state.latent.shape[1]
        rows[slots, :width] = round_trip(rows[slots, :width], variant.latent)


def _quantize_weights(model: DeepSeek, scheme: str) -> None:
    """Every matrix that a checkpoint keeps in FP8, in place; gate and up each by itself."""
    for layer in model.layers:
        a, f = layer.attention, layer.feed_forward
        q_a, kv_a = a.qkv_a_w.split([a.config.q_lora_rank, a.config.latent_dim])
        for weight in (q_a, a.q_b_w, kv_a, a.w_uk.mT, a.w_uv, a.o_w):
            weight.copy_(round_trip(weight, scheme))
        pairs = [(f.gate_up_w, f.down_w)] if isinstance(f, MoE) else []
        mlp = f.shared_mlp if isinstance(f, MoE) else f.mlp
        for gate_up, down in pairs + ([(mlp.gate_up, mlp.down)] if mlp else []):
            gate_up.copy_(round_trip(gate_up.unflatten(-2, (2, -1)), scheme).flatten(-3, -2))
            down.copy_(round_trip(down, scheme))


@dataclass
class _SharedMLP:
    """A shared expert whose second multiplication reads a round trip too; its first reads what is touched already."""

    mlp: MLP
    scheme: str

    def __call__(self, x: Tensor) -> Tensor:
        act = silu_mul(linear(x, self.mlp.gate_up))
        return linear(round_trip(act, self.scheme), self.mlp.down)


def _length(windows: list[list[int]]) -> int:
    lengths = sorted({len(window) for window in windows})
    if len(lengths) != 1:
        raise MoelabError(f"windows of {lengths} tokens: give at least one, all of one length")
    return lengths[0]
