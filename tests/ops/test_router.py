"""The router's rules, each broken once by a published engine."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.ops.checks import OpError
from moelab.ops.gather import gather_by_expert
from moelab.ops.router import route, route_fused
from tests.ops.poison import poison_outputs

V3 = dict(top_k=8, n_group=8, topk_group=4, scale=2.5)


def oracle(logits, bias, top_k, n_group, topk_group, scale):
    """Float64, one token and one comparison at a time."""
    ids, weights = [], []
    for row in logits.double():
        scores = row.sigmoid()
        biased = scores + bias.double()
        groups = biased.view(n_group, -1)
        group_score = groups.sort(-1, descending=True).values[:, :2].sum(-1)
        kept = sorted(range(n_group), key=lambda g: (-group_score[g].item(), g))[:topk_group]
        size = len(row) // n_group
        allowed = [e for g in sorted(kept) for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: (-biased[e].item(), e))[:top_k]
        ids.append(chosen)
        weights.append(scores[chosen] / scores[chosen].sum() * scale)
    return torch.tensor(ids), torch.stack(weights)


@pytest.mark.parametrize("shift", [-3.0, 0.0, 6.9])
def test_ids_and_weights_equal_a_float64_oracle(shift):
    logits = torch.randn(64, 256)
    bias = torch.rand(256) * 0.3 + shift
    ids, weights = route(logits, bias, **V3)
    expected_ids, expected_weights = oracle(logits, bias, **V3)
    # A float32 sum may merge what float64 tells apart: such a proven tie may fall either way.
    biased = logits.double().sigmoid() + bias.double()
    gap = (biased.gather(-1, ids) - biased.gather(-1, expected_ids)).abs()
    assert gap.max() < 2e-6
    same = (ids == expected_ids).all(-1)
    assert same.float().mean() > 0.95
    torch.testing.assert_close(weights[same].double(), expected_weights[same], rtol=1e-5, atol=1e-6)


def separated(tokens):
    """(logits, bias, which tokens are clear): biased scores lie at least 2^-16 apart, so rounding decides nothing, and
    where group sums tie as well the token is not clear."""

    def grid(step):
        return torch.stack([torch.randperm(256) for _ in range(tokens)]) * step

    logits, bias = (grid(1 / 256) + 1 / 512).logit(), grid(1 / 65536)[0]
    sums = (logits.double().sigmoid() + bias).view(-1, 8, 32).topk(2).values.sum(-1).sort(-1).values
    return logits, bias, (sums.diff(dim=-1) > 1e-5).all(-1)


def test_adding_a_constant_to_all_biases_changes_nothing():
    """huggingface/transformers#41647: weights were gathered from score + bias."""
    logits, bias, clear = separated(64)
    assert clear.float().mean() > 0.5
    ids, weights = route(logits, bias, **V3)
    moved_ids, moved_weights = route(logits, bias + 1.0, **V3)
    assert torch.equal(ids[clear], moved_ids[clear]) and torch.equal(weights[clear], moved_weights[clear])


def test_the_kernel_weighs_by_scores_alone(device):
    logits, bias, clear = (t.to(device) for t in separated(few(device)))
    assert clear.any()
    ids, weights = route_fused(logits, bias, **V3)
    chosen = logits.sigmoid().gather(-1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True) * 2.5)
    for shift in (1.0, -4.0):
        moved_ids, moved_weights = route_fused(logits, bias + shift, **V3)
        assert torch.equal(ids[clear], moved_ids[clear]) and torch.equal(weights[clear], moved_weights[clear])


def test_weights_come_from_the_scores_without_bias():
    logits, bias = torch.randn(200, 256), torch.randn(256)
    ids, weights = route(logits, bias, **V3)
    chosen = logits.sigmoid().gather(-1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True) * 2.5)


def test_no_expert_of_a_dropped_group_is_chosen_when_all_biased_scores_are_negative():
    """huggingface/transformers#45440, kvcache-ai/ktransformers#1148: dropped groups were masked with 0."""
    logits, bias = torch.randn(200, 256), torch.full((256,), -5.0) + torch.rand(256)
    ids, _ = route(logits, bias, **V3)
    groups = (logits.sigmoid() + bias).view(-1, 8, 32).topk(2).values.sum(-1)
    kept = groups.topk(4).indices
    assert all(set((row // 32).tolist()) <= set(k.tolist()) for row, k in zip(ids, kept, strict=True))


def test_a_bias_in_a_narrow_band_far_from_zero_still_decides():
    """sgl-project/sglang#31213: of biases of 6.82 … 7.06 bfloat16 keeps 8 values, float32 all."""
    bias = torch.linspace(6.82, 7.06, 256)[torch.randperm(256)]
    ids, _ = route(torch.zeros(1, 256), bias, top_k=8, n_group=1, topk_group=1)
    assert ids[0].tolist() == bias.argsort(descending=True)[:8].tolist()


def test_the_lower_id_wins_a_tie():
    ids, _ = route(torch.zeros(3, 256), torch.zeros(256), **V3)
    assert ids.tolist() == [list(range(8))] * 3
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])
    assert route(logits, None, top_k=4)[0].tolist() == [[1, 2, 4, 0]]


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=8, max_size=8))
def test_ties_of_every_pattern(values):
    ids, _ = route(torch.tensor([values]), None, top_k=3, n_group=2, topk_group=1)
    first, second = values[:4], values[4:]
    best = [sum(torch.tensor(sorted(g)[-2:]).sigmoid().tolist()) for g in (first, second)]
    base = 0 if best[0] >= best[1] else 4
    expected = sorted(range(4), key=lambda e: (-values[base + e], e))[:3]
    assert ids.tolist() == [[base + e for e in expected]]


def test_mixtral_is_the_case_of_softmax_and_one_group():
    logits = torch.randn(50, 8)
    ids, weights = route(logits, None, top_k=2, scoring="softmax")
    top = logits.softmax(-1).topk(2)
    assert torch.equal(ids, top.indices)
    torch.testing.assert_close(weights, top.values / top.values.sum(-1, keepdim=True))


def test_no_tokens():
    for scoring, bias in itertools.product(("sigmoid", "softmax"), (None, torch.zeros(256))):
        ids, weights = route(torch.empty(0, 256), bias, scoring=scoring, **V3)
        assert ids.shape == weights.shape == (0, 8)


# Experts and the arguments of `route`: DeepSeek-V3's, V2's, tinyseek's, Mixtral's, and sizes that are no power of two.
ROUTERS = {
    "v3": (256, V3),
    "v2": (160, dict(top_k=6, n_group=8, topk_group=3, scoring="softmax", renormalize=False, scale=16.0)),
    "tinyseek": (16, dict(top_k=4, n_group=4, topk_group=2, scale=2.5)),
    "mixtral": (8, dict(top_k=2, scoring="softmax")),
    "one group": (384, dict(top_k=8, scale=2.5)),
    "all groups kept": (64, dict(top_k=6, n_group=4, topk_group=4)),
    "groups of one": (8, dict(top_k=3, n_group=8, topk_group=4)),
    "odd": (21, dict(top_k=5, n_group=3, topk_group=2, renormalize=False)),
    "one expert": (1, dict(top_k=1)),
}


def few(device) -> int:
    """Tokens: no multiple of anything, and few where every program is interpreted."""
    return 517 if device.type == "cuda" else 5


def assert_as_reference(logits, bias, ids_dtype=torch.int64, **router):
    ids, weights = route_fused(logits, bias, ids_dtype=ids_dtype, **router)
    expected_ids, expected_weights = route(logits, bias, **router)
    assert ids.dtype == ids_dtype and weights.dtype == torch.float32 and ids.is_contiguous()
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-6, equal_nan=True)
    return ids.long(), weights


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernel_does_as_the_reference(device, monkeypatch, name, ids_dtype):
    num_experts, router = ROUTERS[name]
    logits = torch.randn(few(device), num_experts, device=device)
    poison_outputs(monkeypatch)
    for bias in (None, torch.rand(num_experts, device=device) - 2.0):
        assert_as_reference(logits, bias, ids_dtype, **router)


def test_the_kernel_reads_rows_of_a_wider_tensor(device):
    wide = torch.full((few(device), 300), float("nan"), device=device)
    wide[:, 17:273] = torch.randn(few(device), 256, device=device)
    assert_as_reference(wide[:, 17:273], torch.rand(256, device=device), **V3)


@pytest.mark.parametrize("name", ["v3", "tinyseek", "all groups kept", "odd"])
def test_the_kernel_breaks_ties_as_the_reference(device, name):
    """Scores 0, ½ and 1 and biases of a few bits: sums are exact, so many experts and groups tie."""
    num_experts, router = ROUTERS[name]
    logits = torch.tensor([-200.0, 0.0, 200.0], device=device)[torch.randint(3, (few(device), num_experts))]
    for step in (0.0, 0.5):
        bias = torch.randint(-2, 2, (num_experts,), device=device) * step
        assert_as_reference(logits, bias, **router)
    ids, _ = assert_as_reference(torch.zeros_like(logits), None, **router)
    assert torch.equal(ids, torch.arange(router["top_k"], device=device).expand_as(ids))


def test_the_kernel_masks_dropped_groups_below_every_negative_score(device):
    logits, bias = torch.randn(few(device), 256, device=device), torch.rand(256, device=device) - 6.0
    ids, _ = assert_as_reference(logits, bias, **V3)
    assert ((ids // 32).sort().values.diff(dim=-1) > 0).sum(-1).max() < 4, "experts of more than 4 groups"


@pytest.mark.parametrize("excluded", ["some", "groups", "all but three", "all"])
def test_the_kernel_ranks_minus_infinity_as_the_reference(device, excluded):
    """Experts excluded by a bias of −inf equal those of dropped groups: after the others, by id, and none twice."""
    gone = {
        "some": torch.rand(256) < 0.5,
        "groups": (torch.arange(256) // 32) % 4 < 3,
        "all but three": torch.ones(256, dtype=torch.bool).index_fill(0, torch.tensor([40, 41, 200]), False),
        "all": torch.ones(256, dtype=torch.bool),
    }[excluded]
    bias = torch.rand(256).masked_fill(gone, float("-inf")).to(device)
    logits = torch.randn(few(device), 256, device=device)
    ids, _ = assert_as_reference(logits, bias, **V3)
    assert (ids.sort().values.diff(dim=-1) > 0).all(), "an expert is named twice"
    logits[::2] = float("-inf")  # scores of 0, so weights of 0 / (0 + 1e-20)
    assert_as_reference(logits, bias, **V3)


@pytest.mark.parametrize("name", ["v3", "mixtral"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_logits_give_ids_in_range_and_nan_weights_to_their_token_alone(device, name, sign):
    num_experts, router = ROUTERS[name]
    logits = torch.randn(4, num_experts, device=device)
    logits[1, 5] = logits[1, 2] = logits[3] = sign * float("nan")
    ids, weights = assert_as_reference(logits, None, **router)
    assert (ids[3] < num_experts).all() and (ids[3] >= 0).all()
    assert weights.isnan().any(-1).tolist() == [False, True, False, True]
    if name == "v3":  # softmax leaves no score of the token that is not NaN
        assert ids[1, :2].tolist() == [2, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's exponential is numpy's; no GPU here")
def test_scores_are_those_of_torch_bit_for_bit():
    """So that what ties there ties here."""
    logits = torch.cat([torch.randn(4096, 32), torch.linspace(-120, 120, 32 * 4096).view(4096, 32)]).cuda()
    everything = dict(top_k=32, renormalize=False)
    ids, weights = route_fused(logits, None, **everything)
    assert torch.equal(ids, route(logits, None, **everything)[0])
    assert torch.equal(weights, logits.sigmoid().gather(-1, ids))


@pytest.mark.parametrize("count", [0, 3])
def test_padding_is_routed_nowhere(device, monkeypatch, count):
    """vllm-project/vllm#38128, sgl-project/sglang#25852, ROCm/aiter#4530: padding polluted loads, and NaN in it gave
    ids out of range. Wherever it stands, whatever is in its logits, it has ids −1 and weights 0, and real tokens do not
    notice."""
    logits, bias = torch.randn(few(device), 256, device=device), torch.rand(256, device=device)
    real = torch.zeros(len(logits), dtype=torch.bool)
    real[torch.randperm(len(real))[:count]] = True
    real = real.to(device)
    alone = route_fused(logits[real], bias, **V3)
    logits[~real] = torch.tensor([float("nan"), float("inf")], device=device).repeat(len(real), 128)[~real]
    poison_outputs(monkeypatch)
    for dtype in (torch.int32, torch.int64):
        ids, weights = assert_as_reference(logits, bias, dtype, real=real, **V3)
        assert torch.equal(ids[real], alone[0]) and torch.equal(weights[real], alone[1])
        assert (ids[~real] == -1).all() and not weights[~real].any()
    counts = gather_by_expert(ids, 256).counts
    assert counts.sum() == count * V3["top_k"]


def test_the_kernel_takes_no_tokens(device):
    ids, weights = route_fused(torch.empty(0, 256, device=device), None, ids_dtype=torch.int32, **V3)
    assert ids.shape == weights.shape == (0, 8) and ids.dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU; none here")
def test_a_captured_router_follows_its_inputs():
    logits, bias = torch.randn(130, 256, device="cuda"), torch.rand(256, device="cuda")
    route_fused(logits, bias, **V3)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = route_fused(logits, bias, **V3)
    for _ in range(3):
        logits.normal_(), bias.uniform_(-3, 0), ids.fill_(-7), weights.fill_(float("nan"))
        graph.replay()
        expected_ids, expected_weights = route(logits, bias, **V3)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_without_a_kernel_the_reference_serves(ids_dtype):
    logits, bias = torch.randn(9, 256), torch.rand(256)
    _, weights = assert_as_reference(logits, bias, ids_dtype, **V3)
    assert torch.equal(weights, route(logits, bias, **V3)[1])


@pytest.mark.parametrize(
    "named, accepted, changes",
    [
        ("logits's dtype is bfloat16", "float32", dict(logits=torch.zeros(3, 256, dtype=torch.bfloat16))),
        ("logits's shape is [256]", "[T, E]", dict(logits=torch.zeros(256))),
        ("logits's strides is (1, 3)", "contiguous", dict(logits=torch.zeros(256, 3).mT)),
        ("is 2048", "1…1024", dict(logits=torch.zeros(3, 2048))),
        ("bias's shape is [255]", "[256]", dict(bias=torch.zeros(255))),
        ("bias's dtype is bfloat16", "float32", dict(bias=torch.zeros(256, dtype=torch.bfloat16))),
        ("bias's device is meta", "cpu", dict(bias=torch.zeros(256, device="meta"))),
        ("n_group is 3", "[1, 2, 4, 8]", dict(n_group=3)),
        ("n_group is 16", "[1, 2, 4, 8]", dict(n_group=16)),
        ("topk_group is 9", "1…8", dict(topk_group=9)),
        ("topk_group is 0", "1…8", dict(topk_group=0)),
        ("top_k is 129", "1…128", dict(top_k=129)),
        ("top_k is 0", "1…128", dict(top_k=0)),
        ("scoring is 'tanh'", "'sigmoid' or 'softmax'", dict(scoring="tanh")),
        ("real's dtype is int32", "bool", dict(real=torch.ones(3, dtype=torch.int32))),
        ("real's shape is [2]", "[3]", dict(real=torch.ones(2, dtype=torch.bool))),
        ("ids_dtype is torch.int16", "int32", dict(ids_dtype=torch.int16)),
    ],
)
def test_what_the_router_does_not_take_it_names(named, accepted, changes):
    arguments = dict(logits=torch.zeros(3, 256), bias=torch.zeros(256), **V3)
    with pytest.raises(OpError) as error:
        route_fused(**{**arguments, **changes})
    assert named in str(error.value) and accepted in str(error.value)
