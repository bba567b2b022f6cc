"""`plan`: which deployment of the GPUs at hand gives most, for requests that must not be slower than so many tok/s.

For every pool (so many GPUs of one kind) every EP that divides it and every TP is tried, and experts cut by TP inside a
node; of each the largest batch that fits the memory and keeps the speed, found by bisection, since a larger batch
is never faster. What remains is ranked by tok/s per GPU, or by cost where prices are given.

What would change the ranking is not argued but computed: each term is made 10 % shorter and longer for everybody, and
the ranking made anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moelab.config import ConfigError, preset
from moelab.hardware import gpu as find_gpu
from moelab.perf.deployment import Deployment, deployment
from moelab.perf.disaggregation import Match, match
from moelab.perf.prediction import TERMS, Prediction, evaluate
from moelab.perf.prefill import Prefill, prefill
from moelab.perf.tables import Tables, load

TPS = (1, 2, 4, 8)
MOST_REDUNDANT = 64  # copies of experts that a pool may spend to use a number of GPUs that does not divide 256


@dataclass(frozen=True)
class Option:
    """One deployment, as many times as its pool holds it."""

    pool: str  # "16xH100"
    instances: int
    prediction: Prediction
    limit: str  # what stops a larger batch: speed or memory
    tok_s: float  # of the whole pool
    usd_per_million: float | None
    prefill: Prefill | None = None
    matched: Match | None = None  # where prompts are prefilled apart

    @property
    def tok_s_per_gpu(self) -> float:
        return self.matched.tok_s_per_gpu if self.matched else self.prediction.tok_s_per_gpu

    def name(self) -> str:
        d = self.prediction.deployment
        how = "experts by TP" if d.expert_tp else f"EP{d.parallel.ep}"
        return f"{self.pool}: {self.instances} x {how} DP{d.parallel.dp} TP{d.parallel.tp}"

    def bounds(self) -> list[tuple[str, float]]:
        """Terms by their share of the work, the largest first."""
        parts = self.prediction.origins
        total = sum(o.ms for o in parts.values())
        return sorted(((name, o.ms / total) for name, o in parts.items()), key=lambda x: -x[1])


@dataclass(frozen=True)
class Change:
    """The ranking with one term shorter or longer for everybody."""

    term: str
    factor: float
    best: str
    gain: float  # of the best option's figure, relative
    order_changes: bool  # among the leading options


@dataclass(frozen=True)
class Plan:
    ranked: list[Option]
    changes: list[Change]
    by: str  # "tok/s per GPU" or "USD per million tokens"


def plan(
    gpus: str | Sequence[tuple[int, str]],
    *,
    kv_len: float,
    min_speed: float,
    draft_tokens: int = 0,
    acceptance: float = 0.0,
    max_ttft_ms: float | None = None,
    output_len: float | None = None,
    prices: Mapping[str, float] | float | None = None,
    top: int = 8,
    tables: Tables | None = None,
    **settings,
) -> Plan:
    """Deployments of `gpus` ("8xH200,16xH100") that give every request `min_speed` tok/s, the best first.

    `max_ttft_ms`: the prefill of a prompt of kv_len tokens on the smallest deployment of the same GPUs may take so
    long. `output_len`: prompts are prefilled on GPUs of their own, whose number is matched; tok/s count both.
    `prices`: USD per GPU and hour, one for all or by GPU. `settings`: as in `predict` (overlap, fabric, alltoall,
    imbalance, …). Raises ConfigError where nothing fits or is fast enough, with the nearest that is.
    """
    pools = _pools(gpus) if isinstance(gpus, str) else [(n, find_gpu(name).name) for n, name in gpus]
    if not min_speed > 0:
        raise ConfigError(f"min_speed is {min_speed}: legal is above 0 tok/s; nearest: 1")
    costs = _prices(prices, [name for _, name in pools])
    tables = load() if tables is None else tables
    common = {"kv_len": kv_len, "draft_tokens": draft_tokens, "acceptance": acceptance, **settings}
    common["fabric_name"] = common.pop("fabric", None)
    found, fastest = [], None
    for count, gpu in pools:
        first = _prefill(count, gpu, kv_len, settings, tables) if max_ttft_ms or output_len else None
        if max_ttft_ms and (first is None or first.ttft_ms > max_ttft_ms):
            continue
        for shape in _shapes(count, gpu, common):
            option, best = _largest(shape, count, gpu, common, min_speed, tables, None)
            if best is not None and (fastest is None or best.tok_s_per_request > fastest.tok_s_per_request):
                fastest = best
            if option is not None:
                found.append((shape, count, gpu, _finish(option, costs, first, output_len)))
    if not found:
        raise ConfigError(_nothing(pools, min_speed, max_ttft_ms, fastest))
    found.sort(key=lambda x: _order(x[3]))
    leading = found[:top]

    def again(scale: dict[str, float]) -> list[Option]:
        made = []
        for shape, count, gpu, old in leading:
            option, _ = _largest(shape, count, gpu, common, min_speed, tables, scale)
            if option is not None:
                made.append(_finish(option, costs, old.prefill, output_len))
        return sorted(made, key=_order)

    changes = _changes([x[3] for x in leading], again)
    by = "USD per million tokens" if costs else "tok/s per GPU"
    return Plan([x[3] for x in leading], changes, by)


def _changes(leading: list[Option], again) -> list[Change]:
    names, best = [o.name() for o in leading], leading[0]
    present = [t for t in TERMS if any(t in o.prediction.origins for o in leading)]
    changes = []
    for term in present:
        for factor in (0.9, 1.1):
            ranked = again({term: factor})
            if not ranked:
                continue
            now = next((o for o in ranked if o.name() == best.name()), ranked[0])
            gain = _figure(now) / _figure(best) - 1
            changes.append(Change(term, factor, ranked[0].name(), gain, [o.name() for o in ranked] != names))
    return sorted(changes, key=lambda c: -abs(c.gain))


def _shapes(count: int, gpu: str, common: Mapping) -> list[Deployment]:
    """Every legal cut of `count` GPUs, at batch 1."""
    experts = preset("deepseek-v3").n_routed_experts
    shapes = []
    for ep in (n for n in range(1, count + 1) if count % n == 0 and (n <= 8 or n % 8 == 0)):  # whole nodes
        redundant = -experts % ep if ep <= experts else ep - experts
        for tp in TPS:
            if ep % tp or redundant > MOST_REDUNDANT:
                continue
            variants = [{"redundant_experts": redundant}] + ([{"ep": 1}] if ep == tp and tp > 1 else [])
            for variant in variants:
                try:
                    shapes.append(deployment(gpu, ep // tp, tp, batch=1, **common, **variant))
                except ConfigError:
                    continue
    return shapes


def _largest(
    shape: Deployment, count: int, gpu: str, common: Mapping, min_speed: float, tables: Tables, scale: dict | None
) -> tuple[Option | None, Prediction | None]:
    """(the option with the largest batch that fits and keeps the speed, batch 1 if it fits)."""

    def at(batch: int) -> Prediction:
        return evaluate(replace(shape, batch=float(batch)), tables, scale, interval=False)

    first = at(1)
    if not first.fits:
        return None, None
    if first.tok_s_per_request < min_speed:
        return None, first
    low, high, best = 1, first.largest_batch, first
    while low < high:
        middle = (low + high + 1) // 2
        p = at(middle)
        if p.fits and p.tok_s_per_request >= min_speed:
            low, best = middle, p
        else:
            high = middle - 1
    limit = "memory" if low >= first.largest_batch else "speed"
    instances = count // shape.parallel.ep
    final = evaluate(best.deployment, tables, scale) if scale is None else best
    total = instances * shape.parallel.ep * best.tok_s_per_gpu
    return Option(f"{count}x{gpu}", instances, final, limit, total, None), first


def _finish(
    option: Option, costs: Mapping[str, float] | None, first: Prefill | None, output_len: float | None
) -> Option:
    matched = match(option.prediction, first, output_len) if first and output_len else None
    option = replace(option, prefill=first, matched=matched)
    if not costs:
        return option
    usd = costs[option.prediction.deployment.gpu.name] / 3600 / option.tok_s_per_gpu * 1e6
    return replace(option, usd_per_million=usd)


def _figure(option: Option) -> float:
    return option.tok_s_per_gpu if option.usd_per_million is None else 1 / option.usd_per_million


def _order(option: Option) -> tuple:
    return -_figure(option), option.name()


def _prefill(count: int, gpu: str, prompt_len: float, settings: Mapping, tables: Tables) -> Prefill | None:
    """On the fewest GPUs whose memory holds the weights."""
    keep = {k: v for k, v in settings.items() if k in ("fabric", "alltoall", "imbalance")}
    for ep in (n for n in (8, 16, 32, 64, 128) if n <= count):
        p = prefill(gpu, ep, prompt_len=prompt_len, tables=tables, **keep)
        if evaluate(p.deployment, tables, interval=False).fits:
            return p
    return None


def _pools(text: str) -> list[tuple[int, str]]:
    pools = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*[x×*]\s*([\w .-]+?)\s*", part)
        if not found or int(found[1]) < 1:
            raise ConfigError(f"gpus {part.strip()!r}: write a number and a GPU, as 8xH200,16xH100")
        pools.append((int(found[1]), find_gpu(found[2]).name))
    return pools


def _prices(prices: Mapping[str, float] | float | None, gpus: Sequence[str]) -> dict[str, float] | None:
    if prices is None:
        return None
    by_gpu = dict.fromkeys(gpus, prices) if isinstance(prices, (int, float)) else {
        find_gpu(name).name: value for name, value in prices.items()
    }  # fmt: skip
    lacking = [g for g in gpus if g not in by_gpu]
    if lacking:
        raise ConfigError(f"no price for {lacking[0]}: give one for every GPU, as h200=3.5,h100=2.5, or one for all")
    if any(not (value > 0 and math.isfinite(value)) for value in by_gpu.values()):
        raise ConfigError(f"prices are {by_gpu}: legal are USD above 0")
    return by_gpu


def _nothing(pools, min_speed: float, max_ttft_ms: float | None, fastest: Prediction | None) -> str:
    said = ", ".join(f"{n}x{g}" for n, g in pools)
    if fastest is None:
        limit = f" with a first token in {max_ttft_ms:g} ms" if max_ttft_ms else ""
        return f"nothing of {said} holds the weights and one request{limit}; take more GPUs, or GPUs with more memory"
    d = fastest.deployment
    return (
        f"no deployment of {said} gives {min_speed:g} tok/s per request; the nearest is "
        f"{fastest.tok_s_per_request:.1f}: EP{d.parallel.ep} DP{d.parallel.dp} TP{d.parallel.tp} at batch 1"
    )
