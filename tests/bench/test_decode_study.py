"""What records of decode say: grouped by setting, beside the model, and what halves save."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moelab.bench import decode_study
from moelab.bench.decode import LATER
from moelab.bench.decode_setting import Setting
from moelab.perf import predict
from moelab.perf.tables import NOTHING_RECORDED
from moelab.results import Provenance, Record, Store
from moelab.stages import SCHEDULES

GPU = "NVIDIA H200"
WHERE = Provenance(GPU, 1, "580.1", {"torch": "2.11.0"}, "0123456789abcdef", False)
US = {"none": 2000.0, "dispatch": 1900.0, "microbatch": 1330.0}


def put(
    store: Store,
    overlap: str,
    batch: int,
    us: float,
    dp: int = 128,
    fabric: str | None = "ib400",
    graph: bool = True,
    early: bool = False,
    compute_sms: int = 0,
    layers: int = 8,
    kv_dtype: str = "bf16",
    tp: int = 1,
    waited: float = 3.0,
    gpu: str = GPU,
) -> None:
    """A layer with its kinds, and numbers that are not of a layer, as the benchmark names them; `early`: as it named
    them before there were budgets of SMs."""
    setting = Setting(
        "deepseek-v3",
        dp,
        tp,
        (batch,),
        1,
        0.6,
        5000,
        kv_dtype,
        overlap,
        fabric is not None,
        layers,
        None,
        fabric,
        "cuda",
        graph,
        compute_sms=compute_sms,
    )
    params = setting.params(batch, setting.max_tokens(batch))
    if early:
        params = {name: value for name, value in params.items() if name not in LATER}
    mla = {"of": "moe", "category": "MLA"}
    numbers = [("layer", {"of": "moe"}, us), ("layer", {"of": "dense"}, 1.0), ("step", {}, 9.0),
               ("category", mla, 0.4 * us), ("category", {"of": "dense", "category": "MLA"}, 7.0)]  # fmt: skip
    for half in ("dispatch", "combine") if fabric not in (None, "none") else ():
        numbers += [("exposed", {"half": half}, waited), ("held", {"half": half, "asked_us": 40.0}, 40.0),
                    ("category", {"of": "moe", "category": half.capitalize()}, 45.0)]  # fmt: skip
    for metric, own, value in numbers:
        store.append(Record.from_samples(
            [value * 0.99, value, value * 1.01], bench="decode", backend="moelab", params=params | own, metric=metric,
            unit="us", clock="graph", kind="stand-in" if fabric else "measured", provenance=replace(WHERE, gpu=gpu),
        ))  # fmt: skip


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path, package=False)
    for batch in (128, 16):
        for overlap in reversed(SCHEDULES):
            put(store, overlap, batch, US[overlap] * batch / 128)
    put(store, "dispatch", 16, 1000.0, dp=2, fabric=None)
    return store


def test_one_layer_for_each_setting(store):
    found = decode_study.layers(store, GPU)
    assert [(x.params["ep"], x.params["batch"], x.params["overlap"]) for x in found] == [
        (2, 16, "dispatch"), *[(128, batch, overlap) for batch in (16, 128) for overlap in SCHEDULES]]  # fmt: skip
    last = found[-1]
    assert (last.record.p50, last.kinds["MLA"].p50) == (1330, pytest.approx(532))
    assert last.name == "EP128, ib400, batch 128, MicroBatch" and found[0].name == "EP2, batch 16, DispatchOverlap"
    assert decode_study.layers(store, "NVIDIA H100") == []
    assert decode_study.layers(store, GPU, "tinyseek") == []


def test_the_model_of_the_same_setting(store):
    real, *_, last = decode_study.layers(store, GPU)
    given = {"kv_len": 5000, "draft_tokens": 1, "acceptance": 0.5, "tables": NOTHING_RECORDED}
    expected = predict("h200", 128, batch=128, overlap="microbatch", fabric="ib400", **given)
    assert decode_study.modelled(last, NOTHING_RECORDED).layer_us == expected.layer_us
    expected = predict("h200", 2, batch=16, overlap="dispatch", alltoall="moelab", **given)
    assert decode_study.modelled(real, NOTHING_RECORDED).layer_us == expected.layer_us


def test_without_a_fabric_nothing_is_exchanged(tmp_path):
    store = Store(tmp_path, package=False)
    put(store, "none", 16, 500.0, fabric="none")
    (layer,) = decode_study.layers(store, GPU)
    us = decode_study.modelled(layer, NOTHING_RECORDED).layer_us
    assert us["Dispatch"] == us["Combine"] == 0 < us["total"]


def test_gains(store):
    assert decode_study.gains(decode_study.layers(store, GPU)) == {
        "EP128, ib400": {16: pytest.approx(30), 128: pytest.approx(30)}}  # fmt: skip


def test_settings_that_differ_otherwise_are_told_apart(store):
    for overlap in SCHEDULES:
        put(store, overlap, 16, 3 * US[overlap], graph=False)
    put(store, "microbatch", 128, 3 * US["dispatch"], graph=False)
    found = decode_study.layers(store, GPU)
    names = [x.name for x in found if x.params["overlap"] == "microbatch"]
    assert len({x.name for x in found}) == len(found)
    assert "EP128, ib400, batch 16, MicroBatch, mode graph" in names
    assert "EP128, ib400, batch 16, MicroBatch, mode eager" in names
    assert decode_study.gains(found) == {
        "EP128, ib400, mode graph": {16: pytest.approx(30), 128: pytest.approx(30)},
        "EP128, ib400, mode eager": {16: pytest.approx(30)}}  # fmt: skip


def test_records_from_before_budgets_are_of_runs_without(store):
    for overlap in SCHEDULES:
        put(store, overlap, 32, US[overlap], early=overlap == "dispatch")
        put(store, overlap, 32, 2 * US[overlap], compute_sms=112)
    put(store, "none", 128, 1111.0, early=True)  # the same setting as a later one: one layer, the last record's
    found = decode_study.layers(store, GPU)
    names = [x.name for x in found]
    assert len(set(names)) == len(names) == 2 * 3 + 1 + 3 * 2
    assert "EP128, ib400, batch 32, MicroBatch, compute_sms 0" in names
    assert "EP128, ib400, batch 32, MicroBatch, compute_sms 112" in names
    gains = decode_study.gains(found)
    assert gains["EP128, ib400, compute_sms 0"] == {n: pytest.approx(30) for n in (16, 32, 128)}
    assert gains["EP128, ib400, compute_sms 112"] == {32: pytest.approx(30)}


def test_the_longest_graphs_are_plain(store):
    put(store, "none", 128, 1950.0, layers=61)
    put(store, "none", 128, 9000.0, layers=61, graph=False)
    put(store, "none", 128, 2500.0, layers=61, kv_dtype="fp8")
    put(store, "none", 128, 2600.0, layers=16, kv_dtype="fp8")
    put(store, "none", 128, 1200.0, layers=61, dp=32, tp=4)
    found = decode_study.layers(store, GPU)
    plain = {x.name: x.record.p50 for x in decode_study.plain(found)}
    assert plain["EP128, ib400, batch 128, NoOverlap"] == 1950.0
    assert len(plain) == 7 and not set(plain.values()) & {2000.0, 9000.0, 2500.0, 2600.0, 1200.0}
    variants = {what: (x.record.p50, base.record.p50) for what, x, base in decode_study.variants(found)}
    assert variants == {"kv_dtype fp8": (2500.0, 1950.0), "tp 4": (1200.0, 1950.0)}
    base, *rows = decode_study.variant_rows(found, 128)
    assert base["layer"] == "EP128, ib400, batch 128, NoOverlap" and base["against plain [%]"] == 0
    more = sorted(row["against plain [%]"] for row in rows)
    assert more == pytest.approx([100 * (1200 / 1950 - 1), 100 * (2500 / 1950 - 1)])
    assert decode_study.variant_rows(found, 16) == []


def test_bars_prefer_all_ranks_and_then_a_fabric(store):
    assert list(decode_study.bars(decode_study.layers(store, GPU), 128)) == [
        f"EP128 {x}" for x in ("NoOverlap", "DispatchOverlap", "MicroBatch")]  # fmt: skip
    put(store, "none", 128, 1100.0, dp=8, fabric="none")
    put(store, "none", 128, 1000.0, fabric="none")
    put(store, "none", 64, 900.0, fabric="none")
    bars = decode_study.bars(decode_study.layers(store, GPU), 128)
    assert {name: x.record.p50 for name, x in bars.items()} == {
        "EP8": 1100, "EP128 NoOverlap": 2000, "EP128 DispatchOverlap": 1900, "EP128 MicroBatch": 1330}  # fmt: skip
    put(store, "none", 128, 1300.0, dp=8, fabric="nvlink")
    assert decode_study.bars(decode_study.layers(store, GPU), 128)["EP8"].record.p50 == 1300
    put(store, "none", 128, 1500.0, dp=8, fabric=None)  # all eight ranks
    put(store, "none", 128, 1310.0, dp=8, fabric="nvlink", layers=9)
    assert decode_study.bars(decode_study.layers(store, GPU), 128)["EP8"].record.p50 == 1500
    assert decode_study.bars(decode_study.layers(store, GPU), 64) == {}  # EP128 without its exchange is no bar


def test_shares_of_an_exchange(tmp_path):
    store = Store(tmp_path, package=False)
    put(store, "none", 128, 2000.0, waited=36.0)
    put(store, "dispatch", 128, 1900.0, waited=30.0)
    put(store, "microbatch", 128, 1330.0, waited=5.0)
    put(store, "none", 64, 1000.0, waited=37.0, layers=16)
    put(store, "none", 16, 500.0, fabric="none")
    found = decode_study.layers(store, GPU)
    of = {(x.params["overlap"], x.params["batch"]): x for x in found}
    # Two halves of 40 µs that take 45 alone; in NoOverlap 4 of 40 pass in a send, at half the requests 3.
    assert decode_study.shares(of["none", 128], found) == pytest.approx((10 + 8, 0, 72))
    assert decode_study.shares(of["dispatch", 128], found) == pytest.approx((10 + 8, 80 - 60 - 8, 60))
    assert decode_study.shares(of["microbatch", 128], found) == pytest.approx((0 + 12, 160 - 20 - 12, 20))
    shorter = [x for x in found if x.params["batch"] != 64]
    assert decode_study.shares(of["microbatch", 128], shorter) is None
    hidden = decode_study.hidden(found)
    assert hidden["NoOverlap"] == {64: 0, 128: 0} and hidden["MicroBatch"][128] == pytest.approx(100 * 128 / 160)
