"""DeepGEMM's wrapper: it says why it cannot be used; where it can, its kernels agree with float64."""

from __future__ import annotations

import importlib.machinery
import importlib.util

import pytest
import torch

from moelab.ops import deep_gemm
from moelab.ops.deep_gemm import DeepGemmError
from moelab.ops.fp8 import dequantize_block, quantize_block
from moelab.ops.layout import dequantize_rows
from moelab.ops.multiprocessors import at_most
from moelab.ops.quantize import quantize_rows


@pytest.fixture(autouse=True)
def fresh():
    caches = (deep_gemm.reason, deep_gemm._library, deep_gemm._masked)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def installed(monkeypatch, there: bool, capability=(9, 0)):
    spec = importlib.machinery.ModuleSpec("deep_gemm", None) if there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def test_not_installed(monkeypatch):
    installed(monkeypatch, False)
    assert "not installed" in deep_gemm.reason() and "pip install 'moelab[gpu]'" in deep_gemm.reason()
    with pytest.raises(DeepGemmError, match="not installed"):
        deep_gemm.gemm(None, None, None)
    with pytest.raises(DeepGemmError, match="not installed"):
        deep_gemm.grouped_masked(None, None, None, None, 1)


@pytest.mark.parametrize(("capability", "said"), [(None, "sees none here"), ((10, 0), "a GPU has 10.0")])
def test_not_on_this_gpu(monkeypatch, capability, said):
    installed(monkeypatch, True, capability)
    assert said in deep_gemm.reason()


@pytest.mark.parametrize("error", [ImportError("libcudart.so.13: no such file"), AssertionError("no CUDA home")])
def test_an_import_that_fails_is_quoted(monkeypatch, error):
    installed(monkeypatch, True)

    def fails(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", fails)
    assert str(error) in deep_gemm.reason() and "pip install" in deep_gemm.reason()


@pytest.mark.parametrize(
    ("names", "usable"),
    [
        (("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_masked"), True),
        (("fp8_gemm_nt", "fp8_m_grouped_gemm_nt_masked"), True),
        (("fp8_gemm_nt",), False),
        ((), False),
    ],
)
def test_the_masked_kernel_under_either_name(monkeypatch, names, usable):
    installed(monkeypatch, True)

    class Library:
        def set_pdl(self, on):
            assert on

        def set_num_sms(self, count):
            told.append(count)

    for name in names:
        setattr(Library, name, staticmethod(lambda *args, name=name: seen.append((name, args))))
    seen, told = [], []
    monkeypatch.setattr(importlib, "import_module", lambda name: Library())
    assert (deep_gemm.reason() is None) == usable
    if usable:
        assert deep_gemm.grouped_masked(1, 2, 3, 4, 5) == 3
        assert seen == [(names[1], (1, 2, 3, 4, 5))] and told == [0]
        for budget, count in ((1, 2), (8, 8), (99, 98)):  # an even number, or it refuses
            with at_most(budget, "cpu"):
                deep_gemm.grouped_masked(1, 2, 3, 4, 5)
            deep_gemm.grouped_masked(1, 2, 3, 4, 5)
            assert told[-2:] == [count, 0]


@pytest.fixture
def usable(gpu):
    if why := deep_gemm.reason():
        pytest.skip(why)
    return gpu


def pair(device, *shape):
    return quantize_block(torch.randn(*shape, device=device))


def rows_pair(device, *shape):
    values, scales = zip(*(quantize_rows(torch.randn(*shape[-2:], device=device), "column_tma")
                           for _ in range(shape[0] if len(shape) == 3 else 1)), strict=True)  # fmt: skip
    if len(shape) == 2:
        return values[0], scales[0]
    return torch.stack(values), torch.stack([s.mT.contiguous() for s in scales]).mT


def exact(rows, weight):
    return dequantize_rows(*rows).double() @ dequantize_block(*weight).double().mT


def assert_close(got, want):
    assert (got.double() - want).norm() <= 5e-3 * want.norm()


@pytest.mark.gpu
def test_gemm(usable):
    x, weight = rows_pair(usable, 40, 512), pair(usable, 320, 512)
    out = torch.full((40, 320), float("nan"), dtype=torch.bfloat16, device=usable)
    assert deep_gemm.gemm(x, weight, out) is out
    assert_close(out, exact(x, weight))


@pytest.mark.gpu
def test_grouped_masked(usable):
    rows, weight = rows_pair(usable, 3, 128, 512), pair(usable, 3, 256, 512)
    counts = torch.tensor([5, 0, 128], dtype=torch.int32, device=usable)
    out = torch.full((3, 128, 256), float("nan"), dtype=torch.bfloat16, device=usable)
    assert deep_gemm.grouped_masked(rows, weight, out, counts, 44) is out
    want = exact(rows, weight)
    for expert, count in enumerate(counts.tolist()):
        if count:
            assert_close(out[expert, :count], want[expert, :count])


@pytest.mark.gpu
def test_grouped_contiguous(usable):
    rows, weight = rows_pair(usable, 384, 512), pair(usable, 3, 256, 512)
    expert = torch.tensor([0, 2, 1], dtype=torch.int32, device=usable).repeat_interleave(128)
    out = torch.full((384, 256), float("nan"), dtype=torch.bfloat16, device=usable)
    assert deep_gemm.grouped_contiguous(rows, weight, out, expert) is out
    for segment, e in enumerate((0, 2, 1)):
        part = slice(128 * segment, 128 * segment + 128)
        assert_close(out[part], exact((rows[0][part], rows[1][part]), (weight[0][e], weight[1][e])))
