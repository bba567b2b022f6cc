"""A budget of multiprocessors: what kernels launch under it, that results stay, and that it ends with its block."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from moelab.config import ConfigError
from moelab.ops import activation, block_gemm_hopper, bmm_hopper, grouped_gemm_fp8, mla_triton, multiprocessors
from moelab.ops.bmm import bmm
from moelab.ops.multiprocessors import at_most, budget, num_programs
from tests.ops import grouped_checks
from tests.ops.mla_cases import SCALE, draw

GPU = torch.device("cuda", 0)


@pytest.fixture
def sms(monkeypatch):
    """A GPU of ten, as far as anybody asks."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=10))


def test_how_many(sms):
    assert (num_programs(GPU, 4, 3), multiprocessors.count(GPU), budget()) == (40, 10, None)
    with at_most(6, GPU):
        assert (num_programs(GPU, 4, 3), multiprocessors.count(GPU), budget()) == (24, 6, 6)
        with at_most(None, GPU), at_most(0, GPU):
            assert multiprocessors.count(GPU) == 6
        with at_most(9, GPU):
            assert multiprocessors.count(GPU) == 9
        assert multiprocessors.count(GPU) == 6
        assert multiprocessors.all_of(GPU) == 10
        assert [num_programs(torch.device("cpu"), each, 13) for each in (1, 2, 8)] == [6, 12, 13]
    assert num_programs(torch.device("cpu"), 1, 13) == 13


def test_it_ends_with_its_block_and_is_the_threads_own(sms):
    seen = []
    with pytest.raises(KeyError), at_most(3, GPU):
        other = threading.Thread(target=lambda: seen.append(multiprocessors.count(GPU)))
        other.start()
        other.join()
        raise KeyError
    assert seen == [10] and multiprocessors.count(GPU) == 10


@pytest.mark.parametrize("count", [-1, 11])
def test_what_a_gpu_has_not(sms, count):
    with pytest.raises(ConfigError, match=f"compute_sms is {count}: legal are 1…10, what cuda:0 has; leave it out"):
        with at_most(count, GPU):
            raise AssertionError
    assert budget() is None
    if count < 0:
        with pytest.raises(ConfigError, match="compute_sms is -1: legal are 1 or more"), at_most(count, "cpu"):
            raise AssertionError


class Spy:
    """In a kernel's place: what programs each launch had."""

    def __init__(self, monkeypatch, module, name):
        self.kernel, self.launched = getattr(module, name), []
        monkeypatch.setattr(module, name, self)

    def __getitem__(self, grid):
        def launch(*args, **options):
            total = 1
            for size in grid:
                total *= size
            self.launched.append(total)
            return self.kernel[grid](*args, **options)

        return launch

    def under(self, count, device, run):
        """(result, programs of the only launch)"""
        self.launched.clear()
        with at_most(count, device):
            result = run()
        (programs,) = self.launched
        return result, programs


def test_silu_mul(device, monkeypatch):
    spy = Spy(monkeypatch, activation, "_silu_mul_kernel")
    gate_up = torch.randn(150, 256, device=device, dtype=torch.bfloat16)

    def run():
        return activation.silu_mul_quantize(gate_up)

    (values, scales), programs = spy.under(None, device, run)
    assert programs == (13 if device.type == "cpu" else 150)
    for count in (1, 3):
        (fewer, its_scales), programs = spy.under(count, device, run)
        assert programs == min(8 * count, 13 if device.type == "cpu" else 150)
        assert torch.equal(fewer.view(torch.uint8), values.view(torch.uint8)) and torch.equal(its_scales, scales)


@pytest.mark.parametrize("least", [0, 1])
def test_grouped_gemm(device, monkeypatch, least):
    spy = Spy(monkeypatch, grouped_gemm_fp8, "grouped_kernel")
    rows, weight, counts, mask = grouped_checks.draw("padded", [3, 0, 16, 1], 192, 384, device, 16)
    config = grouped_gemm_fp8.Config(64, 16, 3, 4, 1, least)
    everything = num_programs(device, 1, 3)
    for count in (None, 1, 2):
        out = grouped_checks.poisoned_out(rows, weight)
        out, programs = spy.under(
            count, device,
            lambda out=out: grouped_gemm_fp8.grouped_gemm_fp8(
                rows, weight, counts, out, backend="triton", config=config
            ),
        )  # fmt: skip
        assert programs == (count or everything)
        grouped_checks.assert_product(out, rows, weight, counts, mask)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_mla_keeps_the_budget_it_was_made_under(device, monkeypatch, kv):
    """Its plans and buffers are of that size, and so are those of whoever shares them."""
    from tests.ops.test_mla_decode import assert_close, attend

    heads, kv_lens, q_lens = 12, [300, 4, 0, 129], [2, 1, 1, 3]  # tiles of rows: one of Hopper's, or two
    everything = num_programs(device, 1, 6)
    step = draw(heads, kv_lens, q_lens)
    want = step.exact(kv, device)
    merges = Spy(monkeypatch, mla_triton, "_merge_kernel")
    with at_most(4, device):
        few = mla_triton.TritonDecode(heads, SCALE, 4, 320, 4, device)
    whole = mla_triton.TritonDecode(heads, SCALE, 4, 320, 4, device)
    shares = mla_triton.TritonDecode(heads, SCALE, 4, 320, 4, device, share=few)
    tiles = few.row_tiles
    assert (few.groups, shares.groups, whole.groups) == (4 // tiles, 4 // tiles, everything // tiles)
    for decode in (few, whole, shares):
        for now in (None, 1):
            found, programs = merges.under(now, device, lambda decode=decode: attend(decode, step, kv))
            assert programs == mla_triton.MERGE_PROGRAMS * (4 if decode is few else everything)
            assert_close(*found, want)


def test_parts_wait_for_one_another_only_where_all_have_a_multiprocessor(sms):
    asked = (64, 128, 5, 64, 64, GPU)  # two tiles, five parts of each
    assert block_gemm_hopper.share(*asked) > 0
    with at_most(9, GPU):
        assert block_gemm_hopper.share(*asked) == 0


@pytest.mark.gpu
def test_bmm_on_hopper(gpu, monkeypatch):
    if not bmm_hopper.runs_on(gpu):
        pytest.skip("needs a Hopper GPU")
    spy = Spy(monkeypatch, bmm_hopper, "_wide_kernel")
    heads, tokens = 16, 64 * 40
    x = torch.randn(tokens, heads, 128, device=gpu, dtype=torch.bfloat16)
    weight = torch.randn(heads, 512, 128, device=gpu).to(torch.float8_e4m3fn)
    scales = torch.rand(heads, 4, 1, device=gpu)
    monkeypatch.setattr("moelab.ops.bmm._on_hopper", lambda *_: True)
    want, _ = spy.under(None, gpu, lambda: bmm(x, weight, scales))
    for count in (8, 40):
        out, programs = spy.under(count, gpu, lambda: bmm(x, weight, scales))
        assert heads <= programs <= bmm_hopper.PROGRAMS_PER_SM * count
        assert torch.equal(out, want)


@pytest.mark.gpu
def test_a_graph_keeps_the_grid_of_its_capture(gpu):
    """Replayed after the block, and within another, it gives what it gave."""
    rows, weight, counts, mask = grouped_checks.draw("padded", [3, 0, 16, 1], 192, 384, gpu, 16)
    out = grouped_checks.poisoned_out(rows, weight)
    config = grouped_gemm_fp8.Config(64, 16, 3, 4, 1, 1)

    def run():
        grouped_gemm_fp8.grouped_gemm_fp8(rows, weight, counts, out, backend="triton", config=config)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with at_most(5, gpu):
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        first = out.clone()
        with torch.cuda.graph(graph, stream=stream):
            run()
    for now in (None, 1):
        out.fill_(float("nan"))
        with at_most(now, gpu):
            graph.replay()
        assert torch.equal(out[mask], first[mask])
    grouped_checks.assert_product(out, rows, weight, counts, mask)
