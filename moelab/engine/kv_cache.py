"""The paged latent cache: rows of 576 values in pages of 64 tokens, handed out to sequences."""

from __future__ import annotations

import torch

from moelab.config import MoelabError

PAGE_SIZE = 64  # what the Hopper decode kernels want


class PagedCache:
    """`rows` [layers, pages, 64, latent_dim], the same on all TP ranks, and the pages that are free."""

    def __init__(self, layers: int, pages: int, latent_dim: int, dtype: torch.dtype, device: str = "cpu"):
        # NaN, so that a row read before it was written cannot pass for a number.
        self.rows = torch.full((layers, pages, PAGE_SIZE, latent_dim), float("nan"), dtype=dtype, device=device)
        self._free = list(range(pages))

    @property
    def num_pages(self) -> int:
        return self.rows.shape[1]

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
