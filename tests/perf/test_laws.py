"""Fabric laws: the checks, the published points they come from, and their limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.config import ConfigError, ParallelConfig, preset
from moelab.hardware import gpu
from moelab.perf import fabric, laws
from moelab.perf.calibrate import published_fits
from moelab.perf.fabric import Exchange
from moelab.perf.tables import NOTHING_RECORDED, Tables

V3 = preset("deepseek-v3")


def exchange(
    ep: int, library: str = "deepep", road: str = "ib400", name: str = "H100", tables=NOTHING_RECORDED
) -> Exchange:
    node = 72 if road == "nvl72" else 8
    return Exchange(gpu(name), V3, ParallelConfig(ep, 1, node), library, road, tables)


def both(ep: int, tokens: float, **options) -> tuple[float, float]:
    found = exchange(ep, **options)
    return found.time("dispatch", tokens).us, found.time("combine", tokens).us


@pytest.mark.parametrize(
    ("tokens", "ep", "expected"),
    [
        (128, 16, (106, 183)), (128, 64, (166, 300)), (128, 128, (176, 320)), (128, 256, (181, 330)),
        (256, 128, (328, 613)),
    ],
)  # fmt: skip
def test_the_rounded_law(tokens, ep, expected):  # check 12
    assert both(ep, tokens) == pytest.approx(expected, abs=1)


def test_least_squares_of_the_table():  # check 13
    expected = {
        ("16", "dispatch"): (18.7, 46.1), ("32", "dispatch"): (23.9, 47.4), ("64", "dispatch"): (27.8, 48.5),
        ("16-64", "dispatch"): (23.1, 47.4), ("16", "combine"): (23.7, 46.5), ("32", "combine"): (29.6, 46.8),
        ("64", "combine"): (24.7, 46.3), ("16-64", "combine"): (25.5, 46.4),
    }  # fmt: skip
    fits = {(f.ep, f.stage): f for f in published_fits() if f.gpu == "H100/H200"}
    assert fits.keys() == expected.keys()
    for key, (alpha, beta) in expected.items():
        assert (fits[key].alpha_us, fits[key].beta_gb_s) == pytest.approx((alpha, beta), abs=0.2)
    assert abs(fits["16-64", "dispatch"].worst_residual_us) == pytest.approx(5.1, abs=0.1)
    assert abs(fits["16-64", "combine"].worst_residual_us) == pytest.approx(7.5, abs=0.1)


def test_nvlink_of_2026():  # 4.4
    for name, expected in (("H100", (10.0, 249, 9.9, 213)), ("H200", (10.5, 264, 8.2, 218))):
        of = exchange(8, road="nvlink", name=name)
        found = [x for stage in laws.STAGES for x in (of.law(stage).alpha_us, of.law(stage).beta_gb_s)]
        assert found == pytest.approx(expected, rel=0.01)
    assert both(8, 128, road="nvlink", name="H200") == pytest.approx((35.1, 67.8), rel=0.03)  # as published


def test_the_studys_rates():  # check 11
    dispatch, combine = both(128, 256, library="pplx-2025")
    assert (256 * 59_264 / dispatch / 1e3, 256 * 114_688 / combine / 1e3) == pytest.approx((25.6, 29.0), abs=0.1)
    off_node = [256 * size * 15 / 16 / us / 1e3 for size, us in ((59_264, dispatch), (114_688, combine))]
    assert off_node == pytest.approx([24.0, 27.2], abs=0.1)
    assert (dispatch, combine) == pytest.approx((593, 1012), abs=1)


def test_libraries_meet_the_points_they_come_from():
    assert both(8, 1, library="pplx-2025", road="nvlink") == pytest.approx((41.6, 41.7))
    assert both(8, 128, library="pplx-2025", road="nvlink") == pytest.approx((83.6, 102.3))
    assert both(16, 128, library="pplx-2025") == pytest.approx((622.4, 668.1))
    assert both(64, 1, library="pplx-2025") == pytest.approx((121.0, 58.6))
    for ep, dispatch, combine in ((8, 163, 318), (16, 173, 329), (32, 182, 350), (64, 186, 353), (128, 192, 369)):
        assert both(ep, 128, library="deepep-2025") == pytest.approx((dispatch, combine), rel=0.06)
    for ep, dispatch, combine in ((16, 214.8, 241.5), (32, 229.1, 335.0), (64, 266.7, 391.2)):
        assert both(ep, 128, library="pplx-garden", road="efa") == pytest.approx((dispatch, combine), rel=0.07)
    assert both(16, 1, library="cpu-proxy")[0] == pytest.approx(290.5 + 59_264 / 2 / 47e3)


def test_tp_ranks_share_the_sending_only():
    """T = t/tp of dispatch is the caller's; the law sees T."""
    of = exchange(128)
    assert of.time("dispatch", 64).us < of.time("dispatch", 256).us
    assert of.reduce(256, 1).us == 0
    law = exchange(8, road="nvlink").law("combine")
    assert of.reduce(256, 4).us == pytest.approx(law.alpha_us + 1.5 * 256 * 14_336 / law.beta_gb_s / 1e3)


@given(
    st.sampled_from(["deepep", "deepep-2025", "pplx-2025", "pplx-garden", "cpu-proxy", "moelab"]),
    st.sampled_from(["ib200", "ib400", "ib800", "efa", "nvl72"]), st.sampled_from([2, 8, 16, 64, 128, 256]),
    st.floats(1, 1024), st.floats(1, 1024), st.floats(1, 3),
)  # fmt: skip
def test_more_tokens_and_imbalance_are_never_faster(library, road, ep, a, b, imbalance):
    of, (low, high) = exchange(ep, library, road), sorted((a, b))
    for stage in laws.STAGES:
        assert 0 < of.time(stage, low).us <= of.time(stage, high).us + 1e-9
        assert of.time(stage, low).us <= of.time(stage, low, imbalance).us + 1e-9
        assert of.law(stage).error > 0


@given(st.sampled_from(["deepep", "cpu-proxy", "moelab", "pplx-garden"]), st.floats(1, 512))
def test_a_faster_fabric_is_never_slower(library, tokens):
    times = [both(128, tokens, library=library, road=road) for road in ("ib200", "ib400", "ib800")]
    assert times == sorted(times, reverse=True)
    assert both(64, tokens, library="deepep", road="nvl72") < both(64, tokens, library="deepep")


def test_limits():
    """One token pays the latency; many EP pay for every copy; one GPU pays nothing."""
    of = exchange(64)
    assert of.time("dispatch", 1e-6).us == pytest.approx(25, abs=0.01)
    assert exchange(256).time("dispatch", 100).us < 25 + 100 * 59_264 / 47e3
    assert exchange(1).time("dispatch", 100).us == 0
    assert exchange(8).road == "nvlink" and exchange(8, "deepep-2025").road == "ib400"
    assert exchange(64, road="nvl72").road == "nvl72"
    racks = exchange(128, road="nvl72")  # 72 GPUs a rack, NICs between racks
    assert racks.road == "ib400" and racks.time("dispatch", 64).us == pytest.approx(25 + 64 * 59_264 * 56 / 128 / 47e3)


def test_what_nobody_measured_says_so():
    assert exchange(64).time("dispatch", 128).origin == "published"
    for term in (
        exchange(128).time("combine", 128), exchange(64).time("dispatch", 999),
        exchange(64, road="ib800").time("dispatch", 128), exchange(8, "moelab", "nvlink").time("combine", 1),
        exchange(8, road="nvlink", name="H800").time("dispatch", 8), exchange(8, road="nvlink").reduce(8, 2),
    ):  # fmt: skip
        assert term.origin == "extrapolated"
    assert exchange(128).time("combine", 128).error >= 0.15  # 4.4: the law undershoots EP128 by 13 %
    assert exchange(128).time("dispatch", 128).error >= 0.09


def test_moelab_until_it_is_recorded_is_its_designs_bound():
    dispatch, combine = both(8, 128, library="moelab", road="nvlink")
    assert (dispatch, combine) == pytest.approx((17.3, 30.6), abs=0.5)  # 4.633 rows a token, 360 GB/s


def test_a_library_that_was_not_measured_there_borrows_a_law_and_says_so():
    ours = exchange(64, "moelab").law("dispatch")
    assert ours.source == "law of DeepEP on 400G, EP16-64; moelab was not measured on ib400"
    assert (ours.beta_gb_s, ours.origin) == (47.0, "extrapolated") and ours.error > 0.2
    scaled = exchange(64, road="ib800").law("combine")
    assert scaled.source.endswith("scaled to ib800's line rate") and scaled.beta_gb_s == 94.0


def test_records_of_an_exchange_precede_the_law():
    def rows(stage, alpha, beta, ep, origin="recorded", backend="nvshmem"):
        kind = "off-gpu" if backend == "deepep" else "distinct"
        size, phi = laws.SIZE[stage], laws.share(kind, ep, 8, V3)
        return tuple(
            ({"bench": "alltoall", "backend": backend, "gpus": ep, "tokens": t, "experts": 256, "hidden": 7168},
             alpha + t * size * phi / beta / 1e3, origin) for t in (1, 32, 128)
        )  # fmt: skip

    tables = Tables(
        {("dispatch", "H200"): rows("dispatch", 6, 300, 8), ("combine", "H200"): rows("combine", 7, 350, 8)}
    )
    law = exchange(8, "moelab", "nvlink", "H200", tables).law("dispatch")
    assert (law.alpha_us, law.beta_gb_s, law.origin) == (pytest.approx(6), pytest.approx(300), "recorded")
    assert exchange(8, "deepep", "nvlink", "H200", tables).law("dispatch").origin == "published"  # another library
    assert exchange(16, "moelab", "ib400", "H200", tables).law("dispatch").origin == "extrapolated"  # another road
    mine = Tables({("dispatch", "H200"): rows("dispatch", 5, 310, 8, "measured")})
    assert exchange(8, "moelab", "nvlink", "H200", mine).time("dispatch", 64).origin == "measured"
    # Of several configurations the fastest counts, whatever comes last; what is another exchange does not.
    other = {"routing": "hot", "payload": "bf16", "tp": 2}
    slower = [(p | {"blocks": 4}, us + 9, o) for p, us, o in rows("dispatch", 6, 300, 8)]
    unlike = [(p | {k: v}, us / 2, o) for p, us, o in rows("dispatch", 6, 300, 8) for k, v in other.items()]
    usual = [(p | {"routing": "uniform", "payload": "fp8", "tp": 1}, us, o) for p, us, o in rows("dispatch", 6, 300, 8)]
    for order in ([*usual, *slower, *unlike], [*unlike, *slower, *usual]):
        law = exchange(8, "moelab", "nvlink", "H200", Tables({("dispatch", "H200"): tuple(order)})).law("dispatch")
        assert (law.alpha_us, law.beta_gb_s) == (pytest.approx(6), pytest.approx(300))
    # From EP2 to EP8 our kernels send 4.65 times as much, a token once a rank; DeepEP 1.75 times, a row per expert.
    for backend, library, more in (("nvshmem", "moelab", 4.633 / 0.9965), ("deepep", "deepep", 7 / 4)):
        pair = Tables({("combine", "H200"): rows("combine", 5, 200, 2, backend=backend)})
        two, eight = (exchange(ep, library, "nvlink", "H200", pair).time("combine", 64).us - 5 for ep in (2, 8))
        assert eight / two == pytest.approx(more, rel=1e-3)
    two = Tables({("dispatch", "H200"): rows("dispatch", 5, 310, 8)[:2]})
    assert exchange(8, "moelab", "nvlink", "H200", two).law("dispatch").origin == "extrapolated"


def test_impossible_fabrics_name_what_is_there():
    with pytest.raises(ConfigError, match="unknown fabric 'ib40'; did you mean ib400"):
        fabric.check("ib40", "deepep", ParallelConfig(8))
    with pytest.raises(ConfigError, match="unknown alltoall 'deep'; did you mean deepep"):
        fabric.check("ib400", "deep", ParallelConfig(8))
    with pytest.raises(ConfigError, match="nvlink joins 8 GPUs, ep is 16: take ib400"):
        fabric.check("nvlink", "deepep", ParallelConfig(16))
