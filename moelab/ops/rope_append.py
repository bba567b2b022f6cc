"""RoPE and the paged latent cache in one kernel: turn the queries, and write each new token's row of the cache.

A token's row is [latent | turned k_pe] (`moelab.ops.mla_cache`); its slot says where it goes, page · 64 + row. A token
of slot −1 is padding, of a captured graph say: nothing is written for it, neither a row nor its queries, so whatever
stands in it stays its own affair. The queries may be turned in place, or written beside the absorbed ones into the rows
of 576 that MLA decode reads.

The arithmetic is that of `moelab.ops.rope`, product by product without fused multiply-add, and of
`moelab.ops.quantize` for a cache in FP8: the results are the same bit for bit. At 256 tokens × 128 heads it moves 9 MB,
nearly all of it queries, in pieces of 128 bytes: 4.1 µs on an H200, and 1.0 at 16 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.ops.checks import check_tensor
from moelab.ops.early_launch import launches_early
from moelab.ops.jit import jit, runs_on, tl, triton
from moelab.ops.mla_cache import LATENT_DIM, ROPE_DIM, Fp8Cache, LatentCache, check_cache
from moelab.ops.quantize import quantize_groups, quantize_reference
from moelab.ops.rope import apply_rope

MAX_HEADS = 32  # of a program; 4 warps then hold 16 values a thread


def rope_append(
    q_pe: Tensor, latent: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: LatentCache,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q_pe bfloat16 [T, heads, 64], latent bfloat16 [T, 512] after its norm, k_pe bfloat16 [T, 64]; cos and sin float32
    [T, 32] as `rope.cos_sin` gives them; slots int32 or int64 [T]; cache bfloat16 [pages, 64, 576] or an `Fp8Cache`
    -> the turned queries, bfloat16 [T, heads, 64], in `out` if it is given (q_pe itself will do).

    Writes the cache's rows at `slots`, no two alike, and touches no other. A slot beyond the cache is not caught.
    Strides other than the last are free, but for the cache. CUDA tensors take the kernel, in one launch. Raises OpError
    for a dtype, shape, stride or device that is not accepted.
    """
    check_tensor("q_pe", q_pe, ("T", "heads", ROPE_DIM), (torch.bfloat16,))
    num_tokens, heads, _ = q_pe.shape
    check_tensor("latent", latent, (num_tokens, LATENT_DIM), (torch.bfloat16,), q_pe)
    check_tensor("k_pe", k_pe, (num_tokens, ROPE_DIM), (torch.bfloat16,), q_pe)
    for name, turn in (("cos", cos), ("sin", sin)):
        check_tensor(name, turn, (num_tokens, ROPE_DIM // 2), (torch.float32,), q_pe)
    check_tensor("slots", slots, (num_tokens,), (torch.int32, torch.int64), q_pe)
    check_cache(cache, q_pe)
    if out is None:
        out = torch.empty(q_pe.shape, dtype=q_pe.dtype, device=q_pe.device)
    else:
        check_tensor("out", out, tuple(q_pe.shape), (q_pe.dtype,), q_pe)
    if not runs_on(_rope_append_kernel, q_pe):
        return rope_append_reference(q_pe, latent, k_pe, cos, sin, slots, cache, out)
    if isinstance(cache, Fp8Cache):
        values, rope, scales = cache.values, cache.rope, cache.scales
    else:
        values, rope, scales = cache, cache[:, :, LATENT_DIM:], None
    block, early = min(MAX_HEADS, triton.next_power_of_2(max(1, heads))), launches_early(q_pe)
    if num_tokens:
        _rope_append_kernel[(num_tokens, triton.cdiv(heads, block) + 1)](
            q_pe, latent, k_pe, cos, sin, slots, out, values, rope, scales, q_pe.stride(0), q_pe.stride(1),
            latent.stride(0), k_pe.stride(0), cos.stride(0), sin.stride(0), out.stride(0), out.stride(1),
            values.stride(1), rope.stride(1), heads, HEADS=block, LATENT=LATENT_DIM, ROPE=ROPE_DIM, EARLY=early,
            launch_pdl=early, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rope_append_reference(
    q_pe: Tensor, latent: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: LatentCache, out: Tensor
) -> Tensor:
    """As `rope_append`, in plain torch."""
    real = slots >= 0
    rows, turned = slots[real].long(), apply_rope(k_pe, cos, sin)[real]
    out[real] = apply_rope(q_pe, cos, sin)[real]
    if isinstance(cache, Fp8Cache):
        values, scales = quantize_reference(latent[real])
        cache.values.view(torch.uint8).flatten(0, 1)[rows] = values.view(torch.uint8)  # torch indexes no FP8
        cache.scales.flatten(0, 1)[rows] = scales
        cache.rope.flatten(0, 1)[rows] = turned
    else:
        cache.flatten(0, 1)[rows] = torch.cat((latent[real], turned), dim=-1)
    return out


@jit
def _turn(x, cos, sin, PAIRS: tl.constexpr):
    """x float32 [A, 2 · PAIRS] of neighbouring pairs, cos and sin [PAIRS]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], PAIRS, 2)))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)


@jit
def _rope_append_kernel(
    q_pe, latent, k_pe, cos, sin, slots, out, values, rope, scales, q_token_stride, q_head_stride, latent_stride,
    k_stride, cos_stride, sin_stride, out_token_stride, out_head_stride, values_stride, rope_stride, heads,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first program of a token writes its row of the cache, the others turn HEADS heads each. Without `scales` the
    cache is bfloat16. Loads do not wait for the slot, stores do."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    pair, element = tl.arange(0, ROPE // 2), tl.arange(0, ROPE)[None, :]
    cosines, sines = tl.load(cos + token * cos_stride + pair), tl.load(sin + token * sin_stride + pair)
    if tl.program_id(1) == 0:
        column = tl.arange(0, LATENT // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        row = tl.load(latent + token * latent_stride + column).to(tl.float32)
        key = _turn(tl.load(k_pe + token * k_stride + element).to(tl.float32), cosines, sines, ROPE // 2)
        if scales is not None:
            scaled, scale = quantize_groups(tl.reshape(row, (1, LATENT // 128, 128)), False)
            row = tl.reshape(scaled, row.shape)
            group = tl.arange(0, LATENT // 128)[None, :]
            tl.store(scales + slot * (LATENT // 128) + group, scale, mask=slot >= 0)
        tl.store(values + slot * values_stride + column, row.to(values.dtype.element_ty), mask=slot >= 0)
        tl.store(rope + slot * rope_stride + element, key.to(rope.dtype.element_ty), mask=slot >= 0)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        source = q_pe + token * q_token_stride + head * q_head_stride + element
        query = tl.load(source, mask=head < heads, other=0.0).to(tl.float32)
        turned = _turn(query, cosines, sines, ROPE // 2).to(out.dtype.element_ty)
        target = out + token * out_token_stride + head * out_head_stride + element
        tl.store(target, turned, mask=(head < heads) & (slot >= 0))
