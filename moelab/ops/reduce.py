"""The weighted sum over a token's experts: out[t] = Σ_k weights[t, k] · y[row_of[t, k]].

In float32 and in the order of k: each product rounded, then added, no fused multiply-add, one rounding to the output's
dtype at the end. The order is fixed so that the sum is the same bit for bit wherever the experts were computed. Where
row_of is −1 neither weight nor row is looked at: it adds nothing, and a NaN there is harmless.

It moves (K + 1) · T · H values and computes next to nothing, so the kernel only has to keep loads in flight: a program
takes one token and 512 columns, and asks for its K rows before it adds the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.jit import jit, runs_on, tl, triton

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# With 4 warps 4 values per thread. With 8, ptxas keeps to the 32 registers of full occupancy by waiting for the third
# row before it asks for the fourth (sm_90a, K = 8); with 4, seven are asked for before the first product.
MAX_BLOCK = 512


def reduce_topk_reference(y: Tensor, row_of: Tensor, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `reduce_topk`, in plain torch."""
    total = torch.zeros(len(row_of), y.shape[1], dtype=torch.float32, device=y.device)
    if len(y):
        for k in range(row_of.shape[1]):
            row = row_of[:, k, None]
            term = weights[:, k, None] * y[row_of[:, k].long().clamp(min=0)].float()
            total = torch.where(row >= 0, total + term, total)
    return total.to(dtype or y.dtype)


def reduce_topk(y: Tensor, row_of: Tensor, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """y [R, H] of any float dtype, rows contiguous at any stride; row_of [T, K] int32 or int64, −1 or 0 … R − 1;
    weights [T, K] float32 -> [T, H] of `dtype`, y's unless given.

    On CUDA tensors one launch; may be captured in a CUDA graph. A row number of R or more is not caught.
    """
    dtype = dtype or y.dtype
    check_tensor("y", y, ("R", "H"), FLOATS)
    check_tensor("row_of", row_of, ("T", "K"), (torch.int32, torch.int64), like=y)
    check_tensor("weights", weights, tuple(row_of.shape), (torch.float32,), like=y)
    require(dtype in FLOATS, "dtype", dtype, " or ".join(map(str, FLOATS)))
    if not runs_on(_reduce_kernel, y):
        return reduce_topk_reference(y, row_of, weights, dtype)
    (num_tokens, top_k), hidden = row_of.shape, y.shape[1]
    out = torch.empty(num_tokens, hidden, dtype=dtype, device=y.device)
    if out.numel():
        block, early = min(MAX_BLOCK, triton.next_power_of_2(hidden)), launches_early(y)
        _reduce_kernel[(num_tokens, triton.cdiv(hidden, block))](
            y, row_of, weights, out, y.stride(0), row_of.stride(0), weights.stride(0), hidden,
            TOP_K=top_k, BLOCK=block, EARLY=early, num_warps=4, enable_fp_fusion=False, launch_pdl=early,
        )  # fmt: skip
    return out


@jit
def _reduce_kernel(
    y_ptr, row_of_ptr, weights_ptr, out_ptr, y_stride, row_of_stride, weights_stride, hidden,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows, scales, values = (), (), ()
    for k in tl.static_range(TOP_K):
        rows += (tl.load(row_of_ptr + token * row_of_stride + k).to(tl.int64),)
        scales += (tl.load(weights_ptr + token * weights_stride + k),)
    for k in tl.static_range(TOP_K):
        mask = (column < hidden) & (rows[k] >= 0)
        values += (tl.load(y_ptr + rows[k] * y_stride + column, mask=mask, other=0.0),)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        total = tl.where(rows[k] >= 0, total + scales[k] * values[k].to(tl.float32), total)
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=column < hidden)
