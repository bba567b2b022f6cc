"""The four halves of an exchange with nobody, as Triton kernels. Each moves the bytes that the real half moves.

| half          | reads                                         | writes                                              |
|---------------|-----------------------------------------------|-----------------------------------------------------|
| dispatch_send | this rank's share of the tokens, once         | a row for each (token, rank), with its routing      |
| dispatch_recv | an arrived token's row for each of its rows   | the rows counted for each expert, and their scales  |
| combine_send  | the counted rows of y                         | a sum for each arrived token, to each TP rank       |
| combine_recv  | a sum for each (token, rank)                  | out                                                 |

A launch is `programs` programs of 512 threads, of which an idle GPU gives each SM one; they share the tiles of the work
among themselves. The row that stands i-th when experts' rows are counted through belongs to arrived token ⌊i·A/R⌋ of A
tokens with R rows: every token has its turn and ⌊R/A⌋ or ⌈R/A⌉ rows. The windows have room for what arrives when all
ranks send alike; what is more goes through them again from the beginning.

A row is copied in words of 32 bits, whatever its dtype. What the host does not know is found on the device: how many
tokens there are (`count`, of dispatch_send, for all later halves), the load at so many tokens, the time to wait.
`tally[2·half]` counts launches, the number after it the rows that the last column above names (combine_recv: reads).
"""

from __future__ import annotations

from moelab.comm.stand_in_clock import hold, now_ns
from moelab.ops.jit import jit, tl
from moelab.ops.quantize import quantize_groups, store_scales


@jit
def _count(tally, rows, first, HALF: tl.constexpr):
    if first:
        if tl.program_id(0) == 0:
            tl.atomic_add(tally + 2 * HALF, 1)
    tl.atomic_add(tally + 2 * HALF + 1, rows.to(tl.int64))


@jit
def _first_choices(ids, ids_stride, choice_stride, token, valid, num_experts, local, K: tl.constexpr, KS: tl.constexpr):
    """(first [ROWS, KS], ids alike): which choices of a token are the first to go to their rank; −1 goes nowhere."""
    k = tl.arange(0, KS)
    where = ids + token[:, None] * ids_stride + k[None, :] * choice_stride
    chosen = tl.load(where, mask=valid[:, None] & (k < K)[None, :], other=-1).to(tl.int32)
    going = (chosen >= 0) & (chosen < num_experts)
    place = tl.where(going, chosen // local, -1)
    earlier = (place[:, :, None] == place[:, None, :]) & (k[None, :, None] > k[None, None, :])
    return going & (tl.sum(earlier.to(tl.int32), axis=2) == 0), chosen


@jit
def send_kernel(
    x, scales, ids, weights, num_tokens, values, value_scales, notes, places, count, started, tally,
    x_stride, scales_stride, group_stride, ids_stride, choice_stride, weights_stride, weight_stride,
    most_tokens, width, num_scales, num_experts, local, tp, tp_rank,
    K: tl.constexpr, KS: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    QUANTIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr, EARLY: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """`width`: of a row, in words, or in values where it is quantised on the way (COLS is then a multiple of 128)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program, step = tl.program_id(0), tl.num_programs(0)
    n = most_tokens
    if num_tokens is not None:
        n = tl.maximum(tl.minimum(tl.load(num_tokens), most_tokens), 0)
    if program == 0:
        if CUDA:
            tl.store(started, now_ns())
        tl.store(count, n)
    lane = tl.arange(0, ROWS)
    k = tl.arange(0, KS)
    item = program
    while item < tl.cdiv(n, ROWS):  # for combine_recv: to how many ranks each token of the group goes
        token = (item * ROWS + lane).to(tl.int64)
        first, _ = _first_choices(ids, ids_stride, choice_stride, token, token < n, num_experts, local, K, KS)
        tl.store(places + token, tl.sum(first.to(tl.int32), axis=1), mask=token < n)
        item += step
    mine = (n - tp_rank + tp - 1) // tp
    chunks = tl.cdiv(width, COLS)
    sent = tl.full((), 0, tl.int32)
    item = program
    while item < tl.cdiv(mine, ROWS) * chunks:
        chunk = item % chunks
        number = (item // chunks * ROWS + lane).to(tl.int64)
        token = number * tp + tp_rank
        valid = number < mine
        first, chosen = _first_choices(ids, ids_stride, choice_stride, token, valid, num_experts, local, K, KS)
        if QUANTIZE:
            group = chunk * (COLS // 128) + tl.arange(0, COLS // 128)
            column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
            inside = valid[:, None, None] & (column < width)[None, :, :]
            read = tl.load(x + token[:, None, None] * x_stride + column[None, :, :], mask=inside, other=0.0)
            scaled, scale = quantize_groups(read.to(tl.float32), POWER_OF_TWO)
            moved = scaled.to(values.dtype.element_ty)
        else:
            column = chunk * COLS + tl.arange(0, COLS)
            inside = valid[:, None] & (column < width)[None, :]
            moved = tl.load(x + token[:, None] * x_stride + column[None, :], mask=inside, other=0)
        for choice in tl.static_range(K):
            goes = tl.sum((first & (k == choice)[None, :]).to(tl.int32), axis=1) > 0
            row = number * K + choice
            if QUANTIZE:
                where = values + row[:, None, None] * width + column[None, :, :]
                tl.store(where, moved, mask=inside & goes[:, None, None])
                where = value_scales + row[:, None] * num_scales + group[None, :]
                tl.store(where, scale, mask=goes[:, None] & (group < num_scales)[None, :])
            else:
                tl.store(values + row[:, None] * width + column[None, :], moved, mask=inside & goes[:, None])
        if chunk == 0:
            sent += tl.sum(tl.sum(first.to(tl.int32), axis=1), axis=0)
            some = valid[:, None] & (k < K)[None, :]
            weight = tl.load(
                weights + token[:, None] * weights_stride + k[None, :] * weight_stride, mask=some, other=0.0
            )
            if scales is not None:
                s = tl.arange(0, S)
                there = (s < num_scales)[None, :]
                where = scales + token[:, None] * scales_stride + s[None, :] * group_stride
                given = tl.load(where, mask=valid[:, None] & there, other=0.0)
            for choice in tl.static_range(K):
                goes = tl.sum((first & (k == choice)[None, :]).to(tl.int32), axis=1) > 0
                row = number * K + choice
                tl.store(notes + row * (2 * K + 1) + 2 * K, token.to(tl.int32), mask=goes)
                note = notes + row[:, None] * (2 * K + 1) + k[None, :]
                tl.store(note, chosen, mask=some & goes[:, None])
                tl.store(note + K, weight.to(tl.int32, bitcast=True), mask=some & goes[:, None])
                if scales is not None:
                    tl.store(value_scales + row[:, None] * num_scales + s[None, :], given, mask=goes[:, None] & there)
        item += step
    _count(tally, sent, True, 0)


@jit
def receive_kernel(
    values, value_scales, rows, scales, counts, load, arrivals, count, started, asked, log, tally,
    scales_expert_stride, scales_row_stride, group_stride, room, space, width, num_scales, local,
    EXPERTS: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PACKED: tl.constexpr,
    ENTRIES: tl.constexpr, EARLY: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """`load` [M + 1, local] and `arrivals` [M + 1]: by the number of tokens. `room`: rows of an expert, `space`:
    of the window."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    program, step = tl.program_id(0), tl.num_programs(0)
    n = tl.load(count)
    expert = tl.arange(0, EXPERTS)
    each = tl.load(load + n.to(tl.int64) * local + expert, mask=expert < local, other=0)
    end, total, arrived = tl.cumsum(each, 0), tl.sum(each, axis=0), tl.load(arrivals + n)
    if CUDA:
        hold(tl.load(started), tl.load(asked + n), log, ENTRIES)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if program == 0:
        tl.store(counts + expert, each, mask=expert < local)
        _count(tally, total, True, 1)
    chunks = tl.cdiv(width, COLS)
    item = program
    while item < tl.cdiv(total, ROWS) * chunks:
        chunk = item % chunks
        i = item // chunks * ROWS + tl.arange(0, ROWS)
        valid = i < total
        passed = end[None, :] <= i[:, None]
        owner = tl.sum(passed.to(tl.int32), axis=1)
        place = (i - tl.sum(tl.where(passed, each[None, :], 0), axis=1)).to(tl.int64)
        source = i.to(tl.int64) * arrived // total % space
        column = chunk * COLS + tl.arange(0, COLS)
        inside = valid[:, None] & (column < width)[None, :]
        moved = tl.load(values + source[:, None] * width + column[None, :], mask=inside, other=0)
        row = owner.to(tl.int64) * room + place
        tl.store(rows + row[:, None] * width + column[None, :], moved, mask=inside)
        if scales is not None:
            if chunk == 0:
                s = tl.arange(0, S)
                there = valid[:, None] & (s < num_scales)[None, :]
                scale = tl.load(value_scales + source[:, None] * num_scales + s[None, :], mask=there, other=1.0)
                where = scales + owner.to(tl.int64)[:, None] * scales_expert_stride
                store_scales(where, scale, place, s, valid, scales_row_stride, group_stride, num_scales, PACKED)
        item += step


@jit
def return_kernel(
    y, sums, load, arrivals, count, started, tally, room, space, width, copies, local,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """`copies` of each sum, one for each TP rank, into `space` rows, again from the first one after the last."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program, step = tl.program_id(0), tl.num_programs(0)
    if CUDA:
        if program == 0:
            tl.store(started, now_ns())
    n = tl.load(count)
    expert = tl.arange(0, EXPERTS)
    each = tl.load(load + n.to(tl.int64) * local + expert, mask=expert < local, other=0)
    end, total, arrived = tl.cumsum(each, 0), tl.sum(each, axis=0), tl.load(arrivals + n)
    if program == 0:
        _count(tally, arrived * copies, True, 2)
    most = tl.cdiv(total, tl.maximum(arrived, 1))
    chunks = tl.cdiv(width, COLS)
    item = program
    while item < tl.cdiv(arrived, ROWS) * chunks:
        column = item % chunks * COLS + tl.arange(0, COLS)
        token = (item // chunks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        valid = token < arrived
        begin = tl.cdiv(token * total, arrived)
        beyond = tl.cdiv((token + 1) * total, arrived)
        added = tl.zeros((ROWS, COLS), tl.float32)
        turn = 0
        while turn < most:
            i = begin + turn
            passed = end[None, :] <= i[:, None]
            place = i - tl.sum(tl.where(passed, each[None, :], 0), axis=1)
            row = tl.sum(passed.to(tl.int32), axis=1).to(tl.int64) * room + place
            inside = (valid & (i < beyond))[:, None] & (column < width)[None, :]
            added += tl.load(y + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
            turn += 1
        inside = valid[:, None] & (column < width)[None, :]
        copy = 0
        while copy < copies:
            where = sums + ((copy * arrived + token) % space)[:, None] * width + column[None, :]
            tl.store(where, added.to(sums.dtype.element_ty), mask=inside)
            copy += 1
        item += step


@jit
def gather_kernel(
    sums, places, out, count, started, asked, log, tally, width,
    K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ENTRIES: tl.constexpr, EARLY: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """`sums` [M·K, width]: of token t those from t·K on, as many as it goes to ranks."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    program, step = tl.program_id(0), tl.num_programs(0)
    n = tl.load(count)
    if CUDA:
        hold(tl.load(started), tl.load(asked + n), log, ENTRIES)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    chunks = tl.cdiv(width, COLS)
    read = tl.full((), 0, tl.int32)
    item = program
    while item < tl.cdiv(n, ROWS) * chunks:
        column = item % chunks * COLS + tl.arange(0, COLS)
        token = (item // chunks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (token < n)[:, None] & (column < width)[None, :]
        have = tl.load(places + token, mask=token < n, other=0)
        added = tl.zeros((ROWS, COLS), tl.float32)
        for k in tl.static_range(K):
            where = sums + (token * K + k)[:, None] * width + column[None, :]
            added += tl.load(where, mask=inside & (k < have)[:, None], other=0.0).to(tl.float32)
        tl.store(out + token[:, None] * width + column[None, :], added.to(out.dtype.element_ty), mask=inside)
        if item % chunks == 0:
            read += tl.sum(have, axis=0)
        item += step
    _count(tally, read, True, 3)
