"""Cases of MLA decode: one layer's attention of a step, all sequences equally long, pages shuffled.

FLOP: 2·(576 + 512) per query, cached row and head, causality of the few new tokens neglected; bytes: the cached rows
once, queries and output. With 128 heads a Hopper GPU is bound by FLOP, with 16 by bytes. The plan, made once a step
for all layers, is not in the time. `flashinfer` is our wrapper; `flashinfer_direct` FlashInfer's own object, called
with the same tensors, which says what the wrapper costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.bench.case import OpCase
from moelab.ops import mla_flashinfer
from moelab.ops.mla_cache import LATENT_DIM, NUM_SCALES, PAGE_SIZE, ROPE_DIM, ROW_DIM, Fp8Cache, LatentCache
from moelab.ops.mla_decode import MlaDecode, num_pages
from moelab.ops.mla_flashinfer import FlashInferDecode
from moelab.ops.mla_triton import TritonDecode

SCALE = 192**-0.5 * 1.873854  # DeepSeek-V3's
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
FP8_ROW_BYTES = LATENT_DIM + 4 * NUM_SCALES + 2 * ROPE_DIM
FLOP_BOUND_ROWS = 256  # queries · heads from which FLOP at 800 TFLOP/s take longer than bytes at 4.2 TB/s


@dataclass(frozen=True)
class Setting:
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv: str = "bf16"  # or fp8


@dataclass
class Inputs:
    q_latent: Tensor
    q_pe: Tensor
    cache: LatentCache
    out: Tensor


def mla_cases(quick: bool) -> list[OpCase]:
    study = Setting(128, 2, 5000, 128)
    if quick:
        return [
            _case(s) for s in (study, Setting(128, 2, 5000, 16), Setting(16, 2, 5000, 128), Setting(1, 1, 5000, 128))
        ]
    settings = [Setting(b, q, kv, 128) for kv in (1024, 5000, 16384) for q in (1, 2) for b in BATCHES]
    settings += [Setting(b, q, kv, 128) for kv in (2048, 4096, 8192) for q in (1, 2) for b in (1, 16, 128)]
    settings += [Setting(b, q, 5000, h) for h in (64, 32, 16) for q in (1, 2) for b in (1, 8, 32, 128)]
    settings += [Setting(128, 2, kv, h) for h in (64, 32, 16) for kv in (1024, 16384)]
    settings += [Setting(b, 2, 5000, h, "fp8") for h in (128, 16) for b in (16, 128)]
    return [_case(s) for s in settings]


def _case(s: Setting) -> OpCase:
    def make(device: torch.device) -> Inputs:
        pages, tokens = s.batch * num_pages(s.kv_len), s.batch * s.q_len
        draw = functools.partial(torch.randn, dtype=torch.bfloat16, device=device)
        q, rows = draw(2, tokens, s.heads, LATENT_DIM), draw(pages, PAGE_SIZE, ROW_DIM)
        if s.kv == "fp8":
            scales = torch.rand(pages, PAGE_SIZE, NUM_SCALES, device=device) / 8
            values = (rows[..., :LATENT_DIM] * 8).to(torch.float8_e4m3fn)
            rows = Fp8Cache(values, scales, rows[..., LATENT_DIM:].contiguous())
        return Inputs(q[0], q[1, ..., :ROPE_DIM], rows, torch.empty_like(q[0]))

    def with_(name: str) -> Callable[[Inputs], Tensor]:
        return lambda i: _planned(name, s, i.out.device).run(i.q_latent, i.q_pe, i.cache, i.out)

    def direct(i: Inputs) -> Tensor:
        latent, rope = i.cache[..., :LATENT_DIM], i.cache[..., LATENT_DIM:]
        return _planned("direct", s, i.out.device).run(i.q_latent, i.q_pe, latent, rope, out=i.out)

    backends = {"triton": with_("triton")}
    if s.kv == "bf16" and torch.cuda.is_available() and mla_flashinfer.reason() is None:
        backends["flashinfer"] = with_("flashinfer")
        if s.kv_len == 5000 and s.batch in (1, 16, 128):
            backends["flashinfer_direct"] = direct
    queries, row_bytes = s.batch * s.q_len * s.heads, 2 * ROW_DIM if s.kv == "bf16" else FP8_ROW_BYTES
    moved = s.batch * s.kv_len * row_bytes + queries * 2 * (ROW_DIM + LATENT_DIM)
    flops = 2.0 * (ROW_DIM + LATENT_DIM) * queries * s.kv_len
    roof = "bf16" if s.q_len * s.heads >= FLOP_BOUND_ROWS else "copy"
    params = {"batch": s.batch, "q_len": s.q_len, "kv_len": s.kv_len, "heads": s.heads, "kv": s.kv}
    return OpCase("mla", params, make, backends, moved, flops, roof)


@functools.lru_cache(maxsize=3)
def _planned(name: str, s: Setting, device: torch.device) -> MlaDecode:
    """The backend `name` ("direct": FlashInfer's own object) with a plan, the same for all sets of a case's inputs.
    Kept while a case is timed."""
    per = num_pages(s.kv_len)
    table = torch.randperm(s.batch * per, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(s.batch, per)
    if name == "direct":
        return _direct(s, table, device)
    kind = {"triton": TritonDecode, "flashinfer": FlashInferDecode}[name]
    decode = kind(s.heads, SCALE, s.batch, s.kv_len, s.q_len, device)
    decode.plan(table, [s.kv_len] * s.batch)
    return decode


def _direct(s: Setting, table: Tensor, device: torch.device) -> MlaDecode:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    workspace = torch.empty(mla_flashinfer.WORKSPACE_BYTES, dtype=torch.int8, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    steps = torch.arange(s.batch + 1, dtype=torch.int32)
    wrapper.plan(
        steps * s.q_len, steps * table.shape[1], table.flatten(), torch.full((s.batch,), s.kv_len, dtype=torch.int32),
        s.heads, LATENT_DIM, ROPE_DIM, PAGE_SIZE, True, SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    return wrapper
