"""The paged latent cache of one layer, as the decode kernels read it: in bfloat16, or in FP8 with scales.

A token's row is its latent, 512 values after the norm, and k_pe, 64 values after RoPE; a page holds 64 rows, one after
another, and the pages of a sequence lie anywhere. Two forms:

- bfloat16: one tensor [pages, 64, 576], latent first; 1152 bytes a token. It is what the engine's paged cache holds for
  a layer.
- FP8: the latent in e4m3 with one float32 scale for each 128 values, value = fp8 · scale, the scales made as those of
  activations (`moelab.ops.quantize`); k_pe stays bfloat16, since its few values carry the positions. In three tensors,
  [pages, 64, 512], [pages, 64, 4] and [pages, 64, 64], 512 + 16 + 128 = 656 bytes a token (FlashMLA's count). Three and
  not one buffer of bytes, so that each can be fetched by TMA in its own type.

A slot is a row's number over all pages: page · 64 + row. Rows that no token has are never read for values: they may
hold anything, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.ops.checks import check_tensor, require
from moelab.ops.fp8 import BLOCK
from moelab.ops.quantize import quantize_reference

PAGE_SIZE = 64
LATENT_DIM = 512
ROPE_DIM = 64
ROW_DIM = LATENT_DIM + ROPE_DIM
NUM_SCALES = LATENT_DIM // BLOCK


@dataclass(frozen=True)
class Fp8Cache:
    """The FP8 form: `values` float8_e4m3fn [pages, 64, 512], `scales` float32 [pages, 64, 4], `rope` bfloat16
    [pages, 64, 64], all contiguous."""

    values: Tensor
    scales: Tensor
    rope: Tensor

    @classmethod
    def empty(cls, pages: int, device: torch.device | str) -> Fp8Cache:
        """Uninitialised."""
        values = torch.empty(pages, PAGE_SIZE, LATENT_DIM, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(pages, PAGE_SIZE, NUM_SCALES, dtype=torch.float32, device=device)
        return cls(values, scales, torch.empty(pages, PAGE_SIZE, ROPE_DIM, dtype=torch.bfloat16, device=device))

    @classmethod
    def from_rows(cls, rows: Tensor) -> Fp8Cache:
        """rows [pages, 64, 576] of any float dtype -> the same rows, quantised by plain torch."""
        latent, rope = rows.split([LATENT_DIM, ROPE_DIM], dim=-1)
        values, scales = quantize_reference(latent)
        return cls(values, scales, rope.to(torch.bfloat16).contiguous())


LatentCache = Tensor | Fp8Cache


def check_cache(cache: LatentCache, like: Tensor | None = None) -> None:
    """OpError unless it is one of the two forms, contiguous, on `like`'s device."""
    if isinstance(cache, Fp8Cache):
        parts = (
            ("cache.values", cache.values, LATENT_DIM, torch.float8_e4m3fn),
            ("cache.scales", cache.scales, NUM_SCALES, torch.float32),
            ("cache.rope", cache.rope, ROPE_DIM, torch.bfloat16),
        )
    else:
        parts = (("cache", cache, ROW_DIM, torch.bfloat16),)
    for name, tensor, width, dtype in parts:
        check_tensor(name, tensor, ("pages", PAGE_SIZE, width), (dtype,), like)
        require(tensor.is_contiguous(), f"{name}'s strides", tensor.stride(), "contiguous pages")
    if isinstance(cache, Fp8Cache):
        pages = [len(cache.values), len(cache.scales), len(cache.rope)]
        require(len(set(pages)) == 1, "cache's pages", pages, "as many of values as of scales and rope")


def read_rows(cache: LatentCache, slots: Tensor) -> Tensor:
    """Rows at slots [N] int -> float32 [N, 576]; of a bfloat16 cache of any width its rows as they are."""
    if not isinstance(cache, Fp8Cache):
        return cache.flatten(0, 1)[slots].float()
    values = cache.values.flatten(0, 1)[slots].float().unflatten(-1, (NUM_SCALES, BLOCK))
    latent = (values * cache.scales.flatten(0, 1)[slots][..., None]).flatten(-2)
    return torch.cat((latent, cache.rope.flatten(0, 1)[slots].float()), dim=-1)
