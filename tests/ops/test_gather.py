"""Tokens gathered per expert: a stable counting sort."""

from __future__ import annotations

import pytest
import torch

from moelab.ops.checks import OpError
from moelab.ops.gather import MAX_BLOCK, gather_by_expert, gather_by_expert_reference
from moelab.ops.router import route, route_fused
from tests.ops.poison import poison_outputs


def oracle(topk_ids, num_experts):
    """Python's own sort."""
    expert = [e if 0 <= e < num_experts else num_experts for e in topk_ids.flatten().tolist()]
    counts = [expert.count(e) for e in range(num_experts)]
    offsets = [sum(counts[:e]) for e in range(num_experts + 1)]
    return counts, offsets, sorted(range(len(expert)), key=lambda slot: expert[slot])


def assert_gathered(gathered, topk_ids, num_experts):
    assert all(t.dtype == torch.int32 and t.device == topk_ids.device for t in gathered)
    assert tuple(t.tolist() for t in gathered) == oracle(topk_ids, num_experts)


CASES = {
    "plain": lambda: (torch.randint(0, 16, (37, 4)), 16),
    "some go nowhere": lambda: (torch.randint(-1, 16, (37, 4)), 16),
    "all go nowhere": lambda: (torch.full((5, 3), -1), 4),
    "one expert takes all": lambda: (torch.full((50, 2), 3), 5),
    "one slot": lambda: (torch.tensor([[2]]), 3),
    "one expert": lambda: (torch.zeros(9, 1, dtype=torch.int64), 1),
    "out of range": lambda: (torch.tensor([[7, 0], [-5, 2**31 - 1], [3, 1]]), 7),
    "no tokens": lambda: (torch.empty(0, 8, dtype=torch.int64), 4),
    "exactly a block": lambda: (torch.randint(-1, 3, (MAX_BLOCK // 8, 8)), 3),
    "more than two blocks": lambda: (torch.randint(-1, 3, (MAX_BLOCK // 4 + 1, 8)), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_a_stable_sort(case):
    topk_ids, num_experts = CASES[case]()
    assert_gathered(gather_by_expert_reference(topk_ids, num_experts), topk_ids, num_experts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_a_stable_sort(device, monkeypatch, case, dtype):
    topk_ids, num_experts = CASES[case]()
    topk_ids = topk_ids.to(device, dtype)
    poison_outputs(monkeypatch)
    assert_gathered(gather_by_expert(topk_ids, num_experts), topk_ids, num_experts)


def test_an_id_that_only_fits_64_bits_goes_nowhere(device):
    topk_ids = torch.tensor([[2**32 + 1, 1], [0, -(2**40)]], device=device)
    assert_gathered(gather_by_expert(topk_ids, 2), topk_ids, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the sizes of a deployment need a GPU; none here")
@pytest.mark.parametrize("num_tokens", [1, 33, 256, 5000])
def test_sizes_of_a_deployment_every_run_alike(num_tokens):
    scores = torch.rand(num_tokens, 256, device="cuda")
    topk_ids = scores.topk(8).indices
    topk_ids[torch.rand(num_tokens, device="cuda") < 0.1] = -1
    expected = gather_by_expert_reference(topk_ids, 256)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gather_by_expert(topk_ids, 256), expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU; none here")
def test_router_and_gather_captured_together_follow_the_logits():
    logits, bias = torch.randn(200, 256, device="cuda"), torch.rand(256, device="cuda")

    def step():
        ids, _ = route_fused(logits, bias, top_k=8, n_group=8, topk_group=4, ids_dtype=torch.int32)
        return ids, gather_by_expert(ids, 256)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, gathered = step()
    for _ in range(3):
        logits.normal_()
        for output in (ids, *gathered):
            output.fill_(-7)
        graph.replay()
        assert ids.min() >= 0
        expected = gather_by_expert_reference(ids, 256)
        assert all(torch.equal(a, b) for a, b in zip(gathered, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only kernels on a GPU can overtake; none here")
def test_kernels_launched_early_keep_their_order():
    """64 steps without a wait, the ids of each in memory that the last step's stood in."""
    router = dict(top_k=8, n_group=8, topk_group=4)
    steps = torch.randn(64, 256, 256, device="cuda")
    expected = [gather_by_expert_reference(route(logits, None, **router)[0], 256) for logits in steps]
    torch.cuda.synchronize()
    found = [gather_by_expert(route_fused(logits, None, **router)[0], 256) for logits in steps]
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "named, accepted, arguments",
    [
        ("topk_ids's dtype is float32", "int32 or int64", (torch.zeros(3, 2), 4)),
        ("topk_ids's shape is [6]", "[T, K]", (torch.zeros(6, dtype=torch.int32), 4)),
        ("topk_ids's strides is (4, 1)", "contiguous", (torch.zeros(3, 4, dtype=torch.int32)[:, :2], 4)),
        ("num_experts is 0", "1 or more", (torch.zeros(3, 2, dtype=torch.int32), 0)),
    ],
)
def test_what_it_does_not_take_it_names(named, accepted, arguments):
    with pytest.raises(OpError) as error:
        gather_by_expert(*arguments)
    assert named in str(error.value) and accepted in str(error.value)
