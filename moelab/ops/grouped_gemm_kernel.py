"""The Triton kernel of the block-FP8 grouped GEMM: equal shares of the populated tiles for every program.

A tile is BLOCK_N columns of one expert's output for BLOCK_M of its populated rows; it takes ⌈K/128⌉ steps of 128 along
K. How many tiles there are only the device knows, so a fixed number of programs P sums the counts itself and shares the
T tiles:

    whole = ⌊T/P⌋ tiles for each program p: tiles rest + p, rest + p + P, …       (neighbours run at the same time)
    rest  = T mod P tiles, cut along K: program p takes the steps p·U … p·U + U − 1 of rest · ⌈K/128⌉

With U = ⌈rest · ⌈K/128⌉ / P⌉ all programs end together, whatever the counts: split-K where there are few tiles, and no
idle SMs in a last wave where there are many (stream-K, arXiv 2301.03598). U is never below LEAST steps, and a whole
tile where that costs at most a tenth.

Programs that share a tile leave float32 partial sums in a workspace and count themselves; the last to arrive adds them
in the order of K (`moelab.ops.arrivals`), so the sum is the same, bit for bit, on every run. Nobody waits for anybody.

Weights are the first operand, [BLOCK_N, 128] · [128, BLOCK_M]: Hopper's wgmma wants 64 or more rows there, which
weights always have and tokens do not, so few rows cost little ("swap AB", as in FlashInfer and TensorRT-LLM). Weights
come by TMA; rows by masked copies, so rows beyond a count are never read.

    out[r, n] = Σ_s xscale[r, s] · wscale[n/128, s] · Σ_{k in s} x[r, k] · w[n, k]       s: groups of 128 along K
"""

from __future__ import annotations

from moelab.ops.block_gemm import prefetch_l2
from moelab.ops.jit import jit, tl, triton

# Sizes whose value or divisibility would only make for more variants to compile.
_SIZES = ("scales_stack", "scales_column", "num_experts", "room")


@(jit if triton is None else triton.jit(do_not_specialize=_SIZES))
def grouped_kernel(
    x, x_scales, w, weight, weight_scales, counts, out, partials, arrived,
    scales_stack, scales_row, scales_column, num_experts, room,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """`weight`: a TMA descriptor of `w` as [E·N, K], with blocks [BLOCK_N, 128]. `room`: M if PADDED, else rows of the
    buffer. `arrived` int32 [≥ P]: zeros, and zeros again when this ends."""
    STEPS: tl.constexpr = (K + 127) // 128
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    programs = tl.num_programs(0)
    if EARLY:
        if AHEAD:
            _prefetch(w, num_experts, programs, N, K, BLOCK_N, STEPS, LEAST, AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.arange(0, EXPERTS)
    count = tl.maximum(tl.load(counts + expert, mask=expert < num_experts, other=0), 0)
    begin = tl.zeros_like(count)
    if not PADDED:
        padded = (count + 127) // 128 * 128
        begin = tl.cumsum(padded, 0) - padded
    count = tl.maximum(tl.minimum(count, room - begin), 0)  # never beyond the buffer, whatever the counts say
    tiles_m = (count + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles_m * TILES_N, 0)
    total = tl.sum(tiles_m * TILES_N, axis=0)

    rest, share = _shares(total, programs, STEPS, LEAST)
    step = tl.program_id(0) * share
    stop = tl.minimum(step + share, rest * STEPS)
    whole = rest + tl.program_id(0)
    while (step < stop) | (whole < total):
        shared = step < stop
        tile = tl.where(shared, step // STEPS, whole)
        first = tl.where(shared, step % STEPS, 0)
        last = tl.where(shared, tl.minimum(first + stop - step, STEPS), STEPS)
        step += tl.where(shared, last - first, 0)
        whole += tl.where(shared, 0, programs)

        e = tl.sum((ends <= tile).to(tl.int32), axis=0)
        here = expert == e
        rows_here = tl.sum(tl.where(here, count, 0), axis=0)
        tiles_here = tl.sum(tl.where(here, tiles_m, 0), axis=0)
        local = tile - tl.sum(tl.where(here, ends, 0), axis=0) + tiles_here * TILES_N
        column = local // tiles_here * BLOCK_N  # tiles that read the same weights stand side by side
        row = local % tiles_here * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = row < rows_here
        row = (row + tl.sum(tl.where(here, begin, 0), axis=0)).to(tl.int64)
        s_rows = x_scales + row * scales_row
        if PADDED:
            s_rows += e.to(tl.int64) * scales_stack
            row += e.to(tl.int64) * room
        x_rows = x + row * K
        w_scales = weight_scales + (e * ((N + 127) // 128) + column // 128) * STEPS
        w_row = e * N + column

        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        if CUDA:
            for k in tl.range(first, last, num_stages=STAGES):
                acc += _step(weight, w_row, x_rows, s_rows, w_scales, valid, k, scales_column, K, CUDA)
        else:  # a `for` over device values fails in the interpreter of Triton 3.6 with NumPy 2.4
            k = first
            while k < last:
                acc += _step(weight, w_row, x_rows, s_rows, w_scales, valid, k, scales_column, K, CUDA)
                k += 1

        if last - first < STEPS:
            inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            at = tile * STEPS
            mine = tl.program_id(0)
            # A share is at most a tile: it touches two tiles at most, each with a place of its own.
            place = (mine * 2 + (mine * share < at).to(tl.int32)).to(tl.int64)
            tl.store(partials + place * (BLOCK_N * BLOCK_M) + inside, acc, cache_modifier=".cg")
            tl.debug_barrier()  # all threads have stored before one of them says so
            before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
            program = at // share
            final = (at + STEPS - 1) // share
            complete = before == final - program
            if complete:
                tl.store(arrived + tile, 0)
                acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                while program <= final:
                    place = (program * 2 + (program * share < at).to(tl.int32)).to(tl.int64)
                    acc += tl.load(partials + place * (BLOCK_N * BLOCK_M) + inside, cache_modifier=".cg")
                    program += 1
            valid = valid & complete
        n = column + tl.arange(0, BLOCK_N)
        target = out + row[:, None] * N + n[None, :]
        tl.store(target, tl.trans(acc).to(out.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])


@jit
def _shares(tiles, programs, STEPS: tl.constexpr, LEAST: tl.constexpr):
    """How many tiles are cut, and how many of their steps a program takes."""
    rest = tiles % programs
    share = tl.cdiv(rest * STEPS, programs)
    return rest, tl.where(share * 10 > STEPS * 9, STEPS, tl.maximum(share, LEAST))


@jit
def _prefetch(
    w, num_experts, programs, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    LEAST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The weights of the first AHEAD steps that this program will take if every expert has one tile of rows."""
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    rest, share = _shares(num_experts * TILES_N, programs, STEPS, LEAST)
    step = tl.program_id(0) * share
    shared = step < rest * STEPS
    tile = tl.where(shared, step // STEPS, rest + tl.program_id(0))
    k = tl.where(shared, step % STEPS, 0) * 128
    n = tile % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    size = tl.where((n < N) & (tile < num_experts * TILES_N), tl.minimum(AHEAD * 128, K - k), 0)
    prefetch_l2((w + ((tile // TILES_N) * N + n).to(tl.int64) * K + k).to(tl.int64), size)


@jit
def _step(weight, w_row, x_rows, s_rows, w_scales, valid, k, scales_column, K: tl.constexpr, CUDA: tl.constexpr):
    """What 128 along K add to a tile: [BLOCK_N, 128] · [128, BLOCK_M] times its scales, float32."""
    inner = k * 128 + tl.arange(0, 128)
    keep = valid[:, None]
    if K % 128 != 0:
        keep = keep & (inner < K)[None, :]
    w = weight.load([w_row, k * 128])
    rows = tl.load(x_rows[:, None] + inner[None, :], mask=keep, other=0.0)
    scale = tl.load(s_rows + k.to(tl.int64) * scales_column, mask=valid, other=0.0) * tl.load(w_scales + k)
    if not CUDA:  # the interpreter multiplies what it is given
        w, rows = w.to(tl.float32), rows.to(tl.float32)
    return tl.dot(w, tl.trans(rows)) * scale[None, :]


@(jit if triton is None else triton.jit(do_not_specialize=("num_experts", "room")))
def counts_kernel(
    counts, out, num_experts, room, EXPERTS: tl.constexpr, CLAMP: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """What DeepGEMM wants to be told. With CLAMP, one program: out[e] = counts[e] within 0…room. Else program b: the
    expert of each of the rows 128·b … of the contiguous layout's `room` rows, −1 where there is none."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.arange(0, EXPERTS)
    count = tl.maximum(tl.load(counts + expert, mask=expert < num_experts, other=0), 0)
    if CLAMP:
        tl.store(out + expert, tl.minimum(count, room), mask=expert < num_experts)
    else:
        padded = (count + 127) // 128 * 128
        ends = tl.cumsum(padded, 0)
        e = tl.sum((ends <= tl.program_id(0) * 128).to(tl.int32), axis=0)
        end = tl.sum(tl.where(expert == e, ends - padded + count, 0), axis=0)
        row = tl.program_id(0) * 128 + tl.arange(0, 128)
        tl.store(out + row, tl.where((row < end) & (e < num_experts), e, -1), mask=row < room)
