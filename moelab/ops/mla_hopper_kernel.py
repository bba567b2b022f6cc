"""MLA decode on Hopper, in Gluon: two groups of four warps with roles of their own, TMA, asynchronous WGMMA.

A program takes 64 query rows (several heads, or queries, of one sequence). Plain Triton divides a chained product among
warps by rows, and 64 rows of a 512-wide float32 sum do not fit four warps. Here each group keeps 256 columns of the sum
(as in FlashMLA and FlashInfer); a tile of 64 cached rows is a page:

    left:    fetch pages,                                values of tile i, columns 0 … 255
    right:   scores of tile i, softmax, probabilities →  values of tile i, columns 256 … 511,  scores of tile i + 1, …

The right group queues the scores of tile i + 1 on the tensor cores behind the values of tile i, so that they are busy
but for the softmax. Shared memory holds the queries (72 KiB), a ring of two tiles (144 KiB) and the probabilities
(8 KiB): all of it, hence one program a multiprocessor. The groups meet at barriers in shared memory:

    fetched[h]   half h of the ring is filled: TMA's bytes are there (and of the FP8 form what the left group put)
    shrunk       by what to multiply the sums before the next tile is there, or at the end
    given        the probabilities are there
    taken        the left group is through with both
    freed[h]     the right group is through with half h; the left one knows of itself

Every wait names the phase by a count that both groups keep alike: `tick` of tiles, `turn` of factors. Rows in FP8 take
the way through registers of the left group, loaded two tiles ahead, and are put into the ring as bfloat16.

On an H200, 5000 rows, 2 queries, batch 128: 128 heads 631 to 739 µs (FlashInfer beside it 638 to 705; the GPU's power
limit spreads both), of which the tensor cores work some 375 at 1.78 GHz; 16 heads 190 to 219 µs (FlashInfer 217 to
233). In FP8 869 to 895 and 220 to 241 µs: that form saves memory, not time. Eight warps in step, the scores and the
softmax shared among them, took 8 to 15 % longer.

The names `gl`, `hopper` and so on are None where Triton or its Gluon is missing; nobody then calls what is here.
"""

from __future__ import annotations

from typing import Any

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    jit = gluon.jit
except ImportError:
    gl = hopper = mbarrier = tma = None

    def jit(function: Any) -> Any:
        return function


# Triton 3.7 names it `barrier`.
_barrier = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)


@jit
def _fetch(latent_desc, rope_desc, page, bar, k, k_pe, wanted, FP8: gl.constexpr):
    """A page by TMA into one half of the ring; of the FP8 form k_pe only."""
    if FP8:
        mbarrier.expect(bar, 64 * 128, pred=wanted)
        tma.async_copy_global_to_shared(rope_desc, [page * 64, 0], bar, k_pe, pred=wanted)
    else:
        mbarrier.expect(bar, 64 * 1152, pred=wanted)
        tma.async_copy_global_to_shared(latent_desc, [page * 64, 0], bar, k, pred=wanted)
        tma.async_copy_global_to_shared(rope_desc, [page * 64, 512], bar, k_pe, pred=wanted)


@jit
def _load_fp8(values, scales, page):
    """A page of FP8 rows into registers: 128 columns each, and their scales."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    row = page.to(gl.int64) * 64 + gl.arange(0, 64, gl.SliceLayout(1, SPREAD))
    where = values + row[:, None] * 512 + gl.arange(0, 128, gl.SliceLayout(0, SPREAD))[None, :]
    scales += row * 4
    a, b, c, d = gl.load(where), gl.load(where + 128), gl.load(where + 256), gl.load(where + 384)
    return a, b, c, d, gl.load(scales), gl.load(scales + 1), gl.load(scales + 2), gl.load(scales + 3)


@jit
def _put(k, a, b, c, d, scale_a, scale_b, scale_c, scale_d, bar, wanted):
    """What was loaded into one half of the ring, as bfloat16."""
    k.slice(0, 128, dim=1).store((a.to(gl.float32) * scale_a[:, None]).to(gl.bfloat16))
    k.slice(128, 128, dim=1).store((b.to(gl.float32) * scale_b[:, None]).to(gl.bfloat16))
    k.slice(256, 128, dim=1).store((c.to(gl.float32) * scale_c[:, None]).to(gl.bfloat16))
    k.slice(384, 128, dim=1).store((d.to(gl.float32) * scale_d[:, None]).to(gl.bfloat16))
    hopper.fence_async_shared()
    _barrier()
    mbarrier.arrive(bar, count=1, pred=wanted)


@jit
def _scores(q, q_pe, k, k_pe, S: gl.constexpr):
    """Q·Kᵀ, in flight: two WGMMA groups."""
    s = hopper.warpgroup_mma(q, k.permute((1, 0)), gl.zeros((64, 64), gl.float32, S), use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q_pe, k_pe.permute((1, 0)), s, is_async=True)


@jit
def _mask(s, tile, kv_len, limit, least, k, S: gl.constexpr):
    """Scores of what a query does not see become −inf, and the tile's values beyond kv_len zeros.

    `least`: the smallest of the limits; `k`: the tile in the ring."""
    if (tile + 1) * 64 > least:
        column = tile * 64 + gl.arange(0, 64, gl.SliceLayout(0, S))
        s = gl.where(column[None, :] < limit[:, None], s, float("-inf"))
        if (tile + 1) * 64 > kv_len:
            _barrier()  # all warps have read the tile for their scores
            SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            row = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, SPREAD))
            for i in gl.static_range(8):
                part = k.slice(i * 64, 64, dim=1)
                value = part.load(SPREAD)
                part.store(gl.where((row < kv_len)[:, None], value, gl.zeros_like(value)))
    return s


@jit
def _write(
    acc, outputs, token, rows, slot, row_tile, FIRST: gl.constexpr, HEADS: gl.constexpr, ROW_TILES: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """256 columns of 64 query rows, from column FIRST on, to where the item's result belongs."""
    out, partial, out_token_stride, out_head_stride = outputs
    row = row_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, HALF))
    column = FIRST + gl.arange(0, 256, gl.SliceLayout(0, HALF))
    if slot < 0:
        where = (token + row // HEADS).to(gl.int64) * out_token_stride + row % HEADS * out_head_stride
        gl.store(out + where[:, None] + column[None, :], acc.to(gl.bfloat16), mask=(row < rows)[:, None])
    else:
        base = slot.to(gl.int64) * (ROW_TILES * 64)
        gl.store(partial + (base + row)[:, None] * 512 + column[None, :], acc)


@jit
def _left(
    descs, fp8, steps, outputs, shared, bars, FP8: gl.constexpr, HEADS: gl.constexpr, ROW_TILES: gl.constexpr
):  # fmt: skip
    """Fetches all, and sums the first 256 columns."""
    q_desc, q_pe_desc, latent_desc, rope_desc = descs
    values, scales = fp8
    group_start, items, page_table, max_pages = steps
    q, q_pe, ks, k_pes, probabilities, factors = shared
    q_fetched, fetched, shrunk, given, taken, freed = bars
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, HALF)
    row_tile = gl.program_id(0) % ROW_TILES
    group = gl.program_id(0) // ROW_TILES
    tick = 0
    turn = 0
    for item in range(gl.load(group_start + group), gl.load(group_start + group + 1)):
        first = gl.load(items + item * 8)
        end = gl.load(items + item * 8 + 1)
        slot = gl.load(items + item * 8 + 2)
        token = gl.load(items + item * 8 + 3)
        rows = gl.load(items + item * 8 + 4) * HEADS
        pages = page_table + gl.load(items + item * 8 + 6) * max_pages
        if row_tile * 64 < rows:
            acc = gl.zeros((64, 256), gl.float32, HALF)
            if first < end:
                mbarrier.expect(q_fetched, 64 * 1152)
                tma.async_copy_global_to_shared(q_desc, [token * HEADS + row_tile * 64, 0], q_fetched, q)
                tma.async_copy_global_to_shared(q_pe_desc, [token * HEADS + row_tile * 64, 0], q_fetched, q_pe)
                for i in gl.static_range(2):
                    half = (tick + i) % 2
                    k, bar, wanted = ks.index(half), fetched.index(half), first + i < end
                    page = gl.load(pages + gl.minimum(first + i, end - 1))
                    _fetch(latent_desc, rope_desc, page, bar, k, k_pes.index(half), wanted, FP8)
                    if FP8:
                        _put(k, *_load_fp8(values, scales, page), bar, wanted)
            for tile in range(first, end):
                half = tick % 2
                k, bar, wanted = ks.index(half), fetched.index(half), tile + 2 < end
                page = gl.load(pages + gl.minimum(tile + 2, end - 1))
                if FP8:
                    a, b, c, d, scale_a, scale_b, scale_c, scale_d = _load_fp8(values, scales, page)
                mbarrier.wait(shrunk, turn & 1)
                acc = acc * factors.load(ROW)[:, None]
                mbarrier.wait(given, tick & 1)
                running = hopper.warpgroup_mma(probabilities, k.slice(0, 256, dim=1), acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(0, deps=[running])
                _barrier()
                mbarrier.arrive(taken, count=1)
                mbarrier.wait(freed.index(half), tick // 2 & 1)
                _fetch(latent_desc, rope_desc, page, bar, k, k_pes.index(half), wanted, FP8)
                if FP8:
                    _put(k, a, b, c, d, scale_a, scale_b, scale_c, scale_d, bar, wanted)
                tick += 1
                turn += 1
            mbarrier.wait(shrunk, turn & 1)
            acc = acc * factors.load(ROW)[:, None]
            _barrier()
            mbarrier.arrive(taken, count=1)
            turn += 1
            _write(acc, outputs, token, rows, slot, row_tile, 0, HEADS, ROW_TILES, HALF)


@jit
def _shrink(factor_of_row, factors, shrunk, taken, turn):
    """To the left group, once it has taken what it was given before."""
    mbarrier.wait(taken, (turn & 1) ^ 1)
    factors.store(factor_of_row)
    _barrier()
    mbarrier.arrive(shrunk, count=1)


@jit
def _right(
    steps, outputs, lse, partial_lse, factor, shared, bars, HEADS: gl.constexpr, ROW_TILES: gl.constexpr
):  # fmt: skip
    """Scores, softmax, and the sums of the other 256 columns."""
    group_start, items, page_table, max_pages = steps
    q, q_pe, ks, k_pes, probabilities, factors = shared
    q_fetched, fetched, shrunk, given, taken, freed = bars
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    row_tile = gl.program_id(0) % ROW_TILES
    group = gl.program_id(0) // ROW_TILES
    row = row_tile * 64 + gl.arange(0, 64, ROW)
    tick = 0
    turn = 0
    q_phase = 0
    for item in range(gl.load(group_start + group), gl.load(group_start + group + 1)):
        first = gl.load(items + item * 8)
        end = gl.load(items + item * 8 + 1)
        slot = gl.load(items + item * 8 + 2)
        token = gl.load(items + item * 8 + 3)
        q_len = gl.load(items + item * 8 + 4)
        kv_len = gl.load(items + item * 8 + 5)
        rows = q_len * HEADS
        least = kv_len - q_len + 1
        limit = least + row // HEADS
        if row_tile * 64 < rows:
            acc = gl.zeros((64, 256), gl.float32, HALF)
            total = gl.zeros((64,), gl.float32, ROW)
            m = gl.full((64,), float("-inf"), gl.float32, ROW)
            if first < end:
                mbarrier.wait(q_fetched, q_phase)
                q_phase ^= 1
                half = tick % 2
                mbarrier.wait(fetched.index(half), tick // 2 & 1)
                s = hopper.warpgroup_mma_wait(0, deps=[_scores(q, q_pe, ks.index(half), k_pes.index(half), S)])
                for tile in range(first, end):
                    half = tick % 2
                    tick += 1
                    other = tick % 2
                    k = ks.index(half)
                    s = _mask(s, tile, kv_len, limit, least, k, S)
                    new = gl.maximum(m, gl.max(s, axis=1))
                    shift = gl.where(new == float("-inf"), 0.0, new * factor)
                    shrink = gl.exp2(m * factor - shift)
                    m = new
                    _shrink(shrink, factors, shrunk, taken, turn)
                    turn += 1
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, HALF))[:, None]
                    p = gl.exp2(s * factor - shift[:, None])
                    probabilities.store(p.to(gl.bfloat16))
                    hopper.fence_async_shared()
                    _barrier()
                    mbarrier.arrive(given, count=1)
                    running = hopper.warpgroup_mma(probabilities, k.slice(256, 256, dim=1), acc, is_async=True)
                    if tile + 1 < end:
                        mbarrier.wait(fetched.index(other), tick // 2 & 1)
                        pending = _scores(q, q_pe, ks.index(other), k_pes.index(other), S)
                        total = total * shrink + gl.sum(p, axis=1)
                        acc = hopper.warpgroup_mma_wait(2, deps=[running])
                        _barrier()
                        mbarrier.arrive(freed.index(half), count=1)
                        s = hopper.warpgroup_mma_wait(0, deps=[pending])
                    else:
                        total = total * shrink + gl.sum(p, axis=1)
                        acc = hopper.warpgroup_mma_wait(0, deps=[running])
                        _barrier()
                        mbarrier.arrive(freed.index(half), count=1)
            divisor = gl.where(total > 0, total, 1.0)
            _shrink(1 / divisor, factors, shrunk, taken, turn)
            turn += 1
            natural = gl.where(total > 0, (m * factor + gl.log2(divisor)) * 0.6931471805599453, float("-inf"))
            acc = acc * gl.convert_layout(1 / divisor, gl.SliceLayout(1, HALF))[:, None]
            _write(acc, outputs, token, rows, slot, row_tile, 256, HEADS, ROW_TILES, HALF)
            if slot < 0:
                gl.store(lse + token * HEADS + row, natural, mask=row < rows)
            else:
                gl.store(partial_lse + slot.to(gl.int64) * (ROW_TILES * 64) + row, natural)


@jit
def decode_kernel(
    q_desc, q_pe_desc, latent_desc, rope_desc, values, scales, out, lse, partial, partial_lse,
    group_start, items, page_table, max_pages, out_token_stride, out_head_stride, factor,
    FP8: gl.constexpr, HEADS: gl.constexpr, ROW_TILES: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = (
        gl.allocate_shared_memory(gl.bfloat16, [64, 512], SHARED),  # q
        gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED),  # q_pe
        gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SHARED),  # ks
        gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED),  # k_pes
        gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED),  # probabilities
        gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0])),  # factors
    )
    q_fetched = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    fetched = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    shrunk = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    given = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    freed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(q_fetched, count=1)
    mbarrier.init(shrunk, count=1)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=1)
    for half in gl.static_range(2):
        mbarrier.init(fetched.index(half), count=2 if FP8 else 1)
        mbarrier.init(freed.index(half), count=1)
    bars = (q_fetched, fetched, shrunk, given, taken, freed)
    descs, fp8 = (q_desc, q_pe_desc, latent_desc, rope_desc), (values, scales)
    steps, outputs = (group_start, items, page_table, max_pages), (out, partial, out_token_stride, out_head_stride)
    gdc_wait()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_left, (descs, fp8, steps, outputs, shared, bars, FP8, HEADS, ROW_TILES)),
            (_right, (steps, outputs, lse, partial_lse, factor, shared, bars, HEADS, ROW_TILES)),
        ],
        worker_num_warps=[4],
        worker_num_regs=[240],
    )
