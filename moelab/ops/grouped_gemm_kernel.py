"""The Triton kernel of the block-FP8 grouped GEMM: a fixed number of programs share the populated tiles.

A tile is BLOCK_N columns of one expert's output for BLOCK_M of its populated rows; it takes ⌈K/128⌉ steps of 128 along
K. How many tiles there are only the device knows, so each of P programs sums the counts itself and finds its part of
the T tiles:

    rest  = T mod P tiles come first, each cut along K into ⌊P/rest⌋ parts of a program each (split-K)
    whole = ⌊T/P⌋ tiles for each program p follow: rest + p, rest + p + P, …        (neighbours run at the same time)

So time goes with populated rows, and few tiles use the whole GPU, whatever the counts. A part is never less than LEAST
steps. (Cutting the rest into P equal shares instead, "stream-K", arXiv 2301.03598, lets most programs touch two tiles:
with 2 experts, 8 rows each, 2048 → 7168 that took 14.4 µs on an H200, and tiles left whole 12.2.)

The parts of a tile leave float32 partial sums in a workspace and count themselves; the last to arrive adds them in the
order of K (`moelab.ops.arrivals`), so the sum is the same, bit for bit, on every run. Nobody waits for anybody.

Weights are the first operand, [BLOCK_N, 128] · [128, BLOCK_M]: Hopper's wgmma wants 64 or more rows there, which
weights always have and tokens do not, so few rows cost little ("swap AB", as in FlashInfer and TensorRT-LLM). Weights
come by TMA; rows by masked copies, so rows beyond a count are never read.

Which weights are wanted depends on the counts, so no weights are asked for before the kernel ahead has ended. (To ask
the L2 for those that are wanted if every expert has rows, as the linear op does, gained nothing where kernels follow
one another: the memory is busy then.)

    out[r, n] = Σ_s xscale[r, s] · wscale[n/128, s] · Σ_{k in s} x[r, k] · w[n, k]       s: groups of 128 along K
"""

from __future__ import annotations

from moelab.ops.jit import jit, tl, triton

# Sizes whose value or divisibility would only make for more variants to compile.
_SIZES = ("scales_stack", "scales_column", "num_experts", "room")


@(jit if triton is None else triton.jit(do_not_specialize=_SIZES))
def grouped_kernel(
    x, x_scales, weight, weight_scales, counts, out, partials, arrived,
    scales_stack, scales_row, scales_column, num_experts, room,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """`weight`: a TMA descriptor of [E·N, K] with blocks [BLOCK_N, 128]. `room`: M if PADDED, else rows of the
    buffer. `arrived` int32 [≥ P]: zeros, and zeros again when this ends."""
    STEPS: tl.constexpr = (K + 127) // 128
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TOGETHER: tl.constexpr = max(1, 8192 // (BLOCK_N * BLOCK_M))
    programs = tl.num_programs(0)
    if EARLY:
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

    rest, parts = _cut(total, programs, STEPS, LEAST)
    program = tl.program_id(0)
    cut = program < rest * parts
    tile = tl.where(cut, program // parts, rest + program)
    while tile < total:
        part = tl.where(cut, program % parts, 0)
        of = tl.where(cut, parts, 1)
        first = part * STEPS // of
        last = (part + 1) * STEPS // of
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

        if of > 1:
            inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            sums = partials + tile.to(tl.int64) * parts * (BLOCK_N * BLOCK_M) + inside
            tl.store(sums + part * (BLOCK_N * BLOCK_M), acc, cache_modifier=".cg")
            tl.debug_barrier()  # all threads have stored before one of them says so
            complete = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == parts - 1
            if complete:
                tl.store(arrived + tile, 0)
                acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                part = 0
                while part < parts:
                    for i in tl.static_range(TOGETHER):  # so many loads in flight
                        more = part + i < parts
                        at = tl.where(more, part + i, 0) * (BLOCK_N * BLOCK_M)
                        acc += tl.load(sums + at, mask=more, other=0.0, cache_modifier=".cg")
                    part += TOGETHER
            valid = valid & complete
        n = column + tl.arange(0, BLOCK_N)
        target = out + row[:, None] * N + n[None, :]
        tl.store(target, tl.trans(acc).to(out.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])

        tile = tl.where(cut, rest + program, tile + programs)
        cut = program < 0


@jit
def _cut(tiles, programs, STEPS: tl.constexpr, LEAST: tl.constexpr):
    """How many tiles are cut, and into how many parts."""
    rest = tiles % programs
    return rest, tl.minimum(programs // tl.maximum(rest, 1), STEPS // LEAST)


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
