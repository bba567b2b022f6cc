"""What an exchange delivers: rows, counts, order, sums; the same for every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.comm import cases
from tests.comm.scenario import Scenario, same_bits
from tests.conftest import SEED

LAYOUTS = ["expert_padded", "contiguous_128"]
GRID = [(dp, tp) for dp in (1, 2, 4) for tp in (1, 2)]


def run(pool, s: Scenario) -> list[torch.Tensor]:
    if s.ep not in pool.sizes:
        pytest.skip(f"a pool of {pool.size} {pool.kind} ranks has no group of {s.ep}")
    results = pool.run(cases.check_exchange, s, ranks=s.ep)
    groups = s.groups()
    distinct = sum(len(set(row) - {-1}) for g in groups for row in g.ids.tolist())
    assert sum(rows for rows, _ in results) == distinct, "tokens were lost or doubled"
    for rank, (_, out) in enumerate(results):
        assert same_bits(out, results[rank // s.tp * s.tp][1]), "TP ranks of a group differ"
    return [out for _, out in results]


@pytest.mark.parametrize("dp, tp", GRID)
def test_unequal_and_zero_batches(pool, dp, tp):
    tokens = tuple([7, 0, 1, 8][:dp])
    run(pool, Scenario(dp=dp, tp=tp, tokens=tokens, payload="f32", seed=SEED + 10 * dp + tp))
    run(pool, Scenario(dp=dp, tp=tp, tokens=(0,) * dp, seed=SEED))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "payload, scales, hidden",
    [("f32", "row", 36), ("bf16", "row", 200)]
    + [("fp8", scales, hidden) for scales in ("row", "column_tma", "ue8m0") for hidden in (144, 640)],
)
def test_payloads_scales_and_layouts(pool, payload, scales, hidden, layout):
    s = Scenario(
        dp=2,
        tokens=(9, 4),
        max_tokens=9,
        payload=payload,
        scales=scales,
        layout=layout,
        hidden=hidden,
        seed=SEED,
    )
    if 2 not in pool.sizes:
        s = s.replace(dp=pool.size, tokens=tuple(range(3, 3 + pool.size)), max_tokens=2 + pool.size)
    run(pool, s)


scenarios = st.builds(
    lambda g, local, k, hidden, most, share, masked, repeats, hot, payload, layout, scales, seed: Scenario(
        dp=g[0], tp=g[1], num_experts=local * g[0] * g[1], top_k=min(k, local * g[0] * g[1]),
        hidden=hidden * 16, max_tokens=most, tokens=tuple(round(f * most) for f in share[: g[0]]),
        payload=payload, layout=layout, scales=scales if payload == "fp8" else "row",
        masked=masked, repeats=repeats, hot=hot, seed=seed,
    ),
    st.sampled_from(GRID), st.integers(1, 4), st.integers(1, 8), st.integers(1, 20), st.integers(1, 20),
    st.lists(st.sampled_from([0.0, 0.06, 0.3, 0.7, 1.0]), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.booleans(), st.sampled_from([0.0, 0.9]),
    st.sampled_from(["f32", "bf16", "fp8"]), st.sampled_from(LAYOUTS),
    st.sampled_from(["row", "column_tma", "ue8m0"]), st.integers(0, 2**32),
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(s=scenarios)
def test_any_routing_virtual(virtual_pool, s):
    run(virtual_pool, s)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(s=scenarios)
def test_any_routing_gloo_and_the_same_bits_as_virtual(gloo_pool, virtual_pool, s):
    for real, virtual in zip(run(gloo_pool, s), run(virtual_pool, s), strict=True):
        assert same_bits(real, virtual)
