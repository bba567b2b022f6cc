"""The paged latent cache: rows of 576 values in pages of 64 tokens, handed out to sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moelab.config import MoelabError
from moelab.ops.mla_cache import PAGE_SIZE, Fp8Cache, LatentCache

LayerCaches = Sequence[LatentCache]  # of each layer; a tensor [layers, pages, 64, latent_dim] is one


class PagedCache:
    """`rows`, a cache for each layer, the same on all TP ranks, and the pages that are free.

    In `dtype` it is one tensor [layers, pages, 64, latent_dim]; in float8_e4m3fn, which is for a latent of 512 values
    and 64 of RoPE, it has scales (`moelab.ops.mla_cache`).
    """

    def __init__(self, layers: int, pages: int, latent_dim: int, dtype: torch.dtype, device: str = "cpu"):
        self.num_pages = pages
        self.rows: LayerCaches
        # NaN, so that a row read before it was written cannot pass for a number.
        if dtype == torch.float8_e4m3fn:
            self.rows = [Fp8Cache.empty(pages, device) for _ in range(layers)]
            for layer in self.rows:
                layer.values.view(torch.uint8).fill_(0x7F)  # e4m3's NaN
                layer.scales.fill_(float("nan"))
                layer.rope.fill_(float("nan"))
        else:
            self.rows = torch.full((layers, pages, PAGE_SIZE, latent_dim), float("nan"), dtype=dtype, device=device)
        self._free = list(range(pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_tokens: int) -> list[int] | None:
        """Pages for `num_tokens` rows, or None while too few are free. More than there are at all is an error."""
        count = pages_for(num_tokens)
        if count > self.num_pages:
            raise MoelabError(
                f"a sequence of {num_tokens} tokens needs {count} cache pages of {PAGE_SIZE}, there are "
                f"{self.num_pages}: shorten it or give the engine more pages"
            )
        if count > self.num_free:
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(pages)


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
