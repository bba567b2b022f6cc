"""MLA decode on Hopper: which GPUs, and the launch of the kernel in `moelab.ops.mla_hopper_kernel`.

What is fetched by TMA is described by tensor maps that are made at each call, and copied into the launch: a captured
graph keeps those of its capture. The kernel is set up early (`moelab.ops.early_launch`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moelab.ops.mla_cache import LATENT_DIM, PAGE_SIZE, ROPE_DIM, Fp8Cache, LatentCache
from moelab.ops.mla_hopper_kernel import decode_kernel, gl

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # then `runs_on` says no
    TensorDescriptor = None

ROWS = 64  # of queries, a program


def runs_on(device: torch.device) -> bool:
    """Compute capability 9.0 and a Triton with Gluon."""
    return gl is not None and device.type == "cuda" and _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def launch(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: LatentCache,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    steps: tuple[Tensor, ...],
    max_pages: int,
    factor: float,
    num_heads: int,
    row_tiles: int,
    programs: int,
) -> None:
    """outputs: out, lse, partial, partial_lse; steps: the parts of the plan in the kernel's order."""
    out = outputs[0]
    fp8 = isinstance(cache, Fp8Cache)
    if fp8:
        values, scales, rope = cache.values, cache.scales, _tiles(cache.rope.flatten(0, 1), ROPE_DIM)
        latent = rope  # not used
    else:
        values, scales, rows = cache, outputs[1], cache.flatten(0, 1)  # the first two not used
        latent, rope = _tiles(rows, LATENT_DIM), _tiles(rows, ROPE_DIM)
    decode_kernel[(programs,)](
        _tiles(q_latent.flatten(0, 1), LATENT_DIM), _tiles(q_pe.flatten(0, 1), ROPE_DIM), latent, rope, values, scales,
        *outputs, *steps, max_pages, out.stride(0), out.stride(1), factor,
        FP8=fp8, HEADS=num_heads, ROW_TILES=row_tiles, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _tiles(matrix: Tensor, width: int) -> Any:
    """Blocks of 64 rows of a matrix, `width` columns of it, to be fetched by TMA; zeros beyond its end."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [PAGE_SIZE, width], layout)
