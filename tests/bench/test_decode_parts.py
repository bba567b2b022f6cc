"""Shares of attention and of a pass of the MTP layer, from records of decode."""

from __future__ import annotations

import pytest

from moelab.bench import decode_parts, decode_study
from moelab.perf.tables import NOTHING_RECORDED
from moelab.results import Record, Store
from tests.bench.test_decode_study import GPU, WHERE, put


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path, package=False)
    for batch, us in ((16, 400.0), (128, 2000.0)):
        put(store, "none", batch, us, layers=61)
        put(store, "none", batch, us / 2, dp=8, fabric="none", layers=40)
    put(store, "microbatch", 128, 1330.0, layers=61)
    put(store, "none", 128, 1400.0, dp=8, fabric="nvlink", layers=40)
    for record in store.records("decode", metric="step"):  # of 9 us
        for of, us in (("first", 0.9), ("next", 5.0)):
            store.append(Record.from_samples(
                [us], bench="decode", backend=record.backend, params=record.params | {"of": of}, metric="draft",
                unit="us", clock="graph", kind=record.kind, provenance=WHERE,
            ))  # fmt: skip
    return store


def test_attention_where_nothing_overlaps(store):
    shares = decode_parts.attention(decode_study.plain(decode_study.layers(store, GPU)))
    assert shares == {name: {16: pytest.approx(40), 128: pytest.approx(40)} for name in
                      ("EP8, no fabric, NoOverlap", "EP128, ib400, NoOverlap")}  # fmt: skip
    assert decode_parts.attention([]) == {}


def test_a_pass_beside_a_whole_step(store):
    plain = decode_study.plain(decode_study.layers(store, GPU))
    recorded, counted = decode_parts.drafts(store, plain, NOTHING_RECORDED)
    assert recorded == {"EP128, ib400, NoOverlap": {16: pytest.approx(10), 128: pytest.approx(10)},
                        "EP128, ib400, MicroBatch": {128: pytest.approx(10)}}  # fmt: skip
    of = decode_study.modelled(plain[-1], NOTHING_RECORDED)
    step = 1e3 * of.step_ms - of.tail_us["draft"] - of.tail_us["host"]
    assert counted["EP128, ib400, MicroBatch"][128] == pytest.approx(100 * of.tail_us["draft"] / step)
    assert decode_parts.drafts(store, [], NOTHING_RECORDED) == ({}, {})


def test_lessons():
    share = {"EP8, nvlink, NoOverlap": {1: 6.0, 128: 51.0}}
    recorded, counted = (
        {"EP128, ib400, MicroBatch": {4: 4.2, 128: 3.0}},
        {"EP128, ib400, MicroBatch": {4: 4.0, 128: 2.0}},
    )
    attention, drafts = decode_parts.lessons(GPU, share, recorded, counted)
    assert attention == f"Of a layer recorded on {GPU} MLA takes 6 to 51 % (EP8, nvlink, batch 1 to 128)."
    assert "4.2 to 3.0 % (EP128, ib400, MicroBatch; modelled 4.0 to 2.0 %)" in drafts
    assert decode_parts.lessons(GPU, {}, {}, {}) == []
