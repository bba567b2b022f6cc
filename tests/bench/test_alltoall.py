"""The exchange benchmark: what it draws and bounds, what it takes for right, what it makes of the ranks' samples, and
the command, small, over gloo."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moelab import cli
from moelab.bench import alltoall, alltoall_console, alltoall_dense, alltoall_ours
from moelab.bench import alltoall_floor as floor
from moelab.bench import alltoall_timer as timer
from moelab.bench.alltoall_case import ROUNDED_TWICE, Case, WrongResult, rounded_once
from moelab.bench.alltoall_routing import ROUTINGS, draw
from moelab.bench.alltoall_setting import Copies, Setting, bound, slowest
from moelab.bench.alltoall_worker import worker
from moelab.bench.timer import BenchError, Samples
from moelab.config import ConfigError
from moelab.launch import RankFailure
from moelab.results import Provenance, Store
from tests.conftest import SEED

HERE = Provenance("NVIDIA H200", 2, "580", {"torch": "0"}, "0" * 40, False)


def setting(**given) -> Setting:
    usual = dict(dp=2, tp=1, tokens=6, hidden=256, experts=16, top_k=4, payload="fp8", routing="uniform", seed=SEED)
    return Setting(**usual | given)


# What is drawn.


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_token_has_distinct_experts(routing):
    ids = draw(routing, 200, 64, 8, 4, np.random.default_rng(SEED))
    assert ids.shape == (200, 8) and ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < 64
    assert all(len(set(row)) == 8 for row in ids.tolist())
    per_expert = np.bincount(ids.ravel(), minlength=64)
    if routing == "group-limited":
        assert max(len(set(row)) for row in (ids // 8).tolist()) == 4
    elif routing == "hot":
        assert set(ids.ravel().tolist()) <= set(range(16))  # rank 0's
    elif routing == "zipf":
        assert per_expert.max() > 4 * np.median(per_expert)
    else:
        assert per_expert.max() < 4 * np.median(per_expert)


def test_hot_goes_on_where_rank_0_has_too_few_experts():
    ids = draw("hot", 20, 16, 8, 4, np.random.default_rng(SEED))
    assert all(len(set(row)) == 8 and set(row) >= {0, 1, 2, 3} for row in ids.tolist())


def test_ranks_draw_the_same():
    one, two = setting().ids(), setting().ids()
    assert all((a == b).all() for a, b in zip(one, two, strict=True)) and (one[0] != one[1]).any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"routing": "even"}, "routing is 'even': legal are 'uniform'"),
        ({"routing": "group-limited", "experts": 12}, "12 experts with top_k 4"),
        ({"experts": 15}, r"experts is 15, which does not divide over dp·tp = 2"),
        ({"top_k": 17}, "top_k is 17: there are 16"),
        ({"tokens": 0}, "tokens is 0: give 1 or more"),
        ({"payload": "fp4"}, "dtype is 'fp4': legal are 'fp8', 'bf16'"),
    ],
)
def test_settings_that_cannot_be(given, message):
    with pytest.raises(ConfigError, match=message):
        setting(**given).ids()


# What must be moved, and how fast.


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2), (1, 4)])
def test_copies_against_a_count_in_loops(dp, tp):
    s = setting(dp=dp, tp=tp, tokens=9)
    copies, tokens, rows, home = Copies.of(s), *(np.zeros((4, 4), int) for _ in range(3))
    for group, ids in enumerate(s.ids()):
        for token, chosen in enumerate(ids.tolist()):
            source = group * tp + token % tp
            ranks = [e // s.local_experts for e in chosen]
            for rank in ranks:
                rows[source, rank] += 1
            for rank in set(ranks):
                tokens[source, rank] += 1
                for i in range(tp):
                    home[rank, group * tp + i] += 1
    assert (copies.tokens == tokens).all() and (copies.rows == rows).all()
    assert (copies.home(copies.tokens) == home).all()
    away = tokens.sum(1) - tokens.diagonal()
    assert copies.sent_bytes()[0] == away.max() * (256 + 8 + 16 + 32)
    assert copies.sent_bytes("expert", "rows")[0] == (rows.sum(1) - rows.diagonal()).max() * 264


def test_bound_of_one_hot_rank():
    """All experts on rank 0: rank 1 sends every token once and gets every sum once; rank 0's outputs are the most."""
    s = setting(routing="hot", tokens=8, hidden=1024, payload="bf16")
    least = bound(Copies.of(s), 2.0, 450.0, 4800.0)
    assert least.dispatch == pytest.approx(2 + max(8 * (2048 + 16 + 32) / 450e3, (8 + 64) * 2048 / 4800e3))
    assert least.combine == pytest.approx(2 + max(8 * 2048 / 450e3, (64 + 8) * 2048 / 4800e3))
    assert least.pair == least.dispatch + least.combine


def test_bound_at_the_study_s_size_is_the_wire():
    """EP2, 128 tokens: 2.1 and 4.1 us of NVLink for nearly every token once."""
    s = Setting(2, 1, 128, 7168, 256, 8, "fp8", "uniform")
    least = bound(Copies.of(s), 0.0, 450.0, 4800.0)
    assert 1.9 < least.dispatch < 2.2 and 3.9 < least.combine < 4.3


# What is right.


def mine(rank, s, **given):
    """`Ours` of a rank, over whatever moves the pool's exchanges."""
    case = Case(s, rank.index, rank.device)
    kind = alltoall_ours.Nvshmem
    alltoall_ours.Nvshmem = lambda **options: rank.groups[s.ep]
    try:
        return alltoall_ours.Ours("nvshmem", case, given.get("returns", "rows"), 0, 2)
    finally:
        alltoall_ours.Nvshmem = kind


def ours_and_its_faults(rank, s) -> None:
    it = mine(rank, s)
    for pair in (it.pair, it.pair_split, it.pair):
        pair()
        it.check()
        it.poison()
        with pytest.raises(WrongResult):
            it.check()
    for slot in range(it.depth):
        it.dispatch(slot)
    for slot in range(it.depth):
        it.combine(slot)
    it.check()
    assert list(it._received) == [0, 1]
    rows, scales, counts = it._received[1]
    used = counts.nonzero().flatten()
    if len(used):
        expert = int(used[0])
        for fault in (rows.view(torch.uint8), scales, counts[:, None]):
            if fault is not None:
                kept = fault[expert, 0].clone()
                fault[expert, 0] = kept + 1
                with pytest.raises(WrongResult):
                    it.check()
                fault[expert, 0] = kept
    it.check()
    it.out[1] = it.out[1] * 1.05  # more than any mode allows
    with pytest.raises(WrongResult, match="a sum is off by 5"):
        it.check()
    if rank.index == 0:
        it.case.weights[2] = it.case.weights[2].roll(1)  # of other experts
    it.pair()
    it.case.weights[2] = it.case.weights[2].roll(-1) if rank.index == 0 else it.case.weights[2]
    if rank.index == 0:
        with pytest.raises(WrongResult, match="a sum is off"):
            it.check()
    it.close()


@pytest.mark.parametrize("given", [{}, {"dp": 1, "tp": 2}, {"payload": "bf16", "routing": "hot"}, {"tokens": 3}])
def test_what_is_right_and_what_is_not(virtual_pool, given):
    s = setting(**given)
    virtual_pool.run(ours_and_its_faults, s, ranks=s.ep)


def test_a_sum_rounded_twice_is_allowed_more():
    case = Case(setting(), 0, torch.device("cpu"))
    share = (case.weights.double() * torch.exp2((case.ids % 5 - 2).double())).sum(1, keepdim=True)
    exact = case.plain[0].double() * share
    case.check_out(exact.bfloat16(), rounded_once(4))
    off = (exact * (1 + 6 * 2.0**-8)).bfloat16()
    case.check_out(off, ROUNDED_TWICE)
    with pytest.raises(WrongResult):
        case.check_out(off, rounded_once(4))


# Peers.


def dense_peers(rank, s) -> None:
    case = Case(s, rank.index, rank.device)
    kinds = [alltoall_dense.NcclSplit, alltoall_dense.NcclPadded, alltoall_dense.NcclSplitPacked]
    real, dist.all_to_all_single = dist.all_to_all_single, over(rank.groups[s.ep])
    try:
        for kind in kinds:
            it = kind(case)
            for _ in range(2):
                it.pair()
                it.check()
                it.poison()
                with pytest.raises(WrongResult):
                    it.check()
    finally:
        dist.all_to_all_single = real


def over(group):
    """all_to_all_single over a sub-group, which the peers take for the world."""
    real = dist.all_to_all_single
    return lambda out, rows, come=None, to=None: real(out, rows, come, to, group=group)


@pytest.mark.parametrize("given", [{}, {"tokens": 1}, {"payload": "bf16", "dp": 4, "routing": "zipf"}])
def test_dense_peers_move_what_they_say(gloo_pool, given):
    s = setting(**given)
    gloo_pool.run(dense_peers, s, ranks=s.ep)


def symmetric_peer(rank, s) -> None:
    """torch's two operations stand in as their documentation has them, over gloo."""
    group = rank.groups[s.ep]
    alltoall_dense.symmetric = lambda shape, dtype, device: torch.zeros(shape, dtype=dtype)
    barrier, dist.barrier = dist.barrier, lambda: None
    names = ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset")
    operations = SimpleNamespace(
        all_to_all_vdev_2d=lambda rows, out, splits, into, name: shuffle(
            group, s.ep, rows, out, splits, splits.cumsum(0) - splits, into, True
        ),
        all_to_all_vdev_2d_offset=lambda rows, out, given, into, name: shuffle(
            group, s.ep, rows, out, given[0], given[1], into, False
        ),
    )
    for name in names:
        setattr(torch.ops.symm_mem, name, getattr(operations, name))
    try:
        it = alltoall_dense.SymmMem(Case(s, rank.index, rank.device))
        for _ in range(2):
            it.pair()
            it.check()
            it.poison()
            with pytest.raises(WrongResult):
                it.check()
    finally:
        dist.barrier = barrier
        for name in names:
            delattr(torch.ops.symm_mem, name)


def shuffle(group, size, rows, out, splits, offsets, into, there) -> None:
    """There: from rank-major order to expert-major, where an expert without rows takes one; back: the reverse."""
    everybody = [None] * size
    dist.all_gather_object(everybody, (rows, splits.tolist(), offsets.tolist()), group=group)
    each, me, at = len(splits) // size, dist.get_rank(group), 0
    order = (
        [(e, r) for e in range(each) for r in range(size)]
        if there
        else [(e, r) for r in range(size) for e in range(each)]
    )
    start = 0
    for i, (expert, source) in enumerate(order):
        theirs, counts, begins = everybody[source]
        j = me * each + expert if there else expert * size + me
        out[at : at + counts[j]] = theirs[begins[j] : begins[j] + counts[j]]
        into[:, i] = torch.tensor([counts[j], at])
        at += counts[j]
        if there and (i + 1) % size == 0:
            at = start = max(at, start + 1)


@pytest.mark.parametrize("given", [{"experts": 64}, {"experts": 64, "tokens": 1}, {"dp": 4, "payload": "bf16"}])
def test_the_symmetric_peer_finds_its_rows(gloo_pool, given):
    s = setting(**given)
    gloo_pool.run(symmetric_peer, s, ranks=s.ep)


def test_peers_without_tp_say_so():
    with pytest.raises(BenchError, match="at TP 1 only, this is TP 2"):
        alltoall_dense.NcclSplit(Case(setting(dp=1, tp=2), 0, torch.device("cpu")))


# A rank's work, with clocks that only run what they are given.


class Broken(alltoall_dense.NcclSplit):
    """Right until it is timed; then it loses a row on one rank."""

    calls = 0

    def dispatch(self, slot: int = 0) -> None:
        super().dispatch()
        self.calls += 1
        if self.calls > 2 and self.case.rank == 1:
            self.there[0] += 1


class NoGraph(alltoall_dense.NcclSplit):
    """Cannot be captured on one rank."""


def work(rank, s) -> list[dict]:
    patch = pytest.MonkeyPatch()
    device = torch.device("cpu")

    def run(call):
        call()
        return Samples([1.0 + rank.index], 0)

    def in_a_graph(pair, us, ranks):
        refuses = rank.index == 1 and isinstance(pair.__self__, NoGraph)
        ranks.attempt(lambda: 1 / 0 if refuses else None)  # a capture runs nothing
        return run(pair)

    def apart(dispatch, combine, *_):
        return run(dispatch), run(combine)

    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(timer, "once_us", lambda pair, ranks: run(pair).us[0])
    patch.setattr(timer, "pair_samples", in_a_graph)
    patch.setattr(timer, "half_samples", lambda *a: apart(*a))
    patch.setattr(timer, "eager_samples", lambda *a: apart(*a))
    patch.setattr(timer, "enqueue_samples", lambda pair, ranks: run(pair))
    patch.setattr(alltoall_dense, "NcclPadded", Broken)
    patch.setattr(Broken, "name", "nccl-padded")
    patch.setattr(alltoall_dense, "NvshmemPadded", NoGraph)
    patch.setattr(NoGraph, "name", "nvshmem-padded")
    events: list[dict] = []
    context = SimpleNamespace(rank=rank.index, world_size=s.ep, device=str(device), emit=events.append)
    patch.setattr(floor, "measure", lambda *a: iter([floor.Reading("flag", "us", {}, Samples([2.0], 0))]))
    names = ["nccl-padded", "nvshmem-padded", "nccl-split", "deep_ep"]
    try:
        worker(context, json.loads(json.dumps(alltoall.job([s], names, [], [], ["graph", "event"]))))
    finally:
        patch.undo()
    return events


def test_a_backend_that_fails_on_one_rank_fails_alike_on_all(gloo_pool):
    s = setting(dp=gloo_pool.size)
    of_ranks = gloo_pool.run(work, s)
    for events in of_ranks:
        whys = {e["backend"]: e["why"] for e in events if "why" in e}
        assert set(whys) == {"nccl-padded", "nvshmem-padded", "deep_ep"}
        assert whys["nccl-padded"].startswith("rank 1: WrongResult: a row did not arrive")
        assert whys["nvshmem-padded"] == "graph: rank 1: ZeroDivisionError: division by zero"
        assert "cannot import deep_ep" in whys["deep_ep"]
        metrics = {(e["backend"], e["metric"]) for e in events if "metric" in e and e["backend"] != "floor"}
        both = {"enqueue_fused", "dispatch_eager", "combine_eager", "sent_dispatch", "sent_combine"}
        graph = {"pair_fused", "dispatch", "combine"}
        assert metrics == {("nccl-split", m) for m in both | graph} | {("nvshmem-padded", m) for m in both}
    job = alltoall.job([s], [], [], [], ["graph", "event"])
    merged = [(rank, e) for rank, events in enumerate(of_ranks) for e in events]
    results, _ = alltoall.collect(merged, job, HERE, lambda record: None)
    (pair,) = [r for r in results.records if r.metric == "pair_fused"]
    assert pair.p50 == s.ep  # the slowest rank's sample


# Samples into Records.


def event(number, backend, metric, samples, clock="graph", unit="us", **params):
    return {
        "setting": number, "backend": backend, "params": params, "metric": metric, "unit": unit, "clock": clock,
        "warmup": 3, "samples": samples,
    }  # fmt: skip


def test_a_sample_is_the_slowest_rank_s():
    assert slowest([[1.0, 9.0, 5.0], [2.0, 3.0, 6.0]]) == [2.0, 9.0, 6.0]
    with pytest.raises(ValueError):
        slowest([[1.0, 2.0], [1.0]])


def reported():
    """Two ranks, in any order of arrival."""
    yield 0, event(None, "floor", "flag", [2.0, 2.2])
    yield 0, event(0, "nvshmem", "pair_fused", [20.0, 30.0, 22.0], returns="bf16", blocks=0)
    yield 1, event(None, "floor", "flag", [2.1, 2.0])
    yield 1, event(0, "nvshmem", "pair_fused", [24.0, 21.0, 22.0], returns="bf16", blocks=0)
    for rank in (1, 0):
        yield rank, event(None, "floor", "stores", [300.0 + rank, 340.0 - rank], unit="GB/s", blocks=8)
        yield rank, event(0, "nvshmem", "dispatch", [9.0, 8.0 + rank], returns="bf16", blocks=0)
        yield rank, event(0, "nvshmem", "sent_dispatch", [9000], "none", "B", returns="bf16", blocks=0)
        yield rank, event(0, "nvshmem", "sent_combine", [18000], "none", "B", returns="bf16", blocks=0)
        yield rank, event(0, "nccl-split", "dispatch_eager", [50.0 + rank], "event")
        yield rank, event(0, "nccl-split", "combine_eager", [60.0 - rank], "event")
        yield rank, {"setting": 0, "backend": "deep_ep", "why": "cannot import deep_ep"}


def test_records_lines_and_what_is_missing(tmp_path):
    s = Setting(2, 1, 128, 7168, 256, 8, "fp8", "uniform")
    job = alltoall.job([s], ["floor", "nvshmem", "nccl-split", "deep_ep"], ["bf16"], [0], ["graph", "event"])
    kept = []
    results, ended = alltoall.collect(reported(), json.loads(json.dumps(job)), HERE, kept.append)
    assert kept == results.records
    assert ended is None and results.missing == [(s, "deep_ep", "cannot import deep_ep")]
    by = {(r.backend, r.metric): r for r in results.records}
    pair = by["nvshmem", "pair_fused"]
    assert (pair.min, pair.p50, pair.n, pair.clock, pair.warmup) == (22.0, 24.0, 3, "graph", 3)
    assert by["floor", "stores"].min == 300.0 and by["floor", "stores"].p99 < 339.0  # the slower rank's rate
    assert by["nvshmem", "sent_dispatch"].clock == "none"
    ours, nccl = alltoall.lines(results, [s])
    assert (ours.backend, ours.params, ours.pair) == ("nvshmem", {"returns": "bf16", "blocks": 0}, 24.0)
    flag = by["floor", "flag"].p50
    assert 2 * flag + 5.8 < ours.bound.pair < 2 * flag + 6.5
    assert ours.over_bound == pytest.approx(24 / ours.bound.pair)
    assert ours.link_share == pytest.approx(27000 / 24 / 1e3 / 450)
    assert nccl.pair == 51 + 60 and nccl.link_share is None  # its eager calls, slowest ranks
    store = Store(tmp_path, package=False)
    for record in results.records:
        store.append(record)
    (found,) = store.records("alltoall", backend="nvshmem", metric="dispatch", tokens=128, experts=256, hidden=7168)
    assert found.params["ep"] == 2 and found.params["routing"] == "uniform" and found.params["payload"] == "fp8"


def test_what_was_measured_before_a_rank_died_is_kept(monkeypatch, tmp_path, capsys):
    def dying(job):
        yield from reported()
        raise RankFailure(1, 2, "it was killed", "a traceback")

    s = Setting(2, 1, 128, 7168, 256, 8, "fp8", "uniform")
    monkeypatch.setattr(alltoall, "run", dying)
    monkeypatch.setattr(alltoall_console, "collect", lambda *a, **k: HERE)
    with pytest.raises(RankFailure, match="it was killed"):
        alltoall_console.on_gpus([s], [], [], [], ["graph"], False, tmp_path)
    shown = capsys.readouterr()
    assert "not measured: deep_ep at 128 tokens, uniform: cannot import deep_ep" in shown.out
    assert "a traceback" in shown.err and "24.0" in shown.out
    assert Store(tmp_path, package=False).records("alltoall", metric="pair_fused")


def test_our_own_failure_is_one(monkeypatch, tmp_path, capsys):
    s = Setting(2, 1, 128, 7168, 256, 8, "fp8", "uniform")
    wrong = [(0, {"setting": 0, "backend": "nvshmem", "why": "rank 1: WrongResult: a row did not arrive"})]
    monkeypatch.setattr(alltoall, "run", lambda job: wrong)
    monkeypatch.setattr(alltoall_console, "collect", lambda *a, **k: HERE)
    with pytest.raises(BenchError, match="1 of our own timings failed: rank 1: WrongResult"):
        alltoall_console.on_gpus([s], [], [], [], ["graph"], True, tmp_path)
    assert json.loads(capsys.readouterr().out)["missing"][0]["backend"] == "nvshmem"


# The command.


def command(capsys, *arguments) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "alltoall", *map(str, arguments)])
    shown = capsys.readouterr()
    return ended.value.code or 0, shown.out, shown.err


def test_over_gloo_end_to_end(capsys, tmp_path):
    small = ("--hidden", 128, "--experts", 8, "--top-k", 2, "--records", tmp_path)
    status, out, err = command(
        capsys, "--device", "cpu", "--dp", 1, "--tp", 2, "--tokens", "2,5", "--routing", "zipf", *small, "--json"
    )
    assert status == 0, err
    found = json.loads(out)
    assert {r["backend"] for r in found} == {"torch-gloo", "dense-padded", "dense-split"}
    assert {r["params"]["tokens"] for r in found} == {2, 5} and {r["params"]["routing"] for r in found} == {"zipf"}
    assert {r["params"]["ep"] for r in found} == {2} and {r["params"]["payload"] for r in found} == {"fp8"}
    assert len(Store(tmp_path, package=False).records("alltoall", metric="dispatch")) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "8,x"], "tokens is 'x': give a number"),
        (["--blocks", "-4"], "blocks is '-4': give a number"),
        (["--backend", "ncc"], "no backend 'ncc'; there are: floor, nvshmem"),
        (["--returns", "rows", "--returns", "f16"], "no returns 'f16'; there are: rows, f32, bf16"),
        (["--routing", "even"], "routing is 'even'"),
        (["--dp", "3"], "experts is 256, which does not divide over dp·tp = 3"),
        (["--device", "cpu", "--returns", "rows"], "'rows' picks among backends of GPUs"),
    ],
)
def test_wrong_arguments_are_named_before_anything_starts(capsys, arguments, message):
    status, out, err = command(capsys, *arguments)
    assert (status, out) == (1, "") and message in err


def test_too_few_gpus(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    status, _, err = command(capsys, "--dp", 4)
    assert status == 1 and "dp·tp is 4, which takes 4 GPUs with one process each; there is 1" in err
