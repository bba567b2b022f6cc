"""Faults that other engines have shipped, as rules for our kernels: which tests hold each, and the two rules that all
kernels share, held here for every one of them: padding changes no valid row, and −1 goes nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moelab.ops import deep_gemm
from moelab.ops.activation import silu_mul_quantize
from moelab.ops.bmm import bmm
from moelab.ops.fp8 import dequantize_block, quantize_block
from moelab.ops.gather import gather_by_expert
from moelab.ops.grouped_gemm_fp8 import grouped_gemm_fp8
from moelab.ops.layout import FORMATS, empty_scales, segment_starts
from moelab.ops.linear import linear
from moelab.ops.mla_cache import Fp8Cache, read_rows
from moelab.ops.norm import add_rms_norm, rms_norm_quantize
from moelab.ops.quantize import quantize_reference, quantize_rows
from moelab.ops.reduce import reduce_topk
from moelab.ops.rope_append import rope_append
from moelab.ops.router import route_fused
from tests.ops.conftest import INTERPRETING

TESTS = Path(__file__).resolve().parents[1]

# What was reported, publicly, and the tests that would fail if we did it too.
HELD = {
    "routing weights taken from the biased scores: huggingface/transformers#41647": [
        "ops/test_router.py::test_weights_come_from_the_scores_without_bias",
        "ops/test_router.py::test_adding_a_constant_to_all_biases_changes_nothing",
        "ops/test_router.py::test_the_kernel_weighs_by_scores_alone",
    ],
    "masked groups filled with zero: huggingface/transformers#45440, kvcache-ai/ktransformers#1148": [
        "ops/test_router.py::test_no_expert_of_a_dropped_group_is_chosen_when_all_biased_scores_are_negative",
        "ops/test_router.py::test_the_kernel_masks_dropped_groups_below_every_negative_score",
    ],
    "correction bias in bfloat16: sgl-project/sglang#31213, huggingface/transformers#42580, flagos-ai/FlagGems#4244": [
        "model/test_weights.py::test_the_routers_bias_keeps_float32_whatever_the_model_runs_in",
        "ops/test_router.py::test_ids_and_weights_equal_a_float64_oracle",
        "ops/test_router.py::test_a_bias_in_a_narrow_band_far_from_zero_still_decides",
    ],
    "routed scaling applied twice, never, or to the shared expert: vllm-project/vllm#24119, sgl-project/sglang#8511": [
        "model/test_oracle.py::test_moe_is_routed_experts_with_the_weights_plus_the_unscaled_shared_expert",
        "comm/test_exchange.py::test_payloads_scales_and_layouts",
        "engine/test_distributed.py::test_every_cut_writes_the_same_greedy_text",
        "ops/test_engine_cases.py::test_the_experts_of_all_kernels_together_are_scaled_once",
    ],
    "empty context chunk in chunked prefill: vllm-project/vllm#26042, sgl-project/sglang#22688": [
        "ops/test_attention.py::test_merged_chunks_equal_the_whole_with_empty_chunks_among_them",
        "ops/test_attention.py::test_an_empty_chunk_has_lse_minus_infinity_and_no_weight_even_if_it_holds_nan",
        "model/test_oracle.py::test_ragged_batch_with_sequences_at_different_lengths_and_empty_contexts",
        "ops/test_mla_decode.py::test_chunks_merge_by_natural_logarithms",
    ],
    "LSE of the wrong base, and unequal strides, merged: sgl-project/sglang#40903": [
        "ops/test_attention.py::test_the_lse_is_a_natural_logarithm",
        "ops/test_attention.py::test_parts_of_different_strides_merge_alike",
        "ops/test_mla_decode.py::test_chunks_merge_by_natural_logarithms",
    ],
    "layout assumptions of MLA kernels: flashinfer-ai/flashinfer#3219 and #1341": [
        "model/test_oracle.py::test_the_physical_order_of_pages_changes_no_bit",
        "ops/test_mla_decode.py::test_where_pages_lie_does_not_matter",
        "ops/test_rope_append.py::test_in_place_or_beside_the_absorbed_query",
    ],
    "stale plan entries in a reused workspace: flashinfer-ai/flashinfer#5176": [
        "ops/test_mla_decode.py::test_a_captured_graph_follows_the_plans",
    ],
    "plan buffer overwritten before its copy: sgl-project/mini-sglang#103": [
        "ops/test_mla_decode.py::test_a_plan_waits_for_the_copy_of_the_one_before",
    ],
    "padding tokens routed: vllm-project/vllm#38128, #46428, #47785, sgl-project/sglang#25852, ROCm/aiter#4530": [
        "ops/test_router.py::test_padding_is_routed_nowhere",
        "ops/test_gather.py::test_the_kernel_is_a_stable_sort",
        "ops/test_reduce.py::test_the_kernel_adds_in_order",
        "comm/test_exchange.py::test_any_routing_virtual",
        "ops/test_engine_cases.py::test_minus_one_goes_nowhere",
        "ops/test_engine_cases.py::test_the_experts_of_all_kernels_together_are_scaled_once",
    ],
    "uninitialised padding leaks: flashinfer-ai/flashinfer#3650 and #3103, sgl-project/sglang#33106": [
        "ops/test_engine_cases.py::test_what_padding_holds_reaches_no_valid_row",
        "ops/test_rope_append.py::test_nan_in_padding_stays_there",
        "ops/test_mla_decode.py::test_what_unused_rows_and_pages_hold_does_not_matter",
        "ops/test_grouped_gemm_fp8.py::test_kernel",
        "ops/test_linear.py::test_kernel",
        "comm/test_exchange.py::test_payloads_scales_and_layouts",
    ],
}


@pytest.fixture(
    params=[
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("interpreted", marks=pytest.mark.interpreted),
        "reference",
    ]
)
def device(request):
    """As the kernels' tests have it, and the references besides."""
    return request.getfixturevalue("gpu") if request.param == "cuda" else torch.device("cpu")


@pytest.mark.parametrize("fault", HELD)
def test_the_tests_that_hold_a_fault_are_there(fault):
    for name in HELD[fault]:
        file, function = name.split("::")
        assert f"\ndef {function}(" in (TESTS / file).read_text(), name


TOKENS = 11
REAL = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0], dtype=torch.bool)
COUNTS = torch.tensor([3, 0, 5], dtype=torch.int32)  # of experts with room for 5 rows
ROOM = 5


def fp8_rows(*shape, scale_format="row"):
    values, scales = quantize_reference(torch.randn(*shape))
    return values, empty_scales(shape, scale_format, values.device).copy_(scales)


def in_segments(device):
    """Which rows of the contiguous layout are there."""
    mask = torch.zeros(3 * 128, dtype=torch.bool, device=device)
    for start, count in zip(segment_starts(COUNTS).tolist(), COUNTS.tolist(), strict=True):
        mask[start : start + count] = True
    return mask


def in_rooms(device):
    return (torch.arange(ROOM) < COUNTS[:, None]).to(device)


def in_tokens(device):
    return REAL.to(device)


def quantize(scale_format):
    return lambda x: quantize_rows(x, scale_format), in_tokens, [torch.randn(TOKENS, 300)]


def norm(op):
    def run(x, residual, weight):
        residual = residual.clone()
        return op(x, weight, 1e-6, residual), residual

    return run, in_tokens, [torch.randn(TOKENS, 384), torch.randn(TOKENS, 384)], torch.randn(384)


def silu_mul(mask, *shape):
    counts = [] if mask is in_tokens else [COUNTS]
    return lambda x, *rest: silu_mul_quantize(x, *rest, "column_tma"), mask, [torch.randn(*shape, 512)], *counts


def silu_mul_dense():
    return lambda x: silu_mul_quantize(x, scale_format="row"), in_tokens, [torch.randn(TOKENS, 512)]


def router(scoring):
    def run(logits):
        return route_fused(logits, None, top_k=4, n_group=4, topk_group=2, scoring=scoring)

    return run, in_tokens, [torch.randn(TOKENS, 32)]


def grouped(mask, *shape, backend="triton"):
    weight = quantize_block(torch.randn(3, 192, 256))

    def run(values, scales, w, w_scales, counts):
        return grouped_gemm_fp8((values, scales), (w, w_scales), counts, backend=backend)

    return run, mask, list(fp8_rows(*shape, 256, scale_format="column_tma")), *weight, COUNTS


def dense_gemm(scale_format, backend="triton"):
    def run(values, scales, w, w_scales):
        return linear((values, scales), (w, w_scales), backend=backend if values.is_cuda else None)

    weight = quantize_block(torch.randn(192, 256))
    return run, in_tokens, list(fp8_rows(TOKENS, 256, scale_format=scale_format)), *weight


# (op, which rows count, [inputs that have those rows], other inputs …)
ROW_OPS = {
    **{f"quantize_rows, {name}": lambda name=name: quantize(name) for name in FORMATS},
    "add_rms_norm": lambda: norm(add_rms_norm),
    "rms_norm_quantize": lambda: norm(rms_norm_quantize),
    "silu_mul_quantize, dense": silu_mul_dense,
    "silu_mul_quantize, padded": lambda: silu_mul(in_rooms, 3, ROOM),
    "silu_mul_quantize, contiguous": lambda: silu_mul(in_segments, 3 * 128),
    "route_fused, sigmoid": lambda: router("sigmoid"),
    "route_fused, softmax": lambda: router("softmax"),
    "linear, row": lambda: dense_gemm("row"),
    "linear, column_tma": lambda: dense_gemm("column_tma"),
    "bmm": lambda: (
        bmm, in_tokens, [torch.randn(TOKENS, 2, 128).bfloat16()], *quantize_block(torch.randn(2, 128, 128)),
    ),
    "grouped_gemm_fp8, padded": lambda: grouped(in_rooms, 3, ROOM),
    "grouped_gemm_fp8, contiguous": lambda: grouped(in_segments, 3 * 128),
    "DeepGEMM, linear": lambda: dense_gemm("column_tma", backend="deep_gemm"),
    "DeepGEMM, contiguous": lambda: grouped(in_segments, 3 * 128, backend="deep_gemm"),
}  # fmt: skip


def flat(results):
    for result in results if isinstance(results, (tuple, list)) else (results,):
        yield from flat(result) if isinstance(result, tuple) else (result,)


def bits(tensor):
    """float8 as bytes, for torch compares no float8 on every device."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@pytest.mark.parametrize("name", ROW_OPS)
def test_what_padding_holds_reaches_no_valid_row(device, name):
    """flashinfer-ai/flashinfer#3650 and #3103, sgl-project/sglang#33106: rows and scales that nobody initialised put
    NaN into valid rows. Here the rows beside the valid ones hold numbers, then NaN; no bit of a valid row changes."""
    if name.startswith("DeepGEMM") and (device.type == "cpu" or deep_gemm.reason() is not None):
        pytest.skip(f"DeepGEMM: {deep_gemm.reason() or 'the tensors are on the CPU'}")
    with device:  # whatever is drawn
        op, mask, rows, *others = ROW_OPS[name]()
    mask, others = mask(device), [t.to(device) for t in others]
    clean = list(flat(op(*rows, *others)))
    for tensor in rows:
        spoilt = tensor.float().masked_fill(~mask.view(*mask.shape, *[1] * (tensor.dim() - mask.dim())), float("nan"))
        tensor.copy_(spoilt.to(tensor.dtype))
        assert tensor.float().isnan().any()
    for before, after in zip(clean, flat(op(*rows, *others)), strict=True):
        assert torch.equal(bits(before)[mask], bits(after)[mask])
        assert not (before.is_floating_point() and before[mask].float().isnan().any())


def test_minus_one_goes_nowhere(device):
    """vllm-project/vllm#47785 read expert_map[−1]. Wherever an op takes a place, −1 is none: of an expert, a row or a
    slot. What belongs to it may be NaN."""
    ids = torch.tensor([[2, -1], [-1, -1], [0, 2]], dtype=torch.int32, device=device)
    counts, offsets, permutation = gather_by_expert(ids, 3)
    assert counts.tolist() == [1, 0, 2] and offsets.tolist() == [0, 1, 1, 3]
    assert permutation.tolist() == [4, 0, 5, 1, 2, 3]

    y = torch.randn(3, 40, device=device)
    weights = torch.rand(3, 2, device=device).masked_fill(ids < 0, float("nan"))
    out = reduce_topk(y, ids, weights)
    assert torch.equal(out[0], weights[0, 0] * y[2]) and torch.equal(out[1], torch.zeros_like(out[1]))

    slots = torch.tensor([70, -1, 3], device=device)
    q_pe, k_pe, latent = (torch.randn(3, *shape, device=device).bfloat16() for shape in ((2, 64), (64,), (512,)))
    cos, sin = torch.rand(2, 3, 32, device=device)
    for tensor in (q_pe, k_pe, latent, cos, sin):
        tensor[1] = float("nan")
    for cache in (torch.full((2, 64, 576), 7.0, device=device).bfloat16(), Fp8Cache.empty(2, device)):
        if isinstance(cache, Fp8Cache):
            cache.values.view(torch.uint8).zero_(), cache.scales.fill_(1.0), cache.rope.zero_()
        untouched = torch.ones(128, dtype=torch.bool, device=device)
        untouched[slots[slots >= 0]] = False
        places = torch.arange(128, device=device)
        before = read_rows(cache, places)
        rope_append(q_pe, latent, k_pe, cos, sin, slots, cache)
        after = read_rows(cache, places)
        assert torch.equal(after[untouched], before[untouched])
        assert (after[~untouched] != before[~untouched]).any(1).all() and not after.isnan().any()


def test_the_experts_of_all_kernels_together_are_scaled_once(device):
    """vllm-project/vllm#24119 and #45037, sgl-project/sglang#8511: router, experts and combine disagreed over who
    multiplies by the routed scaling factor. From logits to the sum through every kernel of ours,

        out = 2.5 · Σ_k ŵ_k · down(silu(gate(x)) · up(x)),    Σ ŵ = 1

    with padding behind the tokens that holds NaN, goes nowhere and comes back as zeros."""
    tokens, real, experts, hidden, width = 9, 7, 4, 128, 128
    x = torch.randn(tokens, hidden).bfloat16()
    logits, bias = torch.randn(tokens, experts), torch.rand(experts)
    gate_up, down = (
        quantize_block(torch.randn(experts, *shape) / 11) for shape in ((2 * width, hidden), (hidden, width))
    )

    scores = logits.double().sigmoid()
    chosen = (scores + bias).topk(2).indices
    share = scores.gather(-1, chosen) / scores.gather(-1, chosen).sum(-1, keepdim=True)
    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(real):
        for expert, part in zip(chosen[token].tolist(), share[token], strict=True):
            gate, up = (dequantize_block(gate_up[0][expert], gate_up[1][expert]).double() @ x[token].double()).chunk(2)
            inner = gate * gate.sigmoid() * up
            want[token] += 2.5 * part * (dequantize_block(down[0][expert], down[1][expert]).double() @ inner)

    x[real:] = logits[real:] = float("nan")
    x, logits, bias = x.to(device), logits.to(device), bias.to(device)
    gate_up, down = ([t.to(device) for t in pair] for pair in (gate_up, down))
    is_real = torch.arange(tokens, device=device) < real
    ids, weights = route_fused(logits, bias, top_k=2, scale=2.5, real=is_real)
    counts, offsets, permutation = gather_by_expert(ids, experts)
    assert counts.sum() == real * 2
    starts = segment_starts(counts)
    rows = torch.full((experts * 128, hidden), float("nan"), dtype=torch.bfloat16, device=device)
    row_of = torch.full((tokens * 2,), -1, dtype=torch.int64, device=device)
    for expert in range(experts):
        slots = permutation[offsets[expert] : offsets[expert + 1]].long()
        places = starts[expert] + torch.arange(len(slots), device=device)
        rows[places], row_of[slots] = x[slots // 2], places
    inner = grouped_gemm_fp8(quantize_rows(rows, "column_tma"), tuple(gate_up), counts, backend="triton")
    act = silu_mul_quantize(inner, counts, "column_tma")
    out = reduce_topk(grouped_gemm_fp8(act, tuple(down), counts, backend="triton"), row_of.view(tokens, 2), weights)

    error = (out[:real].double().cpu() - want[:real]).norm() / want.norm()
    assert error < (0.12 if INTERPRETING else 0.05), "FP8 costs some 3 %; a factor forgotten or doubled 60 % or more"
    assert torch.equal(out[real:], torch.zeros_like(out[real:]))
