"""What records of `moelab bench alltoall` say together: who is fastest, what splitting costs, what can be hidden, skew.

**Hidden on one stream.** Over NVLink SMs store the rows, so a send ends when its rows are on their way. What a receive
still waits for, ranks being in step, is what was stored last: at most a flag's time. A computation between the halves
of dispatch and of combine hides no more than two flags; `split_cost` is what the halves take more.

**Hidden on another stream.** An exchange that is given b blocks takes the recorded t(b) and leaves S − b of S
multiprocessors (a block taken to fill one). In that time they do what all of them would do in t(b)·(S − b)/S; what is
left of a computation of L runs afterwards on all. Against t(0) + L, one after the other, that saves

    t(0) + min(L, t(b)·(S − b)/S) − t(b)

and `saved` is that of the best b. It leaves out that both share memory and L2, so it is the most that can be saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moelab.bench.alltoall import BENCH, OURS, RETURNS, Line, Results, lines
from moelab.bench.alltoall_setting import Copies, Setting
from moelab.config import ParallelConfig, preset
from moelab.hardware import gpu as find_gpu
from moelab.perf.fabric import Exchange, default_fabric
from moelab.perf.laws import STAGES
from moelab.perf.tables import load
from moelab.results import Record, Store, published

__all__ = ["RETURNS", "STAGES"]

KNEE = 1.1  # of the best time: the fewest blocks within it are the knee
PUBLISHED = {  # how a library of the published table is called where laws are drawn, by fabric if that tells them apart
    ("DeepEP V1 low-latency", ""): "DeepEP",
    ("DeepEP low-latency (aiconfigurator table)", ""): "DeepEP",
    ("pplx-kernels", "IBGDA"): "pplx, IBGDA",
    ("pplx-kernels", "IBRC"): "NCCL and IBRC",
    ("pplx-garden p2p-all-to-all", "CX7"): "pplx-garden, CX7",
}


def recorded(store: Store, gpu: str, ep: int) -> tuple[list[Line], list[Record]]:
    """(lines in the order of tokens, records of the floor) of `ep` GPUs of that kind; both empty if there are none."""
    found = store.records(BENCH, gpu=gpu, gpu_count=ep, ep=ep)
    floor = [r for r in found if r.backend == "floor"]
    settings = {_setting(r) for r in found if r.backend != "floor"}
    return lines(Results(found), sorted(settings, key=lambda s: (s.routing, s.payload, s.tp, s.tokens))), floor


def provenance(found: Sequence[Line]) -> str:
    """When and from what the records were made."""
    records = [record for line in found for record in line.records.values()]
    commits = " and ".join(sorted({r.commit[:9] + (" with changes" if r.dirty else "") for r in records}))
    days = " and ".join(sorted({r.time[:10] for r in records}))
    gpus = f"{records[0].gpu_count} × {records[0].gpu}, driver {records[0].driver}"
    return f"{len(records)} records: {gpus}, {days}, commit {commits}"


def _setting(record: Record) -> Setting:
    names = ("dp", "tp", "tokens", "hidden", "experts", "top_k", "payload", "routing")
    return Setting(**{name: record.params[name] for name in names}, seed=record.seed or 0)


def over(found: Sequence[Line], backend: str, metric: str = "pair_fused", **params: object) -> dict[int, Record]:
    """{tokens: record of `metric`} of the lines whose own parameters are those given."""
    mine = [line for line in found if line.backend == backend and params.items() <= line.params.items()]
    return {line.setting.tokens: line.records[metric] for line in mine if metric in line.records}


def peers(found: Sequence[Line]) -> list[str]:
    """Backends that are not ours, in the order of the records."""
    return list(dict.fromkeys(line.backend for line in found if line.backend not in OURS))


def best_peer(found: Sequence[Line], tokens: int) -> Line:
    """The least pair of a backend that is not ours. Raises ValueError where there is none."""
    theirs = [x for x in found if x.setting.tokens == tokens and x.backend not in OURS and x.pair is not None]
    return min(theirs, key=lambda line: line.pair)


def by_blocks(found: Sequence[Line], returns: str = "bf16") -> dict[int, dict[int, Record]]:
    """{tokens: {blocks: pair_fused}} of our exchange where blocks were given, without the library's own choice."""
    times: dict[int, dict[int, Record]] = {}
    for line in found:
        if line.backend == OURS[0] and line.params["returns"] == returns and line.params["blocks"]:
            times.setdefault(line.setting.tokens, {})[line.params["blocks"]] = line.records["pair_fused"]
    return times


def split_cost(found: Sequence[Line], returns: str = "bf16") -> dict[int, float]:
    """{tokens: us that four halves take more than two fused launches}, of medians."""
    fused, split = (over(found, OURS[0], m, returns=returns, blocks=0) for m in ("pair_fused", "pair_split"))
    return {tokens: split[tokens].p50 - fused[tokens].p50 for tokens in fused}


def saved(length_us: float, alone_us: float, of_blocks: Mapping[int, Record], multiprocessors: int) -> float:
    """us; see the module's text. 0 where one after the other is best."""
    beside = [
        alone_us + min(length_us, record.p50 * (1 - blocks / multiprocessors)) - record.p50
        for blocks, record in of_blocks.items()
    ]
    return max([0.0, *beside])


def link_shares(found: Sequence[Line], backend: str, **params: object) -> dict[int, float]:
    """{tokens: percent of one direction's line rate that the payload of a pair takes}, whatever it had to be."""
    mine = [line for line in found if line.backend == backend and params.items() <= line.params.items()]
    return {line.setting.tokens: 100 * line.link_share for line in mine if line.link_share is not None}


def busiest_bytes(setting: Setting, routing: str, ep: int, tokens: int) -> int:
    """Of a dispatch and a combine: the most that one rank sends, or takes in if that is more; a token once a rank, one
    sum back. Exact for this drawing of `routing`, DP `ep`, `tokens` of a rank; the rest as in `setting`."""
    there = replace(setting, routing=routing, dp=ep, tp=1, tokens=tokens)
    copies = Copies.of(there)
    moved = copies.tokens * there.packet_bytes, copies.home(copies.tokens) * there.output_bytes
    for matrix in moved:
        np.fill_diagonal(matrix, 0)
    return int(sum(max(matrix.sum(1).max(), matrix.sum(0).max()) for matrix in moved))


def modelled_us(
    library: str, gpu: str, stage: str, tokens: int, eps: Sequence[int], records: str | None = None
) -> dict[int, float]:
    """{EP: us} of `stage` by the law of `library`, records of `gpu` before published tables."""
    tables, device = load(records), find_gpu(gpu)
    exchanges = {
        ep: Exchange(device, preset("deepseek-v3"), ParallelConfig(ep), library, default_fabric(device, ep), tables)
        for ep in eps
    }
    return {ep: exchange.time(stage, tokens).us for ep, exchange in exchanges.items()}


def published_us(stage: str, tokens: int, most_ep: int = 128) -> list[tuple[str, int, float]]:
    """(name, EP, us) of `stage`, as others published them, up to `most_ep`. Without those that went
    by NIC inside a node: the law of EP8 is NVLink's."""
    table = published.table("alltoall")
    table = table[(table["stage"] == stage) & (table["tokens_per_gpu"] == tokens) & (table["ep"] <= most_ep)]
    return [
        (name, int(row.ep), float(row.time_us))
        for (library, fabric), name in PUBLISHED.items()
        for row in table[table["library"] == library].itertuples()
        if fabric in row.fabric and not (row.ep <= 8 and row.fabric.startswith("RDMA only"))
    ]


def lessons(found: Sequence[Line], flag_us: float) -> list[str]:
    """What the records say, in sentences with their numbers."""
    pair, cost, blocks = over(found, OURS[0], returns="bf16", blocks=0), split_cost(found), by_blocks(found)
    bound = {line.setting.tokens: line.bound.pair for line in found}
    said = []
    for tokens in (min(pair), max(pair)):
        us, theirs = pair[tokens].p50, best_peer(found, tokens)
        said.append(
            f"{tokens:,} token{'s' * (tokens > 1)}: a fused pair takes **{us:.1f} µs**, {us / bound[tokens]:.1f}× its "
            f"lower bound; the best peer of the same run, {theirs.backend}, {theirs.pair:.1f} µs."
        )
    beyond = [f"{tokens:,}" for tokens, us in cost.items() if us > 2 * flag_us]
    said.append(
        f"Halves apart cost {min(cost.values()):.1f} to {max(cost.values()):.1f} µs. One stream hides at most "
        f"{2 * flag_us:.1f} µs (modelled), so splitting alone cannot pay at {' and '.join(beyond) or 'no'} tokens."
    )
    for tokens, at in blocks.items():
        best, most = min(pair[tokens].p50, *(r.p50 for r in at.values())), max(at)
        near = min((b for b, r in at.items() if r.p50 <= KNEE * best), default=None)
        knee = f"{near} blocks come" if near else f"no number of blocks up to {most} comes"
        said.append(
            f"{tokens:,} tokens: {knee} within {KNEE - 1:.0%} of the best; "
            + ", ".join(f"{b} take {at[b].p50 / best:.1f}×" for b in sorted(at)[-3:])
            + "."
        )
    return said


def misses(modelled: Mapping[str, Mapping[str, Mapping[int, float]]], tokens: int) -> str:
    """What was published over what the laws say, {stage: {name: {EP: us}}}, each name's nearest and farthest."""
    ratios: dict[str, list[float]] = {}
    for stage, of_names in modelled.items():
        for name, ep, us in published_us(stage, tokens):
            if ep in of_names[name]:
                ratios.setdefault(name, []).append(us / of_names[name][ep])
    ranges = [f"{name} {min(found):.2f} to {max(found):.2f}" for name, found in ratios.items()]
    return f"Published over modelled, {tokens} tokens, both stages: {'; '.join(ranges)}."
