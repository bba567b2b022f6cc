"""Cases and points of the linear op: what they move, and that everybody in a case does the same work."""

from __future__ import annotations

import pytest
import torch

from moelab.bench import linear as bench
from moelab.ops import block_gemm, block_gemm_hopper
from moelab.ops.block_gemm import parse
from moelab.ops.fp8 import dequantize_block
from moelab.ops.layout import dequantize_rows


def test_bytes_and_flops_are_those_of_the_product():
    (case,) = [c for c in bench.linear_cases(True) if dict(c.params) == {"m": 16, "n": 2112, "k": 7168}]
    assert case.bytes == 16 * 7168 + 2112 * 7168 + 2 * 16 * 2112 + 4 * (16 * 56 + 17 * 56)
    assert case.flops == 2 * 16 * 2112 * 7168 and case.compute == "fp8"
    made = case.make(torch.device("cpu"))
    tensors = [*made[0], *made[1], made[2]]
    assert sum(t.numel() * t.element_size() for t in tensors) == case.bytes


def test_the_two_launches_that_merging_saves_give_the_same():
    x, weight, out, _ = inputs = bench._inputs(3, 2112, 7168, torch.device("cpu"))
    q, kv = bench._two_launches(inputs)
    want = (dequantize_rows(*x) @ dequantize_block(*weight).T).bfloat16()
    assert torch.equal(q, want[:, :1536]) and torch.equal(kv, want[:, 1536:])
    assert q.is_contiguous() and kv.is_contiguous() and q.data_ptr() == out.data_ptr()


def test_every_case_has_a_point_with_configs_that_can_be_written():
    shapes = {(c.params["n"], c.params["k"]) for c in bench.linear_cases(False)}
    most = max(c.params["m"] for c in bench.linear_cases(False))
    points = bench.linear_points()
    assert {(p.n, p.k, p.m) for p in points} == {(n, k, m) for n, k in shapes for m in bench.TABLE_TOKENS}
    assert len(points) == len(shapes) * len(bench.TABLE_TOKENS) and max(bench.TABLE_TOKENS) == most
    for point in points:
        ours = [(c.backend, c.config) for c in point.candidates if c.backend != "deep_gemm"]
        assert len(ours) == len(set(ours)) and all(str(parse(config)) == config for _, config in ours)
        assert ours or point.m > bench.MANY


@pytest.mark.parametrize("m", bench.TABLE_TOKENS)
@pytest.mark.parametrize(("n", "k"), bench.SHAPES)
def test_configs_of_a_sweep_fit_an_h200(m, n, k):
    for config in block_gemm_hopper.sweep(m, n, k):
        box = (config.block_n + config.block_m) * 128 + config.block_m * 4
        assert box * config.unroll * config.stages < 227 * 1024
        assert config.block_m >= min(m, 64) and config.split <= k // 512
    if m <= bench.MANY:
        for config in block_gemm.sweep(m, n, k):
            assert (config.block_n + config.block_m) * 128 * config.unroll * config.stages < 227 * 1024
            assert config.block_m >= m and config.split <= k // 512


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; none here")
def test_every_peer_takes_the_shape_and_agrees():
    gpu = torch.device("cuda")
    for case in bench.linear_cases(True):
        x, weight, out, one = case.make(gpu)
        want = dequantize_rows(*x) @ dequantize_block(*weight).T
        for backend, run in case.backends.items():
            out.fill_(float("nan"))
            run((x, weight, out, one))
            assert not out.isnan().any()
            if backend in ("moelab", "triton", "deep_gemm"):
                assert (out.float() - want).norm() < 5e-3 * want.norm()
