"""What is read from records of the exchange, on records that are made up so that the answers are known."""

from __future__ import annotations

import pytest

from moelab.bench import alltoall_study as study
from moelab.bench.alltoall_setting import Setting
from moelab.results import Provenance, Record, Store

GPU = "NVIDIA H100 80GB HBM3"
WHERE = Provenance(GPU, 2, "580.1", {"torch": "2.11.0"}, "0123456789abcdef", False)
SETTING = Setting(2, 1, 1, 7168, 256, 8, "fp8", "uniform", 0)
EXCHANGE = SETTING.params()
PAIR = {1: 10.0, 64: 40.0}


def put(store, backend, metric, value, unit="us", **params):
    store.append(
        Record.from_samples(
            [value] * 3, bench="alltoall", backend=backend, metric=metric, unit=unit, clock="graph", provenance=WHERE,
            params={"ep": 2} | params, seed=0,
        )
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    """Ours takes PAIR, split 2 us more at one token and 9 more at 64; with b of 100 blocks, PAIR · 100 / b."""
    store = Store(tmp_path, package=False)
    put(store, "floor", "flag", 2.5, ranks=2)
    put(store, "floor", "stores", 360.0, "GB/s", blocks=132)
    for tokens, us in PAIR.items():
        here = EXCHANGE | {"tokens": tokens}
        for metric, value in (("pair_fused", us), ("pair_split", us + 2 + 7 * (tokens > 1))):
            put(store, "nvshmem", metric, value, **here, returns="bf16", blocks=0)
        put(store, "nvshmem", "pair_fused", us + 20, **here, returns="f32", blocks=0)
        for blocks in (25, 50, 100):
            put(store, "nvshmem", "pair_fused", us * 100 / blocks, **here, returns="bf16", blocks=blocks)
        put(store, "nccl-split", "pair_fused", 5 * us, **here)
        put(store, "nccl-padded", "pair_fused", 3 * us, **here)
        for half in ("sent_dispatch", "sent_combine"):
            put(store, "nccl-split", half, 450e3 * us, "B", **here)
    return store


def test_reads_what_stands_there(store):
    found, floor = study.recorded(store, GPU, 2)
    assert {r.metric for r in floor} == {"flag", "stores"}
    assert {t: r.p50 for t, r in study.over(found, "nvshmem", returns="bf16", blocks=0).items()} == PAIR
    assert study.peers(found) == ["nccl-padded", "nccl-split"]
    assert (study.best_peer(found, 64).backend, study.best_peer(found, 64).pair) == ("nccl-padded", 120.0)
    assert study.split_cost(found) == {1: 2.0, 64: 9.0}
    assert {b: r.p50 for b, r in study.by_blocks(found)[1].items()} == {25: 40.0, 50: 20.0, 100: 10.0}
    # 0.9 MB for every us that ours takes, in five times as long, over 450 GB/s.
    assert study.link_shares(found, "nccl-split") == pytest.approx({1: 40.0, 64: 40.0})
    assert study.recorded(store, "NVIDIA H200", 2) == ([], [])


def test_says_what_it_found(store):
    found, floor = study.recorded(store, GPU, 2)
    one, many, split, *knee = study.lessons(found, 2.5)
    assert one.startswith("1 token: a fused pair takes **10.0 µs**") and "nccl-padded, 30.0 µs" in one
    assert many.startswith("64 tokens") and "2.0 to 9.0 µs" in split and "cannot pay at 64 tokens" in split
    assert knee == [f"{t} tokens: 100 blocks come within 10% of the best; 25 take 4.0×, 50 take 2.0×, 100 take 1.0×."
                    for t in (1, 64)]  # fmt: skip
    assert "commit 012345678" in study.provenance(found)


def test_what_another_stream_saves():
    def at(**us):
        return {int(b[1:]): Record.from_samples([t], bench="b", metric="m", unit="us", clock="graph", provenance=WHERE)
                for b, t in us.items()}  # fmt: skip

    # Half of the 100 SMs take as long: of 40 us they leave 20 to a computation that is long enough.
    assert study.saved(1000.0, 40.0, at(b50=40.0), 100) == pytest.approx(20.0)
    assert study.saved(15.0, 40.0, at(b50=40.0), 100) == pytest.approx(15.0)
    assert study.saved(1000.0, 40.0, at(b50=40.0, b10=50.0), 100) == pytest.approx(35.0)
    # Twice as long on half of them leaves nothing, three times as long would lose.
    assert study.saved(1000.0, 40.0, at(b50=80.0), 100) == study.saved(1000.0, 40.0, at(b50=120.0), 100) == 0.0
    assert study.saved(1000.0, 40.0, {}, 100) == 0.0


def test_a_hot_rank_takes_in_everything():
    token, back = SETTING.packet_bytes, SETTING.output_bytes
    # Seven ranks send rank 0 all their tokens, and it sends as many sums home.
    assert study.busiest_bytes(SETTING, "hot", 8, 16) == 7 * 16 * (token + back)
    uniform, limited = (study.busiest_bytes(SETTING, routing, 8, 64) for routing in ("uniform", "group-limited"))
    assert 0 < limited < uniform < 7 * 64 * (token + back)


def test_laws_stand_beside_what_was_published():
    names = study.PUBLISHED.values()
    laws = {s: {name: study.modelled_us("deepep", "H100", s, 128, (16, 32)) for name in names} for s in study.STAGES}
    for stage in study.STAGES:
        points = study.published_us(stage, 128)
        assert {name for name, _, _ in points} == set(study.PUBLISHED.values())
        assert max(ep for _, ep, _ in points) == 128 and all(us > 0 for *_, us in points)
    ratios = study.misses(laws, 128)
    low, high = (float(x) for x in ratios.split("DeepEP ")[1].split(";")[0].split(" to "))
    assert 0.8 < low <= 1 <= high < 1.3
    assert 77 not in [us for _, ep, us in study.published_us("dispatch", 128) if ep == 8]  # by NIC inside a node
