"""What an exchange delivers: rows, counts, order, sums; the same for every backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moelab.comm import Nvshmem
from moelab.comm.reference import dense_moe
from tests.comm import cases
from tests.comm.emulation import emulation, missing
from tests.comm.scenario import Scenario, same_bits
from tests.conftest import SEED
from tests.pool import Rank, ThreadPool

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


def scenarios(sizes: tuple[int, ...]):
    """Of any routing, for groups of one of these sizes."""
    grid = [(dp, tp) for dp, tp in GRID if dp * tp in sizes] or [(max(sizes), 1)]
    return st.builds(
        lambda g, local, k, hidden, most, share, masked, repeats, hot, payload, layout, scales, seed: Scenario(
            dp=g[0], tp=g[1], num_experts=local * g[0] * g[1], top_k=min(k, local * g[0] * g[1]),
            hidden=hidden * 16, max_tokens=most, tokens=tuple(round(share[i % 4] * most) for i in range(g[0])),
            payload=payload, layout=layout, scales=scales if payload == "fp8" else "row",
            masked=masked, repeats=repeats, hot=hot, seed=seed,
        ),
        st.sampled_from(grid), st.integers(1, 4), st.integers(1, 8), st.integers(1, 20), st.integers(1, 20),
        st.lists(st.sampled_from([0.0, 0.06, 0.3, 0.7, 1.0]), min_size=4, max_size=4),
        st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.booleans(), st.sampled_from([0.0, 0.9]),
        st.sampled_from(["f32", "bf16", "fp8"]), st.sampled_from(LAYOUTS),
        st.sampled_from(["row", "column_tma", "ue8m0"]), st.integers(0, 2**32),
    )  # fmt: skip


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(s=scenarios((1, 2, 4, 8)))
def test_any_routing_virtual(virtual_pool, s):
    run(virtual_pool, s)


def agree(pool, virtual_pool, s: Scenario) -> None:
    """The same bits as the virtual ranks, which are the plainest."""
    for real, virtual in zip(run(pool, s), run(virtual_pool, s), strict=True):
        assert torch.equal(real, virtual)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(s=scenarios((1, 2, 4, 8)))
def test_any_routing_gloo_and_the_same_bits_as_virtual(gloo_pool, virtual_pool, s):
    agree(gloo_pool, virtual_pool, s)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_routing_by_kernels_and_the_same_bits_as_virtual(kernel_pool, virtual_pool, data):
    agree(kernel_pool, virtual_pool, data.draw(scenarios(kernel_pool.sizes)))


@pytest.mark.parametrize("kind", ["emulated", "emulated-flags"])
def test_all_ranks_in_one_launch_as_on_a_gpu(kind):
    if why := missing():
        pytest.skip(why)
    pool = ThreadPool(kind, (4,), emulation(), one_launch=True)
    for payload in ("bf16", "fp8"):
        run(pool, Scenario(dp=2, tp=2, tokens=(7, 4), payload=payload, hidden=144, seed=SEED))
    pool.stop()


def whole_with(rank: Rank, s: Scenario, returns: str, reference: torch.Tensor) -> None:
    """Outputs of a return mode within the bounds that moelab.comm.nvshmem states."""
    group = rank.groups[s.ep]
    group = group if isinstance(group, Nvshmem) else Nvshmem(group)
    with s.construct(rank, group=dataclasses.replace(group, returns=returns)) as a2a:
        for dtype in (torch.float32, torch.bfloat16):
            h = cases.send(rank, a2a, s)
            a2a.combine_send(h, cases.receive(rank, a2a, s, h))
            g = s.groups()[rank.index // s.tp]
            out = torch.full(g.x.shape, torch.nan, dtype=dtype, device=rank.device)
            a2a.combine_recv(h, out)
            a2a.check()
            out, exact = out.cpu(), reference.double()
            values = s.values(g.x, g.scales)
            magnitude = dense_moe(values, g.ids, g.weights.abs(), lambda e, row: s.expert(e, row).abs())
            # An ulp of a value is at most 2^-23 of it in float32, 2^-7 in bfloat16.
            ulp = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}[dtype]
            error = (out.double() - exact.to(dtype).double()).abs()
            if returns == "f32":
                # An ulp of the outputs; where terms cancel, of the largest partial sum.
                assert (error <= ulp * exact.abs() + (s.top_k + 1) * 2.0**-23 * magnitude).all()
            else:
                assert (error <= 8 * 2.0**-8 * magnitude).all()
                # Each of a token's partial sums is rounded once, to 2^-8 of it; then the result.
                assert (error <= 2.0**-8 * magnitude * 1.01 + ulp * exact.abs()).all()
            nowhere = (g.ids < 0).all(1)
            assert same_bits(out[nowhere], torch.zeros_like(out[nowhere]))


@pytest.mark.parametrize("returns", ["f32", "bf16"])
@pytest.mark.parametrize("payload, repeats, layout", [("bf16", False, LAYOUTS[0]), ("fp8", True, LAYOUTS[1])])
def test_partial_sums_stay_within_the_stated_bounds(kernel_pool, virtual_pool, returns, payload, repeats, layout):
    ep = kernel_pool.up_to(4)
    tp = 2 if ep > 2 else 1
    s = Scenario(
        dp=ep // tp, tp=tp, tokens=(20, 13)[: ep // tp], max_tokens=20, top_k=6, num_experts=8, hidden=144,
        payload=payload, repeats=repeats, layout=layout, seed=SEED,
    )  # fmt: skip
    reference = run(virtual_pool, s)
    futures = [kernel_pool.submit(r, whole_with, s, returns, reference[r]) for r in range(ep)]
    kernel_pool.gather(futures)
