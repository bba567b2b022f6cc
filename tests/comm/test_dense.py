"""Padded and split all_to_all_single: same results, and the bytes that each scheme is said to move."""

from __future__ import annotations

import numpy as np
import pytest

from moelab.comm.dense import Dense
from moelab.comm.traffic import SCHEMES, traffic
from tests.comm import cases
from tests.comm.scenario import Scenario, same_bits
from tests.conftest import SEED
from tests.pool import Rank


def bytes_and_bits(rank: Rank, s: Scenario, padded: bool | None):
    options = {} if padded is None else {"group": Dense(padded, rank.groups[s.ep])}
    with s.construct(rank, **options) as a2a:
        out = cases.whole(rank, a2a, s)
        return a2a.backend, a2a.sent_bytes, out.cpu()


@pytest.mark.parametrize("payload", ["bf16", "fp8"])
@pytest.mark.parametrize("dp, tp", [(4, 1), (2, 2)])
def test_dense_exchanges_agree_and_move_the_bytes_counted(gloo_pool, dp, tp, payload):
    s = Scenario(dp=dp, tp=tp, tokens=(7, 0, 8, 3)[:dp], payload=payload, hidden=144, seed=SEED)
    sparse, split, padded = (gloo_pool.run(bytes_and_bits, s, p, ranks=s.ep) for p in (None, False, True))
    counted = traffic(s.spec, [g.ids.numpy() for g in s.groups()])
    for rank in range(s.ep):
        names, sent, outs = zip(*(results[rank] for results in (sparse, split, padded)), strict=True)
        assert names == ("torch-gloo", "dense-split", "dense-padded")
        assert sent == tuple(counted[scheme].total[rank] for scheme in ("sparse", "sparse", "padded"))
        assert same_bits(outs[0], outs[1]) and same_bits(outs[0], outs[2])


def test_virtual_ranks_count_the_same_bytes(virtual_pool):
    s = Scenario(dp=2, tp=2, tokens=(7, 4), seed=SEED)
    counted = traffic(s.spec, [g.ids.numpy() for g in s.groups()])["sparse"].total
    assert [sent for _, sent, _ in virtual_pool.run(bytes_and_bits, s, None, ranks=4)] == counted.tolist()


def test_traffic_of_one_token_by_hand():
    # Two ranks in each of two DP groups, two experts on each rank. Rank 0 sends one token to experts 2 and 3 on rank
    # 1 and to expert 4 on rank 2.
    s = Scenario(dp=2, tp=2, num_experts=8, top_k=3, hidden=64, max_tokens=2, tokens=(1, 0), payload="bf16")
    counted = traffic(s.spec, [np.array([[2, 3, 4]]), np.zeros((0, 3), int)])
    header, row, out = 3 * 4 * 3, 128 + 4, 128  # to three ranks: has_work and two counts
    assert set(counted) == set(SCHEMES)
    assert counted["sparse"].dispatch.tolist() == [header + 3 * row, header, header, header]
    # Rank 1 keeps its two results and sends them to rank 0; rank 2 sends its one to ranks 0 and 1.
    assert counted["sparse"].combine.tolist() == [0, 2 * out, 2 * out, 0]
    assert counted["rank"].dispatch.tolist() == [header + 2 * (row + 24), header, header, header]
    assert counted["rank"].combine.tolist() == [0, out, 2 * out, 0]
    assert counted["padded"].dispatch.tolist() == [header + 3 * 2 * row] * 4
    assert counted["padded"].combine.tolist() == [3 * 4 * out] * 4
    assert counted["all_gather"].dispatch.tolist() == [3 * row, 0, 0, 0]
    assert counted["all_gather"].combine.tolist() == [out, out, 2 * out, 2 * out]
