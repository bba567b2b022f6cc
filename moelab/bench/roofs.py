"""The roofs that shares are shares of, measured on the GPU at hand by the clock that times the kernels.

- `copy`: GB/s of a large copy on the device by a kernel, bytes read plus bytes written; an H200's datasheet says 4.8
  TB/s. (Captured in a graph, torch's own copy becomes a memcpy node: 2.8 TB/s there, less than kernels reach.)
- `bf16`, `fp8`: TFLOP/s of cuBLAS on 8192³, operands K-major; fp8 with one scale per tensor and fast accumulation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moelab.bench.timer import graph_samples

BENCH = "roofs"
UNITS = {"copy": "GB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s"}
COPY_BYTES = 1 << 30
SIZE = 8192
PARAMS = {"copy": {"bytes": COPY_BYTES}, "bf16": {"size": SIZE}, "fp8": {"size": SIZE}}


def measure(roof: str, device: torch.device) -> tuple[list[float], int]:
    """Samples in UNITS[roof], and how many replays went before them."""
    calls, work, per = {"copy": _copy, "bf16": _bf16, "fp8": _fp8}[roof](device)
    samples = graph_samples(calls)
    return [work / (us * 1e-6) / per for us in samples.us], samples.warmup


Work = tuple[list[Callable[[], object]], float, float]


def _copy(device: torch.device) -> Work:
    source = torch.randint(2**31, (COPY_BYTES // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    calls = [lambda: torch.neg(source, out=target), lambda: torch.neg(target, out=source)]
    return calls, 2 * COPY_BYTES, 1e9


def _operands(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16).to(dtype) for _ in range(2))
    return a, b.T


def _bf16(device: torch.device) -> Work:
    a, b = _operands(device, torch.bfloat16)
    out = torch.empty(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    return [lambda: torch.mm(a, b, out=out)], 2 * SIZE**3, 1e12


def _fp8(device: torch.device) -> Work:
    a, b = _operands(device, torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    call = lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: E731
    return [call], 2 * SIZE**3, 1e12
