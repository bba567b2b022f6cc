"""The planner: what it ranks is legal, fast enough, fits, and nothing of the same shape beats it."""

from __future__ import annotations

import dataclasses

import pytest

from moelab.config import ConfigError
from moelab.perf import disaggregation
from moelab.perf.plan import _pools, plan
from moelab.perf.prediction import evaluate, predict
from moelab.perf.prefill import prefill
from moelab.perf.tables import NOTHING_RECORDED

SETTINGS = {"kv_len": 4000, "min_speed": 25, "tables": NOTHING_RECORDED}


@pytest.fixture(scope="module")
def planned():
    return plan("8xH200,32xH100", **SETTINGS, top=6)


def test_what_is_ranked(planned):
    figures = [o.tok_s_per_gpu for o in planned.ranked]
    assert figures == sorted(figures, reverse=True) and len(figures) > 4
    assert {o.pool for o in planned.ranked} == {"8xH200", "32xH100"}
    for o in planned.ranked:
        p, d = o.prediction, o.prediction.deployment
        assert p.fits and p.tok_s_per_request >= 25
        assert o.instances * d.parallel.ep in (8, 32)
        more = evaluate(dataclasses.replace(d, batch=d.batch + 1), NOTHING_RECORDED)
        if o.limit == "memory":
            assert not more.fits
        else:
            assert more.tok_s_per_request < 25
        assert o.tok_s == pytest.approx(o.instances * d.parallel.ep * p.tok_s_per_gpu)
        shares = [share for _, share in o.bounds()]
        assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)


def test_what_would_change_it_is_computed(planned):
    best = planned.ranked[0]
    for c in planned.changes:
        assert c.factor in (0.9, 1.1)
        if c.factor == 0.9:
            assert c.gain >= -1e-9
        else:
            assert c.gain <= 1e-9
    strongest = planned.changes[0]
    by_hand = plan("8xH200,32xH100", **SETTINGS, top=1).ranked[0].prediction
    assert by_hand.tok_s_per_gpu == best.prediction.tok_s_per_gpu
    assert abs(strongest.gain) > 0.02 and strongest.term in by_hand.origins


def test_prices_decide_the_order():
    cheap = {name: plan("8xH200,16xH100", **SETTINGS, top=2, prices={"h200": 1.0 if name == "H200" else 9.0,
                                                              "h100": 9.0 if name == "H200" else 1.0})
             for name in ("H200", "H100")}  # fmt: skip
    for name, found in cheap.items():
        assert found.by == "USD per million tokens" and found.ranked[0].pool.endswith(name)
        o = found.ranked[0]
        assert o.usd_per_million == pytest.approx(1.0 / 3600 / o.tok_s_per_gpu * 1e6)
    with pytest.raises(ConfigError, match="no price for H100"):
        plan("8xH200,32xH100", **SETTINGS, prices={"h200": 1.0})


def test_odd_numbers_of_gpus_use_redundant_experts():
    found = plan("72xH100", **SETTINGS, top=1)
    d = found.ranked[0].prediction.deployment
    assert (d.parallel.ep, d.redundant) == (72, 32)


def test_a_first_token_in_time_and_matched_prefill():
    found = plan("8xH200", **SETTINGS, top=1, output_len=1000, max_ttft_ms=5000)
    o = found.ranked[0]
    assert o.prefill.ttft_ms < 5000 and o.matched.prefill_gpus > 0
    assert o.tok_s_per_gpu == pytest.approx(o.prediction.tok_s_per_gpu / (1 + o.matched.prefill_gpus))
    with pytest.raises(ConfigError, match="nothing of 8xH200 .* first token in 1 ms"):
        plan("8xH200", **SETTINGS, max_ttft_ms=1)


def test_rates_are_matched():
    decode = predict("h100", 64, batch=64, kv_len=4000, tables=NOTHING_RECORDED)
    first = prefill("h100", 32, prompt_len=3000, tables=NOTHING_RECORDED)
    m = disaggregation.match(decode, first, 1000, max_ttft_ms=1, max_tpot_ms=1)
    requests = decode.tok_s_per_gpu / 1000
    assert m.prefill_gpus * first.tok_s_per_gpu / 3000 == pytest.approx(requests)
    assert len(m.broken) == 2 and "TTFT" in m.broken[0]
    assert disaggregation.match(decode, first, 1000).broken == ()
    assert disaggregation.interference_ms(64, 40.0, 922) == pytest.approx(2.777, abs=0.001)


@pytest.mark.parametrize(
    ("gpus", "changes", "message"),
    [
        ("8xH100", {}, "nothing of 8xH100 holds the weights"),
        ("8xH200", {"min_speed": 5000}, r"no deployment of 8xH200 gives 5000 tok/s per request; the nearest is 1\d\d"),
        ("8xH300", {}, "unknown GPU 'H300'"),
        ("H200", {}, "write a number and a GPU"),
        ("0xH200", {}, "write a number and a GPU"),
        ("8xH200", {"min_speed": 0}, "min_speed is 0"),
        ("8xH200", {"prices": -1.0}, "legal are USD above 0"),
    ],
)  # fmt: skip
def test_impossible_plans(gpus, changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(gpus, **(SETTINGS | changes))


def test_pools_are_read():
    assert _pools("8xH200, 16 x h100,4×h800") == [(8, "H200"), (16, "H100"), (4, "H800")]
