"""`predict`: one decode step of a deployment, its speed, its memory, and how sure that is.

    step  = MoE layers as the schedule runs them + dense layers + head + drafts + host
    speed = tokens per step / step            throughput per GPU = batch / tp · speed

A draft costs one MTP layer for the requests' last tokens (projection, layer, head), run without overlap. `host` is
what the GPU waits for between steps: launch, sampling, scheduling; HOST_US is an assumption until `calibrate` finds
records of it.

The interval. Every group of terms (`layer.GROUPS`) has an error, the half-width of 80 %. Each group is made longer and
shorter by its error and the step timed again, so that a term hidden under another counts as little as it should; the
shifts of independent groups add in quadrature, upwards and downwards apart. UNMODELLED adds what no term holds: another
engine's kernels, clocks, uneven batches. It is what a model with every operator in its tables still misses:
aiconfigurator's mean error of TPOT is 7.8 % (arXiv 2601.06288), which makes 12.5 % at 80 %, its tables' own included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moelab.config import ConfigError, ModelConfig
from moelab.hardware import GPU
from moelab.perf import layer, memory, overlap
from moelab.perf.deployment import GRAPHS_BYTES, RESERVE, Deployment, deployment
from moelab.perf.fabric import Exchange
from moelab.perf.kernels import Kernels
from moelab.perf.layer import GROUPS, LayerTerms
from moelab.perf.tables import Tables, load
from moelab.perf.term import Term, combined
from moelab.stages import CATEGORIES, SCHEDULES

LEVEL = 0.8
HOST_US, HOST_ERROR = 1500.0, 0.7  # between steps; with head and draft it makes the 3 ms that the checks assume
UNMODELLED = 0.12  # of the step
TERMS = (*dict.fromkeys(GROUPS.values()), "head", "draft", "host")


@dataclass(frozen=True)
class Origin:
    """What a term adds to the step, and how that is known."""

    ms: float  # of work; under overlap some of it is hidden
    origin: str
    error: float  # half-width of 80 %, relative
    source: str


@dataclass(frozen=True)
class Prediction:
    """Times are of one decode step of every DP group. `interval` holds [low, high] of 80 %."""

    deployment: Deployment
    overlap: str  # the schedule that was taken
    step_ms: float
    tok_s_per_request: float
    tok_s_per_gpu: float
    tok_s_per_node: float
    layer_us: dict[str, float]  # one MoE layer by the study's categories; "total" is their sum
    dense_us: float  # one dense layer
    tail_us: dict[str, float]  # head, draft, host
    memory_bytes: dict[str, float]
    fits: bool
    largest_batch: int
    interval: dict[str, list[float]]
    origins: dict[str, Origin]
    notes: tuple[str, ...] = field(default=())

    def to_dict(self, layer_only: bool = False) -> dict:
        """As `moelab predict --json` prints it."""
        d = self.deployment
        what = {
            "gpu": d.gpu.name, "dp": d.parallel.dp, "tp": d.parallel.tp, "ep": 1 if d.expert_tp else d.parallel.ep,
            "batch": d.batch, "kv_len": d.kv_len, "draft_tokens": d.draft_tokens, "acceptance": list(d.acceptance),
            "overlap": self.overlap, "fabric": d.fabric, "alltoall": d.alltoall, "imbalance": d.imbalance,
            "redundant_experts": d.redundant,
        }  # fmt: skip
        origins = {name: vars(origin) for name, origin in self.origins.items()}
        if layer_only:
            inside = {k: v for k, v in origins.items() if k in GROUPS.values()}
            interval = {"level": LEVEL, "layer_us": self.interval["layer_us"]}
            return {"deployment": what, "layer_us": self.layer_us, "interval": interval, "origins": inside,
                    "notes": list(self.notes)}  # fmt: skip
        return {
            "deployment": what, "step_ms": self.step_ms, "tok_s_per_request": self.tok_s_per_request,
            "tok_s_per_gpu": self.tok_s_per_gpu, "tok_s_per_node": self.tok_s_per_node, "layer_us": self.layer_us,
            "dense_layer_us": self.dense_us, "tail_us": self.tail_us, "memory_bytes": self.memory_bytes,
            "fits": self.fits, "largest_batch": self.largest_batch, "interval": {"level": LEVEL, **self.interval},
            "origins": origins, "notes": list(self.notes),
        }  # fmt: skip


def predict(
    gpu: str | GPU,
    dp: int,
    tp: int = 1,
    *,
    ep: int | None = None,
    batch: float,
    kv_len: float,
    draft_tokens: int = 0,
    acceptance: float | Sequence[float] = 0.0,
    overlap: str = "best",
    fabric: str | None = None,
    alltoall: str = "deepep",
    imbalance: float = 1.0,
    redundant_experts: int = 0,
    model: str | ModelConfig = "deepseek-v3",
    kv_dtype: str = "bf16",
    expert_dtype: str = "fp8",
    capacity: float | None = None,
    reserve: float = RESERVE,
    scale: Mapping[str, float] | None = None,
    tables: Tables | None = None,
    records: str | Path | None = None,
) -> Prediction:
    """Predict a decode step of dp groups of tp GPUs.

    batch: requests of one DP group, may be fractional. kv_len: tokens in a request's cache. draft_tokens, acceptance:
    MTP drafts per step and their chance (or one per depth). overlap: none, dispatch, microbatch, or the best of them.
    fabric: what joins nodes (inside one it is NVLink). imbalance: rows of the busiest GPU over the mean.
    redundant_experts: copies beside the model's experts. capacity: bytes of the device, as it reports them.
    scale: {term of TERMS: factor}, to ask what a faster kernel would bring. tables, records: measurements to use
    (default: ./records, then the package's). Raises ConfigError for what cannot be, naming the nearest legal choice.
    """
    d = deployment(
        gpu, dp, tp, ep=ep, batch=batch, kv_len=kv_len, draft_tokens=draft_tokens, acceptance=acceptance,
        overlap=overlap, fabric_name=fabric, alltoall=alltoall, imbalance=imbalance,
        redundant_experts=redundant_experts, model=model, kv_dtype=kv_dtype, expert_dtype=expert_dtype,
        capacity=capacity, reserve=reserve,
    )  # fmt: skip
    return evaluate(d, load(records) if tables is None else tables, scale)


def evaluate(
    d: Deployment, tables: Tables, scale: Mapping[str, float] | None = None, interval: bool = True
) -> Prediction:
    """`predict` of a checked deployment; five times as fast without the interval (then {})."""
    unknown = [name for name in scale or {} if name not in TERMS]
    if unknown:
        raise ConfigError(f"no term {unknown[0]!r} to scale; there are: {', '.join(TERMS)}")
    step = _Step.of(d, tables)
    if scale:
        step = step.scaled(scale)
    timed = {s: step.timed(s) for s in (SCHEDULES if d.overlap == "best" else [d.overlap])}
    chosen = min(timed, key=lambda s: round(timed[s][0], 6))  # the first of equals, which is the simplest
    total_us, steady = timed[chosen]
    origins = step.origins()
    speed = 1e6 * d.tokens_per_step / total_us
    per_gpu = d.batch / d.parallel.tp * speed
    node = _node(d)
    parts, largest = _memory(d)
    by_category = {c: steady.by_category.get(c, 0.0) for c in CATEGORIES}
    return Prediction(
        d, chosen, total_us / 1e3, speed, per_gpu, node * per_gpu, {"total": steady.us, **by_category},
        overlap.dense(layer.us_of(step.dense, {})).us, {name: term.us for name, term in step.tail.items()}, parts,
        d.batch <= largest, largest, step.interval(chosen) if interval else {}, origins, _notes(d, origins, largest),
    )  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """All terms of a step: a whole MoE layer, one of its halves, a dense layer, the tail."""

    d: Deployment
    whole: LayerTerms
    half: LayerTerms
    dense: dict[str, Term]
    tail: dict[str, Term]

    @classmethod
    def of(cls, d: Deployment, tables: Tables) -> _Step:
        kernels = Kernels(d.gpu, d.model, tables)
        exchange = Exchange(d.gpu, d.model, d.parallel, d.alltoall, d.fabric, tables)
        whole = layer.moe_layer(d, kernels, exchange, d.batch, d.q_len)
        half = layer.moe_layer(d, kernels, exchange, d.batch / 2, d.q_len)
        return cls(d, whole, half, layer.dense_layer(d, kernels, exchange), _tail(d, kernels, exchange))

    def timed(self, schedule: str, factors: Mapping[str, float] | None = None) -> tuple[float, overlap.Walked]:
        """(us of the whole step, one MoE layer), every group of terms times its factor."""
        f = {} if factors is None else factors
        model = self.d.model
        parts = [self.half.micro_batch(f)] * 2 if schedule == "microbatch" else [self.whole.micro_batch(f)]
        moe, one = overlap.layers(schedule, model.num_moe_layers, parts)
        dense = model.first_k_dense_replace * overlap.dense(layer.us_of(self.dense, f)).us
        return moe + dense + sum(term.us * f.get(name, 1.0) for name, term in self.tail.items()), one

    def scaled(self, factors: Mapping[str, float]) -> _Step:
        def moe(terms: LayerTerms) -> LayerTerms:
            dispatch, combine = factors.get("Dispatch", 1.0), factors.get("Combine", 1.0)
            return replace(terms, stages=_scaled(terms.stages, factors), dispatch=terms.dispatch.scaled(dispatch),
                           combine=terms.combine.scaled(combine))  # fmt: skip

        tail = {name: term.scaled(factors.get(name, 1.0)) for name, term in self.tail.items()}
        return replace(self, whole=moe(self.whole), half=moe(self.half), dense=_scaled(self.dense, factors), tail=tail)

    def interval(self, schedule: str) -> dict[str, list[float]]:
        """80 % of the step, of what follows from it, and of a layer: every group moved to both ends of its error."""
        base, one = self.timed(schedule)
        steady = one.us
        moved = [[-UNMODELLED * base, UNMODELLED * base, -UNMODELLED * steady, UNMODELLED * steady]]
        for name, origin in self.origins().items():
            ends = [self.timed(schedule, {name: f}) for f in (1 / (1 + origin.error), 1 + origin.error)]
            moved.append([total - base for total, _ in ends] + [one.us - steady for _, one in ends])
        low, high = _ends(base, [m[:2] for m in moved])
        speed = 1e6 * self.d.tokens_per_step
        per_gpu, node = self.d.batch / self.d.parallel.tp * speed, _node(self.d)
        return {
            "step_ms": [low / 1e3, high / 1e3],
            "tok_s_per_request": [speed / high, speed / low],
            "tok_s_per_gpu": [per_gpu / high, per_gpu / low],
            "tok_s_per_node": [node * per_gpu / high, node * per_gpu / low],
            "layer_us": list(_ends(steady, [m[2:] for m in moved])),
        }

    def origins(self) -> dict[str, Origin]:
        """By group: its work in the whole step, added up as if one after another."""
        model = self.d.model
        terms: dict[str, list[Term]] = {}
        whole = {**self.whole.stages, "dispatch": self.whole.dispatch, "combine": self.whole.combine}
        for times, count in ((whole, model.num_moe_layers), (self.dense, model.first_k_dense_replace)):
            for stage, term in times.items():
                terms.setdefault(GROUPS[stage], []).append(term.scaled(count))
        found = {}
        for name in TERMS:
            term = self.tail.get(name) or combined(terms.get(name, []))
            if not term.us:
                continue
            parts = [t for t in terms.get(name, []) if t.us]
            error = sum(t.us * t.error for t in parts) / term.us if parts else term.error  # wrong together
            found[name] = Origin(term.us / 1e3, term.origin, error, term.source)
        return found


def _scaled(terms: Mapping[str, Term], factors: Mapping[str, float]) -> dict[str, Term]:
    return {name: term.scaled(factors.get(GROUPS[name], 1.0)) for name, term in terms.items()}


def _tail(d: Deployment, kernels: Kernels, exchange: Exchange) -> dict[str, Term]:
    model = d.model
    vocab = model.vocab_size // (d.parallel.tp if d.expert_tp else 1)

    def head(rows: float) -> Term:
        return kernels.linear(rows, vocab, model.hidden_size, "bf16")

    tail = {"head": head(d.batch * d.q_len), "host": _host(kernels)}
    if d.draft_tokens:
        depth = len(d.acceptance)
        width = d.draft_tokens / depth  # drafts of one depth together, 1 in a chain
        one = layer.moe_layer(d, kernels, exchange, d.batch, width)
        project = kernels.linear(d.batch * width, model.hidden_size, 2 * model.hidden_size, "bf16")
        draft = combined([*one.stages.values(), one.dispatch, one.combine, project, head(d.batch * width)])
        tail["draft"] = draft.scaled(depth)
    return tail


def _host(kernels: Kernels) -> Term:
    """From records of metric "host" on this GPU (`moelab.perf.calibrate`), else the assumption."""
    points = kernels.tables.recorded.get(("host", kernels.gpu.name), ())
    if not points:
        return Term(HOST_US, "extrapolated", HOST_ERROR, "an assumption")
    times = sorted(us for _, us, _ in points)
    middle = times[len(times) // 2]
    error = max(0.2, (times[-1] - times[0]) / 2 / middle)
    origin = "measured" if any(o == "measured" for *_, o in points) else "recorded"
    return Term(middle, origin, error, f"records of host on {kernels.gpu.name}")


def _ends(value: float, shifts: list[list[float]]) -> tuple[float, float]:
    """Shifts of independent causes in quadrature, down and up apart."""
    down = math.sqrt(sum(min(low, 0.0) ** 2 for low, _ in shifts))
    up = math.sqrt(sum(max(high, 0.0) ** 2 for _, high in shifts))
    return max(value - down, 0.0), value + up


def _node(d: Deployment) -> int:
    """GPUs that "per node" counts."""
    return d.parallel.gpus_per_node if d.gpu.name == "GB200" else 8


def _memory(d: Deployment) -> tuple[dict[str, float], int]:
    """(bytes of one GPU by part, the largest batch that fits)."""
    mtp = d.draft_tokens > 0
    weights = memory.weight_bytes(
        d.model, d.parallel, mtp, redundant=d.redundant, expert_tp=d.expert_tp,
        expert_itemsize=0.5 if d.expert_dtype == "fp4" else 1.0,
    )  # fmt: skip
    per_token = memory.kv_bytes_per_token(d.model, mtp, {"bf16": 2, "fp8": 1}[d.kv_dtype])
    reserve = d.reserve * d.capacity

    def buffers(batch: float) -> float:
        if d.expert_tp or d.parallel.ep == 1:
            return 0.0
        tokens = math.ceil(batch * d.q_len)
        if d.alltoall.startswith("pplx"):
            return memory.pplx_buffer_bytes(d.model, d.parallel, tokens)
        return memory.deep_ep_buffer_bytes(d.model, math.ceil(tokens / d.parallel.tp))

    def used(batch: float) -> float:
        return weights + batch * d.kv_len * per_token + buffers(batch) + GRAPHS_BYTES + reserve

    low, high = 0, max(1, int(d.capacity / (d.kv_len * per_token)) + 1)
    while low < high:  # the largest batch with used(batch) <= capacity
        middle = (low + high + 1) // 2
        low, high = (middle, high) if used(middle) <= d.capacity else (low, middle - 1)
    parts = {
        "weights": weights,
        "kv_cache": d.batch * d.kv_len * per_token,
        "buffers": buffers(d.batch),
        "graphs": GRAPHS_BYTES,
        "reserve": reserve,
        "total": used(d.batch),
        "capacity": d.capacity,
    }
    return parts, low


def _notes(d: Deployment, origins: Mapping[str, Origin], largest: int) -> tuple[str, ...]:
    notes = []
    if d.batch > largest:
        notes.append(f"batch {d.batch:g} does not fit: at most {largest} requests of {d.kv_len:g} tokens")
    total = sum(o.ms for o in origins.values())
    for name, o in origins.items():
        if o.origin == "extrapolated" and o.ms >= 0.03 * total:
            notes.append(f"{name} is outside what was measured ({o.ms / total:.0%} of the work): {o.source}")
    return tuple(notes)
