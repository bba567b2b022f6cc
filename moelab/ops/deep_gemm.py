"""DeepGEMM behind one small module: whether it can be used here, and its kernels under names that stay.

It is optional (package sgl-deep-gemm, module `deep_gemm`) and imported at first use, never by importing this module. It
compiles a kernel for each (N, K), choice of tile and number of multiprocessors (`moelab.ops.multiprocessors`) when it
is first called, 3 to 6 s, into DG_JIT_CACHE_DIR.

Everywhere a pair is (float8_e4m3fn values, float32 scales): activations with a scale for 1 × 128 values in the
`column_tma` format (`moelab.ops.layout`; row-major scales work too, but cost a transposing launch at every call),
weights [..., N, K] with contiguous scales [..., ⌈N/128⌉, ⌈K/128⌉]. `out` is bfloat16, contiguous. Arguments are checked
by the ops that call this, and counts never leave the device. Pairs mean on Hopper what they say here; on Blackwell
DeepGEMM wants other scales, so `reason` refuses every GPU but Hopper.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from moelab.config import MoelabError
from moelab.ops import multiprocessors

FIX = "on a Hopper GPU with CUDA 13: pip install 'moelab[gpu]', which has it as sgl-deep-gemm"
MASKED = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")  # the second in releases before 2.6

Pair = tuple[Tensor, Tensor]


class DeepGemmError(MoelabError):
    """DeepGEMM was asked for and cannot be used here."""


@functools.cache
def reason() -> str | None:
    """Why DeepGEMM cannot be used on the current GPU, with the fix; None if it can. Imports it when first asked."""
    if importlib.util.find_spec("deep_gemm") is None:
        return f"deep_gemm is not installed; {FIX}"
    if not torch.cuda.is_available():
        return "deep_gemm needs a Hopper GPU, and torch sees none here; `moelab doctor` says what is missing"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is not None or capability[0] != 9:
        name = torch.cuda.get_device_name()
        return f"deep_gemm is used on Hopper only (capability 9.x); {name} has {capability[0]}.{capability[1]}"
    try:
        library = importlib.import_module("deep_gemm")
    except (ImportError, AssertionError, OSError, RuntimeError) as error:  # it asserts that there is a CUDA toolkit
        return f"deep_gemm is installed, but its import fails: {type(error).__name__}: {error}; {FIX}"
    if not hasattr(library, "fp8_gemm_nt") or not any(hasattr(library, name) for name in MASKED):
        return f"the installed deep_gemm lacks the FP8 kernels (PyPI's deep-gemm 1.0.0 is a placeholder); {FIX}"
    return None


def gemm(x: Pair, weight: Pair, out: Tensor) -> Tensor:
    """x [M, K], weight [N, K], out [M, N] = x · weightᵀ; returns `out`. M > 0. Raises DeepGemmError where `reason`."""
    _ready().fp8_gemm_nt(x, weight, out, compiled_dims="nk")
    return out


def grouped_masked(rows: Pair, weight: Pair, out: Tensor, counts: Tensor, expected_m: int) -> Tensor:
    """rows [G, M, K], weight [G, N, K], counts int32 [G] on the device: the first counts[g] rows of out [G, M, N] are
    written, those of the tile in which they end hold undefined values, later ones stay. `expected_m` > 0: a guess at
    the mean count, for the choice of tiles; a wrong one costs time only. Returns `out`."""
    _ready()
    _masked()(rows, weight, out, counts, expected_m)
    return out


def grouped_contiguous(rows: Pair, weight: Pair, out: Tensor, expert_of_row: Tensor) -> Tensor:
    """rows [M, K], weight [G, N, K], out [M, N]; `expert_of_row` int32 [M]: the expert of each row, −1 on padding.
    An expert's segment begins at a multiple of 128 rows and no tile of 128 holds two experts. M > 0. Returns `out`."""
    _ready().m_grouped_fp8_gemm_nt_contiguous(rows, weight, out, expert_of_row)
    return out


@functools.cache
def _library() -> ModuleType:
    """The module, set up. Programmatic dependent launch, off by default, lets its kernels be placed while the kernel
    before them ends; they wait for it before they read (`moelab.ops.early_launch`). It took 0.2 to 0.6 µs off a GEMM
    on an H200."""
    if why := reason():
        raise DeepGemmError(why)
    library = importlib.import_module("deep_gemm")
    library.set_pdl(True)
    return library


def _ready() -> ModuleType:
    """The module, told how many multiprocessors it may take. What it was told is one number for the whole process, so
    every launch tells it: 0 is all, an odd number it refuses."""
    library, budget = _library(), multiprocessors.budget()
    library.set_num_sms(0 if budget is None else max(2, budget // 2 * 2))
    return library


@functools.cache
def _masked() -> Callable[..., None]:
    library = _library()
    return next(getattr(library, name) for name in MASKED if hasattr(library, name))
