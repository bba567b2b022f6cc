"""MLA decode by FlashInfer: its BatchMLAPagedAttentionWrapper with the Hopper kernel ("fa3"), as 0.6.9 has it.

What that version does, read in its source, and what is made of it here:

- The cache is two tensors, latent [pages, page, 512] and k_pe [pages, page, 64], each with strides of its own for pages
  and rows: the two are views of one [pages, 64, 576].
- `plan` reads the lengths on the host, fills one pinned buffer and copies it asynchronously: the next plan must wait
  for that copy, else the kernels of this step would read its numbers.
- Under CUDA graphs its index buffers must be the caller's and the batch fixed: sequences beyond those of a plan are
  given as q_len 0.
- Its logarithms are of base 2 unless `return_lse_base_on_e` is set. It is, always. Where there is no key they are
  −34,656, from the −5·10⁴ it puts for −infinity, and would have weight in a merge with another such: they are made
  −infinity, by a launch of its own, made only where logarithms are asked for.
- Rows beyond kv_len are not fetched but filled with zeros.
- No scales: the FP8 form is refused.
- Its plan takes all multiprocessors of the device, whatever `moelab.ops.multiprocessors` says.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from moelab.config import MoelabError
from moelab.ops.checks import require
from moelab.ops.mla_cache import LATENT_DIM, PAGE_SIZE, ROPE_DIM, Fp8Cache, LatentCache
from moelab.ops.mla_decode import MlaDecode, num_pages

FIX = "on a Hopper GPU with CUDA 13: pip install 'moelab[gpu]', which has it as flashinfer-python"
NO_KEY = -3e4  # a logarithm from here on down means that there was no key
WORKSPACE_BYTES = 128 << 20  # what FlashInfer advises, for partial sums


class FlashInferError(MoelabError):
    """FlashInfer was asked for and cannot be used here."""


def reason(device: torch.device | str = "cuda") -> str | None:
    """Why FlashInfer cannot serve `device`, with the fix; None if it can."""
    device = torch.device(device)
    if importlib.util.find_spec("flashinfer") is None:
        return f"flashinfer is not installed; {FIX}"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"flashinfer needs a Hopper GPU, not {device}; `moelab doctor` says what there is"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return f"flashinfer's MLA kernel is used on Hopper only, not on {torch.cuda.get_device_name(device)}"
    return None


class FlashInferDecode(MlaDecode):
    """`MlaDecode`. The first plan in a process compiles FlashInfer's kernel, some 20 s, unless its cache has it. Raises
    FlashInferError with `reason` where there is one."""

    def __init__(
        self,
        num_heads: int,
        scale: float,
        max_batch: int,
        max_kv_len: int,
        max_q_len: int = 1,
        device: torch.device | str = "cuda",
        share: FlashInferDecode | None = None,
    ):
        super().__init__(num_heads, scale, max_batch, max_kv_len, max_q_len, device, share)
        if why := reason(self.device):
            raise FlashInferError(why)
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        ints = functools.partial(torch.zeros, dtype=torch.int32, device=self.device)
        self.workspace = (
            share.workspace if share else torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=self.device)
        )
        self._wrapper = BatchMLAPagedAttentionWrapper(
            self.workspace,
            use_cuda_graph=True,
            qo_indptr=ints(max_batch + 1),
            kv_indptr=ints(max_batch + 1),
            kv_indices=ints(max_batch * self.max_pages),
            kv_len_arr=ints(max_batch),
            backend="fa3",
        )
        self._pages = torch.empty(max_batch * self.max_pages, dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()

    def _planned(self, page_table: Tensor) -> None:
        self._copied.synchronize()
        counts = [num_pages(n) for n in self.kv_lens]
        used = torch.arange(page_table.shape[1]) < torch.tensor(counts)[:, None]
        pages = self._pages[: sum(counts)].copy_(page_table[used])  # pinned: a larger copy would wait for the GPU
        self._wrapper.plan(
            self._starts(self.q_lens),
            self._starts(counts),
            pages,
            self._padded(self.kv_lens),
            self.num_heads,
            LATENT_DIM,
            ROPE_DIM,
            PAGE_SIZE,
            True,  # causal
            self.scale,
            torch.bfloat16,
            torch.bfloat16,
        )
        self._copied.record()

    def _run(self, q_latent: Tensor, q_pe: Tensor, cache: LatentCache, out: Tensor, lse: Tensor | None) -> None:
        require(not isinstance(cache, Fp8Cache), "cache", "in FP8 with scales", "bfloat16; TritonDecode takes FP8")
        self._wrapper.run(
            q_latent, q_pe, cache[..., :LATENT_DIM], cache[..., LATENT_DIM:], out=out, lse=lse,
            return_lse=lse is not None, return_lse_base_on_e=True,
        )  # fmt: skip
        if lse is not None:
            torch.nn.functional.threshold_(lse, NO_KEY, float("-inf"))

    def _padded(self, values: list[int]) -> Tensor:
        return torch.tensor(values + [0] * (self.max_batch - len(values)), dtype=torch.int32)

    def _starts(self, counts: list[int]) -> Tensor:
        starts = torch.zeros(self.max_batch + 1, dtype=torch.int32)
        starts[1:] = self._padded(counts).cumsum(0)
        return starts
