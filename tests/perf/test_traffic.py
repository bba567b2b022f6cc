"""Bytes per scheme: the checks, exact counts of random routing, and what must hold between the schemes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.comm.spec import ExchangeSpec
from moelab.comm.traffic import traffic as count
from moelab.config import ConfigError, ParallelConfig, preset
from moelab.perf import traffic

V3, TINY = preset("deepseek-v3"), preset("tinyseek")


def test_bytes_per_token():
    assert traffic.dispatch_bytes_per_token(V3) == 8 * (7168 + 224 + 16) == 59_264
    assert traffic.combine_bytes_per_token(V3) == 114_688


@pytest.mark.parametrize(("ep", "dispatch", "combine"), [(8, 29.5, 57.1), (128, 284.5, 550.5)])
def test_wire_floor(ep, dispatch, combine):  # check 10
    parallel = ParallelConfig(ep)
    times = [
        traffic.wire_floor_us(b, 256, parallel)
        for b in (traffic.dispatch_bytes_per_token(V3), traffic.combine_bytes_per_token(V3))
    ]
    assert times == pytest.approx([dispatch, combine], abs=0.1)


def test_share_off_the_node():
    shares = [traffic.off_node_share(ParallelConfig(ep)) for ep in (1, 2, 8, 16, 128)]
    assert shares == [0, 1 / 2, 7 / 8, 1 / 2, 15 / 16]


@pytest.mark.parametrize(("dp", "tp"), [(8, 1), (4, 2), (1, 4), (16, 1)])
def test_against_exact_counts(dp, tp, rng):
    """`moelab.comm.traffic` counts what ranks send under random routing; on average as much is received."""
    model, parallel, tokens = TINY.replace(n_group=1, topk_group=1), ParallelConfig(dp, tp), 240
    spec = ExchangeSpec(parallel, 16, 4, 256, tokens, payload="fp8")
    ids = [np.array([rng.choice(16, 4, replace=False) for _ in range(tokens)]) for _ in range(dp)]
    count_of = count(spec, ids)
    counts = (parallel.ep - 1) * spec.header_bytes  # beside the rows; the formulas leave it out
    d = traffic.dispatch_row_bytes(model)  # with a header of 16 bytes, where the reference's row has 4
    schemes = {"sparse": "expert-major", "rank": "per rank", "padded": "padded", "all_gather": "gather all"}
    for name, scheme in schemes.items():
        ours, exact = traffic.layer_traffic(scheme, model, parallel, tokens), count_of[name]
        routing = 32 * (name == "rank")
        dispatched = exact.dispatch.mean() - counts * (name != "all_gather")
        rows = dispatched / (spec.wire_row_bytes + routing)
        assert rows == pytest.approx(ours.dispatch / (d + routing), rel=0.03), name
        assert exact.combine.mean() == pytest.approx(ours.combine, rel=0.03), name


def test_schemes_by_hand():
    """EP128 = DP32 × TP4, 256 tokens in each group: every term written out."""
    parallel, t, total, c, d = ParallelConfig(32, 4), 256, 8192, 14_336, 7_408

    def parts(scheme):
        found = traffic.layer_traffic(scheme, V3, parallel, t)
        return found.attention, found.dispatch, found.combine

    reduce = 2 * 3 / 4 * t * c
    assert parts("expert-major") == pytest.approx((reduce, 64 * 8 * d * 127 / 128, t * 8 * c * 127 / 128))
    assert parts("padded") == pytest.approx((reduce, 127 * 64 * 2 * d, 127 * t * 2 * c))
    assert parts("gather all") == pytest.approx((reduce, (total - 64) * d, 127 * t * c))
    assert parts("EP, replicated") == pytest.approx((0, 0, 2 * 127 / 128 * total * c))
    assert parts("EP, unfused") == pytest.approx((0, 0, 127 / 128 * total * 8 * c))
    assert parts("EP, broadcast") == pytest.approx((0, total * (d + 64), 127 / 128 * total * 8 * c))
    assert parts("TP only") == pytest.approx((2 * 127 / 128 * total * c, *[127 / 128 * total * c] * 2))
    with pytest.raises(ConfigError, match="'EP, fast': legal are 'expert-major'"):
        traffic.layer_traffic("EP, fast", V3, parallel, t)


@given(st.sampled_from([(1, 1), (8, 1), (2, 4), (16, 1), (32, 4), (128, 1)]), st.integers(1, 4096))
def test_between_schemes(deployment, tokens):
    parallel = ParallelConfig(*deployment)
    found = {s: traffic.layer_traffic(s, V3, parallel, tokens) for s in traffic.SCHEMES}
    if parallel.ep == 1:
        assert all(x.total == 0 for x in found.values())
        return
    assert found["per rank"].combine <= found["expert-major"].combine  # a rank at most k times
    assert found["expert-major"].combine <= found["padded"].combine
    assert found["EP, replicated"].total <= found["EP, unfused"].total <= found["EP, broadcast"].total
    double = traffic.layer_traffic("expert-major", V3, parallel, 2 * tokens)
    assert double.total == pytest.approx(2 * found["expert-major"].total)
