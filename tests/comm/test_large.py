"""Sizes of DeepSeek-V3, and many ranks on one GPU; small ones in the emulation, so that the test itself is tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from moelab.comm import AllToAll, Nvshmem
from moelab.comm.spec import ExchangeSpec
from moelab.config import ParallelConfig
from tests.comm import oracle
from tests.conftest import SEED
from tests.pool import Rank


def exchange(rank: Rank, spec: ExchangeSpec, tokens: int, options: dict, seed: int) -> None:
    """Two fused exchanges with these options of `Nvshmem`."""
    group = rank.groups[spec.parallel.ep]
    group = group if isinstance(group, Nvshmem) else Nvshmem(group)
    arguments = dataclasses.asdict(spec) | {"parallel": spec.parallel}
    mine = rank.index // spec.parallel.tp
    group, returns = dataclasses.replace(group, **options), options.get("returns", "rows")
    with AllToAll(**arguments, group=group, device=rank.device, timeout_s=20) as a2a:
        for round_ in range(2):
            inputs = oracle.draw(spec, tokens, seed + round_, rank.device)
            h, rows, row_scales, counts = a2a.dispatch(*inputs.of(mine))
            a2a.check()
            oracle.check_received(spec, rank.index, inputs, rows, row_scales, counts, h.starts)
            y = oracle.outputs(spec, rank.index, rows, counts, h.starts)
            out = torch.full(inputs.x[mine].shape, torch.nan, device=rank.device)
            a2a.combine(h, y, out)
            a2a.check()
            want, magnitude = oracle.expected(inputs, mine)
            if returns == "rows":
                assert torch.equal(out, want)
            elif returns == "f32":
                assert ((out - want).abs() <= (spec.top_k + 2) * 2.0**-23 * magnitude).all()
            else:
                assert ((out - want).abs() <= 2.0**-8 * 1.01 * magnitude).all()
            del inputs, y, out, want, magnitude, rows, row_scales


def spec_of(pool, ep: int, max_tokens: int, **options) -> ExchangeSpec:
    small = pool.kind.startswith("emulated")
    sizes = dict(num_experts=32, top_k=4, hidden=256) if small else dict(num_experts=256, top_k=8, hidden=7168)
    return ExchangeSpec(ParallelConfig(ep, 1), max_tokens=max_tokens, payload="fp8", slots=1, **sizes | options)


def check(pool, spec: ExchangeSpec, tokens: int, how: Callable[..., None] = exchange, **options) -> None:
    if spec.parallel.ep not in pool.sizes:
        pytest.skip(f"a pool of {pool.size} {pool.kind} ranks has no group of {spec.parallel.ep}")
    pool.run(how, spec, tokens, options, SEED + 17, ranks=spec.parallel.ep)


@pytest.mark.parametrize("returns", ["rows", "f32", "bf16"])
def test_a_decode_batch(kernel_pool, returns):
    tokens = 9 if kernel_pool.kind.startswith("emulated") else 128
    spec = spec_of(kernel_pool, kernel_pool.up_to(8), tokens, scales="column_tma")
    check(kernel_pool, spec, tokens, returns=returns)


@pytest.mark.parametrize("packets", [True, False])
@pytest.mark.parametrize("num_blocks, send_blocks", [(1, 0), (3, 1), (5, 4)])
def test_any_number_of_blocks_and_some_that_only_send(kernel_pool, num_blocks, send_blocks, packets):
    spec = spec_of(kernel_pool, kernel_pool.up_to(4), 20, hidden=256)
    check(kernel_pool, spec, 17, num_blocks=num_blocks, send_blocks=send_blocks, packets=packets)


def with_blocks_of_its_own(rank: Rank, spec: ExchangeSpec, tokens: int, options: dict, seed: int) -> None:
    exchange(rank, spec, tokens, options | {"num_blocks": (3, 1, 5, 2)[rank.index]}, seed)


@pytest.mark.parametrize("returns", ["rows", "bf16"])
@pytest.mark.parametrize("packets", [True, False])
def test_ranks_may_differ_in_their_blocks(kernel_pool, packets, returns):
    spec = spec_of(kernel_pool, kernel_pool.up_to(4), 20, hidden=256)
    check(kernel_pool, spec, 17, with_blocks_of_its_own, packets=packets, returns=returns)


@pytest.mark.gpu
@pytest.mark.parametrize("ep", [16, 32])
def test_many_ranks_on_one_gpu(kernel_pool, ep):
    check(kernel_pool, spec_of(kernel_pool, ep, 32), 32)


@pytest.mark.parametrize("returns", ["rows", "bf16"])
def test_a_prefill_batch(kernel_pool, returns):
    tokens = 70 if kernel_pool.kind.startswith("emulated") else 4096
    spec = spec_of(kernel_pool, kernel_pool.up_to(4), tokens, layout="contiguous_128")
    check(kernel_pool, spec, tokens, returns=returns)
