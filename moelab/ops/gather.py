"""The sort that carries indices: the tokens of each expert, gathered.

A *slot* is one choice of one token: slot t·K + k is token t's k-th expert. Sorted by (expert, token), the slots of an
expert stand together: `permutation[offsets[e] : offsets[e + 1]]` are expert e's, of tokens permutation // K, and
`counts[e]` says how many. It is a counting sort, so it is stable: equal experts keep the order of the slots.

An id outside 0 … E − 1, such as the −1 of a padded token, goes nowhere: it is in no count, and its slot stands behind
offsets[E], also in order. So the permutation is always one of all T·K slots, and every output is written.

One launch without atomics: every program serves two experts, or an expert and what goes nowhere. It counts the slots
below them (where theirs begin) and numbers those that are theirs (a running sum). What that costs is instructions, for
each of T·K ids is looked at in E/2 programs; so a thread holds EACH neighbouring slots and numbers them by itself, one
sum over the threads of both experts' counts, 16 bits each, gives every thread its place, and the ids are read once.
Beyond MAX_BLOCK slots the program reads them in blocks, twice. The time grows with T·K·E, on an H200 to 12 µs for 4096
tokens of top-8 over 256 experts: for many more a radix sort reads less.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.jit import jit, runs_on, tl, triton

EACH = 8  # neighbouring slots of a thread: 256 tokens of top-8 took 1.40 µs on an H200, with 4 or 16 1.50 and 1.62
LEAST_BLOCK, MAX_BLOCK = 128, 4096  # slots a program looks at at once


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
    block = min(MAX_BLOCK, max(LEAST_BLOCK, triton.next_power_of_2(slots)))
    threads, early = max(32, block // EACH), launches_early(topk_ids)
    _gather_kernel[(num_experts // 2 + 1,)](
        topk_ids, counts, offsets, permutation, slots, num_experts, THREADS=threads, EACH=block // threads,
        ONE_BLOCK=slots <= block, EARLY=early, num_warps=threads // 32, launch_pdl=early,
    )  # fmt: skip
    return Gathered(counts, offsets, permutation)


@jit
def _experts(ids_ptr, first, slots, num_experts, EACH: tl.constexpr):
    """Experts of the slots first, first + 1, … of each thread: EACH tensors like `first`. num_experts stands for what
    goes nowhere, and for what is no slot."""
    # 16 bytes a load, four int32 or two int64, lest they change threads. Unsigned, a negative id is a large one: one
    # minimum instead of two comparisons.
    experts = ()
    if ids_ptr.dtype.element_ty == tl.int64:
        for i in tl.static_range(0, EACH, 2):
            slot = first[:, None] + (i + tl.arange(0, 2))[None, :]
            ids = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
            a, b = tl.split(tl.minimum(ids.to(tl.uint64, bitcast=True), num_experts).to(tl.int32))
            experts += (a, b)
    else:
        for i in tl.static_range(0, EACH, 4):
            slot = first[:, None] + (i + tl.arange(0, 4))[None, :]
            ids = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
            expert = tl.minimum(ids.to(tl.uint32, bitcast=True), num_experts).to(tl.int32)
            even, odd = tl.split(tl.reshape(expert, (first.shape[0], 2, 2)))
            a, c = tl.split(even)
            b, d = tl.split(odd)
            experts += (a, b, c, d)
    return experts


@jit
def _tally(experts, mine, EACH: tl.constexpr):
    """Of each thread: how many slots go to experts below `mine`, and how many to `mine` and, times 65536, the next."""
    below, hits = tl.zeros_like(experts[0]), tl.zeros_like(experts[0])
    for i in tl.static_range(EACH):
        past = experts[i] - mine
        below -= past >> 31
        hits += (past == 0).to(tl.int32) + tl.where(past == 1, 65536, 0)
    return below, hits


@jit
def _place(permutation_ptr, experts, expert, at, first, slots, EACH: tl.constexpr):
    """Write the slots of `expert`, those of a thread from its place `at` on."""
    for i in tl.static_range(EACH):
        is_here = experts[i] == expert
        tl.store(permutation_ptr + at, first + i, mask=is_here & (first + i < slots))
        at += is_here.to(tl.int32)


@jit
def _gather_kernel(
    ids_ptr, counts_ptr, offsets_ptr, permutation_ptr, slots, num_experts,
    THREADS: tl.constexpr, EACH: tl.constexpr, ONE_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mine = tl.program_id(0) * 2
    other = mine + 1
    first = tl.arange(0, THREADS) * EACH
    if ONE_BLOCK:
        experts = _experts(ids_ptr, first, slots, num_experts, EACH)
        below, hits = _tally(experts, mine, EACH)
        begins = tl.sum(below + ((below + (hits & 0xFFFF)) << 16))  # both in one sum
        begin, middle = begins & 0xFFFF, begins >> 16
        ends = tl.cumsum(hits, axis=0)
        before = ends - hits
        _place(permutation_ptr, experts, mine, begin + (before & 0xFFFF), first, slots, EACH)
        _place(permutation_ptr, experts, other, middle + (before >> 16), first, slots, EACH)
        last = first == THREADS * EACH - EACH
        tl.store(counts_ptr + mine + first * 0, ends & 0xFFFF, mask=last & (mine < num_experts))
        tl.store(counts_ptr + other + first * 0, ends >> 16, mask=last & (other < num_experts))
    else:
        # `while`, since the interpreter of triton 3.6 with numpy 2.4 cannot loop over a range that ends at an argument.
        lower, mines, start = tl.zeros((THREADS,), tl.int32), tl.zeros((THREADS,), tl.int32), 0
        while start < slots:
            below, hits = _tally(_experts(ids_ptr, start + first, slots, num_experts, EACH), mine, EACH)
            lower += below
            mines += hits & 0xFFFF
            start += THREADS * EACH
        begin = tl.sum(lower)
        middle = begin + tl.sum(mines)
        at, at_other, start = begin, middle, 0
        while start < slots:
            experts = _experts(ids_ptr, start + first, slots, num_experts, EACH)
            _, hits = _tally(experts, mine, EACH)
            before = tl.cumsum(hits, axis=0) - hits
            _place(permutation_ptr, experts, mine, at + (before & 0xFFFF), start + first, slots, EACH)
            _place(permutation_ptr, experts, other, at_other + (before >> 16), start + first, slots, EACH)
            total = tl.sum(hits)
            at += total & 0xFFFF
            at_other += total >> 16
            start += THREADS * EACH
        if mine < num_experts:
            tl.store(counts_ptr + mine, at - begin)
        if other < num_experts:
            tl.store(counts_ptr + other, at_other - middle)
    tl.store(offsets_ptr + mine, begin)
    if other <= num_experts:
        tl.store(offsets_ptr + other, middle)
