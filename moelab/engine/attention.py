"""Which implementation of MLA decode the engine takes, and what it makes of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moelab.model.deepseek import DeepSeek
from moelab.ops import mla_flashinfer
from moelab.ops.mla_decode import MlaDecode, ReferenceDecode
from moelab.ops.mla_flashinfer import FlashInferDecode
from moelab.ops.mla_triton import TritonDecode
from moelab.ops.rope import softmax_scale


def decode_class(device: torch.device | str, fp8_cache: bool = False) -> type[MlaDecode]:
    """FlashInfer's where it runs and the cache is bfloat16, our kernel on other GPUs, plain torch on the CPU."""
    if torch.device(device).type != "cuda":
        return ReferenceDecode
    return TritonDecode if fp8_cache or mla_flashinfer.reason(device) else FlashInferDecode


def decode_for(model: DeepSeek, max_kv_len: int, q_len: int, fp8_cache: bool = False) -> Callable[[int], MlaDecode]:
    """Makes attention for n requests of q_len new tokens: n -> `MlaDecode`. They share scratch memory with the largest
    so far, so the largest comes first."""
    device = model.embed_w.device
    kind = decode_class(device, fp8_cache)
    num_heads, scale = model.layers[0].attention.num_heads, softmax_scale(model.config)
    made: list[MlaDecode] = []

    def make(batch: int) -> MlaDecode:
        share = made[0] if made and made[0].max_batch >= batch else None
        decode = kind(num_heads, scale, batch, max_kv_len, q_len, device, share)
        if share is None:
            made[:] = [decode]
        return decode

    return make
