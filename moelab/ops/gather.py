"""The sort that carries indices: the tokens of each expert, gathered.

A *slot* is one choice of one token: slot t·K + k is token t's k-th expert. Sorted by (expert, token), the slots of an
expert stand together: `permutation[offsets[e] : offsets[e + 1]]` are expert e's, of tokens permutation // K, and
`counts[e]` says how many. It is a counting sort, so it is stable: equal experts keep the order of the slots.

An id outside 0 … E − 1, such as the −1 of a padded token, goes nowhere: it is in no count, and its slot stands behind
offsets[E], also in order. So the permutation is always one of all T·K slots, and every output is written.

One launch, one program per expert and one for what goes nowhere, without atomics: every program reads all ids, counts
those below its expert (where its slots begin) and numbers those equal to it (a running sum). Up to 256 tokens of top-8
that is one read of 16 KB from the L2 per program, much cheaper than a second launch. The time grows with T·K·E: for
many thousands of tokens a radix sort reads less.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.jit import jit, runs_on, tl, triton

MAX_BLOCK = 4096  # slots a program looks at at once


class Gathered(NamedTuple):
    counts: Tensor  # [E] int32: slots of each expert
    offsets: Tensor  # [E + 1] int32: where each expert's slots begin; the last is how many go anywhere
    permutation: Tensor  # [T·K] int32: slots by (expert, slot), then those that go nowhere


def gather_by_expert_reference(topk_ids: Tensor, num_experts: int) -> Gathered:
    """As `gather_by_expert`, in plain torch."""
    ids = topk_ids.flatten().long()
    expert = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    offsets = counts.cumsum(0) - counts
    permutation = expert.argsort(stable=True)
    return Gathered(counts[:-1].int(), offsets.int(), permutation.int())


def gather_by_expert(topk_ids: Tensor, num_experts: int) -> Gathered:
    """topk_ids [T, K] int32 or int64, contiguous; num_experts E -> Gathered, on the same device.

    On CUDA tensors one launch, the same result on every run, and nothing is read back: it may be captured in a CUDA
    graph.
    """
    check_tensor("topk_ids", topk_ids, ("T", "K"), (torch.int32, torch.int64))
    require(topk_ids.is_contiguous(), "topk_ids's strides", topk_ids.stride(), "contiguous rows; call .contiguous()")
    slots = topk_ids.numel()
    require(slots < 2**31 - MAX_BLOCK, "topk_ids's size", slots, f"fewer than {2**31 - MAX_BLOCK} ids")
    require(num_experts >= 1, "num_experts", num_experts, "1 or more")
    if not runs_on(_gather_kernel, topk_ids):
        return gather_by_expert_reference(topk_ids, num_experts)
    counts, offsets, permutation = (
        torch.empty(n, dtype=torch.int32, device=topk_ids.device) for n in (num_experts, num_experts + 1, slots)
    )
    block = min(MAX_BLOCK, max(128, triton.next_power_of_2(slots)))
    early = launches_early(topk_ids)
    _gather_kernel[(num_experts + 1,)](
        topk_ids, counts, offsets, permutation, slots, num_experts, BLOCK=block, EARLY=early,
        num_warps=max(1, min(8, block // 256)), launch_pdl=early,
    )  # fmt: skip
    return Gathered(counts, offsets, permutation)


@jit
def _experts(ids_ptr, slot, slots, num_experts):
    """Expert of each slot; num_experts where it goes nowhere, one more where there is no such slot."""
    ids = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
    expert = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)
    return tl.where(slot < slots, expert, num_experts + 1)


@jit
def _gather_kernel(
    ids_ptr, counts_ptr, offsets_ptr, permutation_ptr, slots, num_experts, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mine = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    # `while`, since the interpreter of triton 3.6 with numpy 2.4 cannot loop over a range that ends at an argument.
    below, start = tl.zeros((BLOCK,), tl.int32), 0
    while start < slots:
        below += (_experts(ids_ptr, start + lane, slots, num_experts) < mine).to(tl.int32)
        start += BLOCK
    begin = tl.sum(below)
    end, start = begin, 0
    while start < slots:  # of few slots there is one block, and by now it is in the L1
        is_mine = _experts(ids_ptr, start + lane, slots, num_experts) == mine
        number = tl.cumsum(is_mine.to(tl.int32), axis=0)
        tl.store(permutation_ptr + end + number - 1, start + lane, mask=is_mine)
        end += tl.max(number)
        start += BLOCK
    tl.store(offsets_ptr + mine, begin)
    if mine < num_experts:
        tl.store(counts_ptr + mine, end - begin)
