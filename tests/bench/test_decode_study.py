"""What records of decode say: grouped by setting, beside the model, and what halves save."""

from __future__ import annotations

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
) -> None:
    """A layer with its kinds, and numbers that are not of a layer, as the benchmark names them; `early`: as it named
    them before there were budgets of SMs."""
    setting = Setting(
        "deepseek-v3",
        dp,
        1,
        (batch,),
        1,
        0.6,
        5000,
        "bf16",
        overlap,
        fabric is not None,
        8,
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
               ("category", mla, 0.4 * us), ("exposed", {"half": "dispatch"}, 3.0)]  # fmt: skip
    for metric, own, value in numbers:
        store.append(Record.from_samples(
            [value * 0.99, value, value * 1.01], bench="decode", backend="moelab", params=params | own, metric=metric,
            unit="us", clock="graph", kind="stand-in" if fabric else "measured", provenance=WHERE,
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
