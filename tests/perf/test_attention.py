"""Two ways to attend: counts by hand, and where they cross."""

from __future__ import annotations

import pytest

from moelab.config import preset
from moelab.hardware import gpu
from moelab.perf import attention, costs

V3, H200 = preset("deepseek-v3"), gpu("H200")


def test_counts_by_hand():
    q, kv, batch = 3, 1000, 5
    found = attention.ways(V3, q, kv, batch)
    absorb = 2 * batch * q * 128 * 128 * 512 * 2  # both projections
    assert found["absorbed"].flops == absorb + 2 * batch * q * 128 * kv * (576 + 512)
    expand = 2 * batch * kv * 128 * 256 * 512
    assert found["expanded"].flops == expand + 2 * batch * q * 128 * kv * (192 + 128)
    assert found["kept"].flops == 2 * batch * q * 128 * kv * (192 + 128)
    # Keys, values and the rotary part in BF16; kv_b's weights in FP8.
    kept, made = 2 * batch * kv * 128 * 320, 2 * batch * kv * 128 * 256
    assert found["kept"].bytes == kept
    expanded = (128 * 256 * 512 + 2 * batch * kv * 512 + made) + (made + 2 * batch * kv * 64)
    assert found["expanded"].bytes == expanded
    assert found["absorbed"].kernels["attention"] == costs.mla(batch, q, 128, kv, V3)


def test_heads_of_one_gpu():
    eighth, whole = (attention.ways(V3, 1, 4000, heads=h)["expanded"] for h in (16, None))
    assert 8 * eighth.flops == whole.flops and eighth.bytes > whole.bytes / 8  # the latent is read whole


@pytest.mark.parametrize("kv_len", [500, 5000, 100_000])
def test_the_crossing_is_where_the_counts_are_equal(kv_len):
    q = attention.crossing(V3, kv_len)
    found = attention.ways(V3, q, kv_len)
    assert found["absorbed"].flops == pytest.approx(found["expanded"].flops)
    few = attention.ways(V3, q / 2, kv_len)
    assert few["absorbed"].flops < few["expanded"].flops


def test_the_crossing_of_long_caches_is_171_for_any_number_of_heads():
    assert attention.crossing(V3, 10**9) == pytest.approx(256 * 512 / 768, rel=1e-6)
    assert attention.crossing(preset("tinyseek"), 5000) == attention.crossing(V3, 5000)


def test_the_crossing_in_time():
    q = attention.crossing_us(V3, 5000, H200)
    for tokens, first in ((q - 5, "absorbed"), (q + 5, "expanded")):
        us = {name: way.least_us(H200) for name, way in attention.ways(V3, tokens, 5000).items() if name != "kept"}
        assert min(us, key=us.get) == first


def test_cache():
    assert attention.cache_bytes(V3) == {"latent": 1152, "expanded": 81_920}
