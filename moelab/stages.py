"""A decoder layer as named stages, and the three orders in which the study runs them. One definition, two readers.

The engine binds each stage to a function over a micro-batch's state; the performance model binds it to a time. Both
walk the same list, so a schedule that the model praises is the one that runs.

A stage names the parts of the state that it reads and writes. The state of a micro-batch is born with `residual`
(the residual stream) and the batch's metadata, which every stage may read; `cache` is the KV cache.

The five steps of the study group the stages of an MoE layer between the points where a micro-batch may yield:

    S1  input_norm · qkv_a · qkv_norm · q_b · rope_append · bmm_k
    S2  mla · bmm_v · o_proj · tp_reduce · post_norm · gate
    S3  dispatch_send · shared_expert
    S4  dispatch_recv · gate_up · silu_mul_quant · down · combine_send
    S5  combine_recv

`MicroBatch` runs two halves, A and B, three steps apart: A3 B1 A4 B2 A5 B3, then A1 of the next layer, B4 A2 B5, and
again. A dispatch in flight hides under the other half's S1, a combine under its S2.
Source: "Lower latency and higher throughput with multi-node DeepSeek deployment", 2025-04-18.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Stage:
    """One kernel's worth of work in a layer."""

    name: str
    step: int  # 1…5; 3 is also the dense layers' feed-forward
    category: str  # the study's kinds of kernel
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    communicates: bool = False


def _stage(name: str, step: int, category: str, flow: str, communicates: bool = False) -> Stage:
    reads, writes = flow.split("->")
    return Stage(name, step, category, tuple(reads.split()), tuple(writes.split()), communicates)


CATEGORIES = (
    "Dispatch", "Combine", "GroupGEMM", "GEMM", "MLA", "BMM", "activation", "norm", "router", "other",
)  # fmt: skip

ATTENTION = (
    _stage("input_norm", 1, "norm", "residual -> x"),
    _stage("qkv_a", 1, "GEMM", "x -> q_a kv_a"),
    _stage("qkv_norm", 1, "norm", "q_a kv_a -> q_c latent k_pe"),
    _stage("q_b", 1, "GEMM", "q_c -> q_nope q_pe"),
    _stage("rope_append", 1, "other", "q_pe latent k_pe -> q_pe cache"),
    _stage("bmm_k", 1, "BMM", "q_nope -> q_latent"),
    _stage("mla", 2, "MLA", "q_latent q_pe cache -> context"),
    _stage("bmm_v", 2, "BMM", "context -> heads"),
    _stage("o_proj", 2, "GEMM", "heads -> attention"),
    _stage("tp_reduce", 2, "other", "attention -> attention", communicates=True),
    _stage("post_norm", 2, "norm", "residual attention -> residual x"),
)

MOE = (
    _stage("gate", 2, "router", "x -> topk_ids topk_weights"),
    _stage("dispatch_send", 3, "Dispatch", "x topk_ids topk_weights -> handle", communicates=True),
    _stage("shared_expert", 3, "GEMM", "x -> shared"),
    _stage("dispatch_recv", 4, "Dispatch", "handle -> rows counts", communicates=True),
    _stage("gate_up", 4, "GroupGEMM", "rows counts -> gate_up"),
    _stage("silu_mul_quant", 4, "activation", "gate_up counts -> act"),
    _stage("down", 4, "GroupGEMM", "act counts -> expert_out"),
    _stage("combine_send", 4, "Combine", "handle expert_out -> handle", communicates=True),
    _stage("combine_recv", 5, "Combine", "handle shared residual -> residual", communicates=True),
)

DENSE = (
    _stage("dense_gate_up", 3, "GEMM", "x -> gate_up"),
    _stage("dense_silu_mul", 3, "activation", "gate_up -> act"),
    _stage("dense_down", 3, "GEMM", "act residual -> residual"),
)

MOE_LAYER = ATTENTION + MOE
DENSE_LAYER = ATTENTION + DENSE


@dataclass(frozen=True)
class Launch:
    """A stage in its place: which micro-batch runs which stage of which MoE layer (0 is the first one; the
    engine numbers dense layers before it -n … -1)."""

    micro_batch: int
    layer: int
    stage: Stage


class Span(NamedTuple):
    """When a launch ran, measured or modelled: us since the first began."""

    micro_batch: int
    layer: int
    stage: str
    start_us: float
    end_us: float


def no_overlap(num_layers: int) -> Iterator[Launch]:
    """One micro-batch, one stage after another, the shared expert before the exchange begins."""
    order = _move(MOE_LAYER, "shared_expert", before="dispatch_send")
    for layer in range(num_layers):
        yield from (Launch(0, layer, stage) for stage in order)


def dispatch_overlap(num_layers: int) -> Iterator[Launch]:
    """One micro-batch; the shared expert runs between dispatch's send and receive."""
    for layer in range(num_layers):
        yield from (Launch(0, layer, stage) for stage in MOE_LAYER)


def micro_batch(num_layers: int) -> Iterator[Launch]:
    """Two micro-batches, 0 (A) and 1 (B), three steps apart; each may be empty, the exchanges happen all the same."""
    for micro, layer, step in _micro_batch_steps(num_layers):
        yield from (Launch(micro, layer, stage) for stage in MOE_LAYER if stage.step == step)


def _micro_batch_steps(num_layers: int) -> Iterator[tuple[int, int, int]]:
    steps = [(layer, step) for layer in range(num_layers) for step in range(1, 6)]
    ahead = 2  # A has done S1 and S2 when B begins
    a, b = iter(steps), iter(steps)
    for layer, step in [next(a) for _ in range(ahead)] if steps else []:
        yield 0, layer, step
    for layer, step in a:
        yield 0, layer, step
        yield 1, *next(b)
    for layer, step in b:
        yield 1, layer, step


def _move(stages: tuple[Stage, ...], name: str, before: str) -> list[Stage]:
    moved = next(stage for stage in stages if stage.name == name)
    rest = [stage for stage in stages if stage is not moved]
    at = next(i for i, stage in enumerate(rest) if stage.name == before)
    return rest[:at] + [moved] + rest[at:]


SCHEDULES = {"none": no_overlap, "dispatch": dispatch_overlap, "microbatch": micro_batch}
