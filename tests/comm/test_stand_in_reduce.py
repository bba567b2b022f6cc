"""The stand-in of an all-reduce leaves x as it is, moves what a ring would, and never waits less than asked."""

from __future__ import annotations

import pytest
import torch

from moelab.comm import CommError
from moelab.comm.stand_in_reduce import StandInReduce
from moelab.config import ConfigError

H, M = 64, 8


def make(us=lambda tokens: 0.0, tp=4, device="cpu", rows=M, hidden=H, **options) -> StandInReduce:
    return StandInReduce(tp, us, rows, 2 * hidden, device, **options)


def test_x_is_the_same_and_the_bytes_are_a_rings():
    reduce = make(law="somebody's")
    for tokens in (M, 3, 0):
        x = torch.randn(tokens, H).bfloat16()
        before = x.clone()
        assert reduce.all_reduce(x) is x and torch.equal(x, before)
    # 2(n−1)/n of x; no tokens, no call
    assert reduce.moved() == (2, 2 * 3 * (M + 3) * H * 2 // 4) and reduce.law == "somebody's"
    assert (reduce._away[: 3 * 3 * H // 8] != 0).any()
    reduce.clear()
    assert reduce.moved() == (0, 0) and not len(reduce.held().held_us)


def test_it_lasts_as_long_as_asked():
    reduce = make(lambda tokens: 5000.0 + 1000 * tokens)
    for tokens in (M, 1):
        reduce.all_reduce(torch.zeros(tokens, H, dtype=torch.bfloat16))
    held = reduce.held()
    assert held.asked_us.tolist() == [13_000, 6000] and (held.held_us >= held.asked_us).all()
    assert all(us in (13_000, 6000) and (found >= us).all() for us, found in held.by_asked().items())


def test_what_it_does_not_take():
    for named, x in {
        r"x is \[9, 64\]": torch.zeros(9, H, dtype=torch.bfloat16), "of 4 bytes": torch.zeros(M, H),
        r"strides \(1, 8\)": torch.zeros(H, M, dtype=torch.bfloat16).T,
    }.items():  # fmt: skip
        with pytest.raises(CommError, match=named):
            make().all_reduce(x)
    with pytest.raises(ConfigError, match="tp is 1"):
        make(tp=1)
    with pytest.raises(ConfigError, match="row_bytes is 6"):
        make(hidden=3)
    with pytest.raises(ConfigError, match="num_sms is -1"):
        make(num_sms=-1)


@pytest.mark.gpu
def test_on_a_gpu_in_a_graph():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; none here")
    us, hidden, tokens = 40.0, 7168, 128
    reduce = make(lambda n: us, tp=4, device="cuda", rows=tokens, hidden=hidden)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    before = x.clone()
    reduce.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduce.all_reduce(x)
    reduce.clear()
    for _ in range(20):
        graph.replay()
    held = reduce.held()
    assert torch.equal(x, before) and reduce.moved() == (20, 20 * 2 * 3 * tokens * hidden * 2 // 4)
    assert (held.held_us >= us).all() and held.held_us.max() <= 1.03 * us
