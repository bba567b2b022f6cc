"""Rooflines: FLOP and bytes of the matrix kernels, and what a GPU could make of them.

A kernel that computes F FLOP and has to move D bytes takes at least max(F / peak, D / bandwidth). Over the intensity
F / D [FLOP/byte] these are a slope and a ceiling for the FLOP/s it reaches; they meet at the ridge, peak / bandwidth.
F and D follow from what is computed, not from how: every operand is moved once. With the study's counts
("Lower latency and higher throughput with multi-node DeepSeek deployment", 2025-04-18), one byte a value:

    GEMM        [m, k] × [k, n]                F = 2·m·k·n          D = mk + kn + mn
    GroupGEMM   g of them                      F = 2·g·m·k·n        D = g·(mk + kn + mn)

The output is BF16 in truth: `out_itemsize` 2 counts it so. The weights of a group without rows are not read, so where
groups differ it is 2·rows·k·n and rows·k + active·kn + rows·n. For m ≪ n, k the weights are nearly all of D, and
F / D ≈ 2m, whatever the shape.

    MLA decode  B·q·h queries, kv rows each    F = 2·(576 + 512)·B·q·h·kv
                                               D = B·(kv·576·2 + q·h·(576 + 512)·2)

A cached row, 576 values, is read once for all heads and queries of its request, and its first 512 are summed; queries
and outputs are BF16. For long caches F / D ≈ 1.9·q·h: drafts and heads raise it, batch and length do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moelab.config import ConfigError, ModelConfig
from moelab.hardware import GPU
from moelab.results import Record, Store
from moelab.results.record import Scalar

OPS = ("linear", "grouped_gemm", "mla")  # of `moelab bench ops`
BF16_BYTES = 2
# Of a cached row, as `moelab.ops.mla_cache` has it: FP8 keeps 4 scales of float32 and the rotary part in BF16.
ROW_BYTES = {"bf16": 576 * BF16_BYTES, "fp8": 512 + 4 * 4 + 64 * BF16_BYTES}


@dataclass(frozen=True)
class Work:
    """What a kernel has to do at least."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    def tflops(self, us: float) -> float:
        """TFLOP/s reached by doing it in `us`."""
        return self.flops / us / 1e6


def gemm(m: float, n: int, k: int, out_itemsize: int = 1) -> Work:
    """[m, k] × [k, n], operands of one byte a value."""
    return Work(2.0 * m * n * k, m * k + n * k + out_itemsize * m * n)


def grouped_gemm(groups: float, rows: float, n: int, k: int, out_itemsize: int = 1) -> Work:
    """`rows` over all `groups` matrices together; groups without rows are none."""
    return Work(2.0 * rows * n * k, rows * k + groups * n * k + out_itemsize * rows * n)


def mla(batch: int, q_len: int, kv_len: int, heads: int, kv: str = "bf16") -> Work:
    """One step's absorbed attention of `batch` requests, each with a cache of `kv_len` rows in the form `kv`."""
    values, queries = 576 + 512, batch * q_len * heads
    moved = batch * kv_len * ROW_BYTES[kv] + queries * values * BF16_BYTES
    return Work(2.0 * values * queries * kv_len, moved)


def projections(model: ModelConfig, tp: int = 1) -> dict[str, tuple[int, int]]:
    """{name: (n, k)} of an MoE layer's dense GEMMs on one GPU, qkv_a as one. EP does not occur in them."""
    hidden, heads, width = model.hidden_size, model.num_attention_heads // tp, model.moe_intermediate_size
    return {
        "qkv_a": (model.q_lora_rank + model.latent_dim, hidden),
        "q_b": (heads * model.qk_head_dim, model.q_lora_rank),
        "o_proj": (hidden, heads * model.v_head_dim),
        "shared gate_up": (2 * width * model.n_shared_experts, hidden),
        "shared down": (hidden, width * model.n_shared_experts),
    }


def expert_gemms(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """{name: (n, k)} of one routed expert."""
    hidden, width = model.hidden_size, model.moe_intermediate_size
    return {"gate_up": (2 * width, hidden), "down": (hidden, width)}


def work_of(record: Record, out_itemsize: int = 1) -> Work:
    """Of what a Record of `moelab bench ops` timed. Raises ConfigError for a metric that is not of OPS."""
    p = record.params
    if record.metric == "linear":
        return gemm(p["m"], p["n"], p["k"], out_itemsize)
    if record.metric == "grouped_gemm":
        return grouped_gemm(p["active"], p["rows"], p["n"], p["k"], out_itemsize)
    if record.metric == "mla":
        return mla(p["batch"], p["q_len"], p["kv_len"], p["heads"], p["kv"])
    raise ConfigError(f"no FLOP and bytes are known for {record.metric!r}; legal: {', '.join(OPS)}")


@dataclass(frozen=True)
class Roofs:
    """The two bounds of one GPU. `tflops` by precision ("fp8", "bf16"), where known."""

    name: str
    gb_s: float
    tflops: dict[str, float]

    def ridge(self, precision: str) -> float:
        """The intensity [FLOP/byte] from which on a kernel can be bound by compute."""
        return self.tflops[precision] * 1e3 / self.gb_s

    def attainable(self, intensity: float, precision: str) -> float:
        """TFLOP/s at most."""
        return min(self.tflops[precision], intensity * self.gb_s / 1e3)

    def least_us(self, work: Work, precision: str) -> float:
        """The time that `work` takes at least."""
        return work.flops / self.attainable(work.intensity, precision) / 1e6


def nominal(gpu: GPU) -> Roofs:
    """Of the data sheet."""
    return Roofs(f"{gpu.name} data sheet", gpu.hbm_gb_s, {"fp8": gpu.fp8_tflops, "bf16": gpu.bf16_tflops})


def measured(store: Store, gpu: str) -> Roofs | None:
    """Medians of bench "roofs" on one `gpu`; None where not even its bandwidth was measured."""
    found = {r.metric: r.p50 for r in store.records("roofs", gpu=gpu, gpu_count=1)}
    if "copy" not in found:
        return None
    peaks = {name: value for name, value in found.items() if name != "copy"}
    return Roofs(f"{gpu.removeprefix('NVIDIA ')} measured", found["copy"], peaks)


@dataclass(frozen=True)
class Point:
    """A kernel on the roofline: TFLOP/s by its median time, `low` by its p80 and `high` by its p20."""

    intensity: float
    tflops: float
    low: float
    high: float


def point(record: Record, out_itemsize: int = 1) -> Point:
    """Where a timing Record stands. Raises ConfigError for one that `work_of` does not know."""
    work = work_of(record, out_itemsize)
    return Point(work.intensity, *(work.tflops(us) for us in (record.p50, record.p80, record.p20)))


def timed(work: Work, us: float) -> Point:
    """Where work stands that somebody timed without saying how far his samples lie apart."""
    return Point(work.intensity, *[work.tflops(us)] * 3)


def series(records: Iterable[Record], axis: str, metric: str, backend: str, **params: Scalar) -> dict[Scalar, Record]:
    """{value of the parameter `axis`: Record}, rising, of those that match; {} where there are none. Raises ConfigError
    where two share a value, so that `params` has to say more."""
    found: dict[Scalar, Record] = {}
    for r in records:
        if (r.metric, r.backend) != (metric, backend) or not params.items() <= r.params.items() or axis not in r.params:
            continue
        if (other := found.get(r.params[axis])) is not None:
            differ = sorted(k for k in {*r.params, *other.params} if r.params.get(k) != other.params.get(k))
            raise ConfigError(f"two records of {metric} by {backend} at {axis} {r.params[axis]} differ in {differ}")
        found[r.params[axis]] = r
    return dict(sorted(found.items()))


def halving_cost(us_by_m: dict[int, float], m: int) -> float:
    """What two micro-batches pay: 2·t(m/2) − t(m), in us. Raises ConfigError where m or m/2 was not timed."""
    missing = [x for x in (m // 2, m) if x not in us_by_m]
    if m % 2 or missing:
        raise ConfigError(f"m is {m}: it has to be even and timed, as m/2; timed are {sorted(us_by_m)}")
    return 2 * us_by_m[m // 2] - us_by_m[m]


def spread(curves: Sequence[dict[float, float]]) -> float | None:
    """How far curves {x: y} lie apart where they share an x: the largest ratio of two y over all x that at least two
    of them have; 1 is coincidence. None where no two share one."""
    places = {x for curve in curves for x in curve}
    at = {x: [curve[x] for curve in curves if x in curve] for x in places}
    return max((max(y) / min(y) for y in at.values() if len(y) > 1), default=None)
