"""SwiGLU's middle: silu(gate) · up, on the output of the merged gate-and-up projection; and the same, quantised.

`silu_mul_quantize` feeds the down projection of the experts, so it reads the expert side's layouts and writes FP8 rows
with scales in the GEMM's format (`moelab.ops.layout`). How many rows are populated only the device knows. A launch of
one program per possible row would mostly start programs that find nothing to do: with 32 experts, room for 1024 rows
each and 8 rows used, 127 of 128. Instead a fixed number of programs, P, share the populated rows: every program sums
the counts itself, takes the populated rows program, program + P, program + 2·P, … and finds where the n-th one stands:

    row(n) = n + Σ_{e: end(e) ≤ n} gap(e),    end = inclusive prefix sum of counts,    gap(e) = room(e) − counts(e)

with room(e) = M in the padded layout, and counts(e) rounded up to 128 in the contiguous one. Time goes with populated
rows, nothing is read by the host, and a captured graph follows the counts of each replay.

With few rows what counts is how soon a program knows its first one. In the padded layout it needs no sum for that: the
first ⌊P/E⌋ rows of every expert are handed out by number, row ⌊p/E⌋ of expert p mod E to program p, which asks only
whether that expert has so many. The sums above are then those of the rows that are left, made after the first row, and
only if there are any.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from moelab.ops.checks import check_tensor, require
from moelab.ops.early_launch import launches_early
from moelab.ops.fp8 import BLOCK, num_blocks
from moelab.ops.jit import jit, runs_on, tl, triton
from moelab.ops.layout import segment_starts
from moelab.ops.multiprocessors import num_programs
from moelab.ops.quantize import DTYPES, Quantized, prepare, quantize_groups, store_scales, write_reference

# On an H200 8 programs of 4 warps an SM took 2.81, 7.52 and 46.6 µs for 256, 2048 and 16384 populated rows of 2048; 10
# took 2.83, 8.0 and 43.2, 16 took 3.43, 7.31 and 44.1: more programs move more bytes at once, but each of them costs
# its start.
PROGRAMS_PER_SM = 8


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2·I], gate in the first half -> [..., I] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def silu_mul_quantize(
    gate_up: Tensor,
    counts: Tensor | None = None,
    scale_format: str = "row",
    power_of_two: bool = False,
    out: Quantized | None = None,
) -> Quantized:
    """silu(gate) · up in float32, rounded once, to FP8 with 1 × 128 scales as `quantize_rows` gives them.

    gate_up bfloat16 or float32, in one of three layouts -> (values float8_e4m3fn [..., I], scales):

    - [M, 2·I] without counts: every row;
    - padded: [E, M, 2·I], counts int32 [E]: the first counts[e] ≤ M rows of each expert;
    - contiguous: [M, 2·I], counts int32 [E]: expert e's rows begin at `segment_starts(counts)[e]`.

    Rows beyond the counts are neither read nor written. Counts stay on the device. `out`: a pair to write into, as
    returned. CUDA tensors take the kernel. Raises OpError for a dtype, shape, stride or device that is not accepted.
    """
    shape = _check(gate_up, counts)
    pair = prepare(shape, gate_up, scale_format, out)
    power_of_two = power_of_two or scale_format == "ue8m0"
    if not runs_on(_silu_mul_kernel, gate_up):
        return _reference(gate_up, counts, power_of_two, pair)
    values, scales = pair
    room, columns = shape[-2:]
    config, early = _config(columns), launches_early(gate_up)
    chunks = triton.cdiv(columns, config["GROUPS"] * BLOCK)
    padded = len(shape) == 3
    experts = 1 if counts is None else counts.numel()
    items = room * chunks  # of an expert if padded, else of the buffer
    if items and experts:
        programs = num_programs(gate_up.device, PROGRAMS_PER_SM, interpreted=13)
        grid = (experts, max(1, min(items, programs // experts))) if padded else (1, min(items, programs))
        _silu_mul_kernel[grid](
            gate_up, counts, values, scales, gate_up.stride(-2), values.stride(-2),
            scales.stride(0) if padded else 0, *scales.stride()[-2:], experts, room, columns, chunks,
            EXPERTS=triton.next_power_of_2(experts), PADDED=padded, POWER_OF_TWO=power_of_two,
            PACKED=scale_format == "ue8m0", EARLY=early, CUDA=gate_up.is_cuda, launch_pdl=early, **config,
        )  # fmt: skip
    return pair


def _check(gate_up: Tensor, counts: Tensor | None) -> torch.Size:
    """The shape of the result."""
    require(isinstance(gate_up, Tensor), "gate_up", f"a {type(gate_up).__name__}", "a tensor")
    stacked = gate_up.dim() == 3
    check_tensor("gate_up", gate_up, ("E", "M", "2·I") if stacked else ("M", "2·I"), DTYPES)
    require(gate_up.shape[-1] % 2 == 0, "gate_up's last size", gate_up.shape[-1], "2·I, gate and up halves")
    if stacked:
        uniform = gate_up.stride(0) == gate_up.shape[1] * gate_up.stride(1)
        require(uniform, "gate_up's strides", gate_up.stride(), "experts one after another; call .contiguous()")
        require(counts is not None, "counts", None, "int32 [E] with gate_up [E, M, 2·I]")
    if counts is not None:
        check_tensor("counts", counts, (gate_up.shape[0] if stacked else "E",), (torch.int32,), gate_up)
    return torch.Size((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _reference(gate_up: Tensor, counts: Tensor | None, power_of_two: bool, out: Quantized) -> Quantized:
    for part in _populated(gate_up, counts):
        write_reference(_float_silu_mul(gate_up[part]), power_of_two, (out[0][part], out[1][part]))
    return out


def _float_silu_mul(gate_up: Tensor) -> Tensor:
    return silu_mul(gate_up.float())


def _populated(gate_up: Tensor, counts: Tensor | None) -> list[tuple]:
    """Where rows are, one index per expert."""
    if counts is None:
        return [(slice(None),)]
    if gate_up.dim() == 3:
        return [(expert, slice(0, count)) for expert, count in enumerate(counts.tolist())]
    starts = segment_starts(counts).tolist()
    return [(slice(start, start + count),) for start, count in zip(starts, counts.tolist(), strict=True)]


def _config(columns: int) -> dict[str, int]:
    """A row of V3's experts, I = 2048, is one item of 4 warps: four 16-byte loads a thread in flight."""
    groups = min(16, max(4, triton.next_power_of_2(num_blocks(columns))))
    return {"GROUPS": groups, "num_warps": groups // 4}


@jit
def _sigmoid(x, CUDA: tl.constexpr):
    """1 / (1 + exp(−x)) to a few units in the last place; below −87.3, where that is denormal, 0, which only an `up`
    above 1e26 would show. As PTX: x · sigmoid(x) is then five instructions, against twelve of Triton's division."""
    if CUDA:
        return tl.inline_asm_elementwise(
            "{ mul.f32 $0, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, $0; add.f32 $0, $0, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, $0; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@jit
def _ask_l2(addresses):
    """Ask for the lines at `addresses` to be in the L2; nothing is read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def _silu_mul_kernel(
    gate_up, counts, values, scales, gate_stride, values_stride, scales_stack_stride, scales_row_stride,
    scales_column_stride, num_experts, room, num_columns, chunks,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, POWER_OF_TWO: tl.constexpr, PACKED: tl.constexpr,
    GROUPS: tl.constexpr, EARLY: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """An item is GROUPS groups of one populated row. `room` is M: rows of an expert if PADDED, else of the buffer. The
    grid is [experts, turns] if PADDED, else [1, programs]: no division tells a program its first row."""
    mine, turn = tl.program_id(0), tl.program_id(1)
    step = tl.num_programs(0) * tl.num_programs(1)
    item = turn * tl.num_programs(0) + mine
    expert = tl.arange(0, EXPERTS)
    if EARLY:
        if counts is not None:
            if item == 0:  # one for all, and before the wait: 2.81 instead of 3.02 µs at 256 rows on an H200
                _ask_l2(counts + tl.minimum(expert, num_experts - 1))
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The row of `stack`, at first of the program's own expert, and what else there is to do: items up to `total`.
    row, stack, chunk, handed_out = -1, mine, 0, 0
    total = room * chunks
    if counts is not None:
        left = tl.load(counts + expert, mask=expert < num_experts, other=0)
        if PADDED:
            have = tl.load(counts + mine)
            number, chunk = turn // chunks, turn % chunks
            handed_out = tl.num_programs(1) // chunks  # rows of each expert, by number
            # A count beyond the room must not reach the next expert.
            row = tl.where(number < tl.minimum(tl.minimum(have, room), handed_out), mine * room + number, -1)
            left = tl.maximum(tl.minimum(left, room) - handed_out, 0)
        total = tl.sum(left) * chunks
        gap, end = left, left  # until they are needed
    summed = False
    # A `for` over device values fails in the interpreter of Triton 3.6 with NumPy 2.4.
    while (row >= 0) | (item < total):
        if row >= 0:
            group = chunk * GROUPS + tl.arange(0, GROUPS)
            column = (group[:, None] * 128 + tl.arange(0, 128)[None, :])[None, :, :]
            inside = column < num_columns
            source = gate_up + row.to(tl.int64) * gate_stride + column
            gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(source + num_columns, mask=inside, other=0.0).to(tl.float32)
            scaled, scale = quantize_groups(gate * _sigmoid(gate, CUDA) * up, POWER_OF_TWO)
            where = values + row.to(tl.int64) * values_stride + column
            tl.store(where, scaled.to(values.dtype.element_ty), mask=inside)
            rows = (row - stack * room + tl.arange(0, 1)).to(tl.int64)
            store_scales(
                scales + stack.to(tl.int64) * scales_stack_stride, scale, rows, group, rows < room, scales_row_stride,
                scales_column_stride, tl.cdiv(num_columns, 128), PACKED,
            )  # fmt: skip
        row, chunk = -1, item % chunks
        if item < total:
            row = item // chunks
            if counts is not None:
                if not summed:
                    summed = True
                    end = tl.cumsum(left, 0)
                    if PADDED:
                        gap = tl.where(expert < num_experts, room - left, 0)
                    else:
                        gap = (left + 127) // 128 * 128 - left
                if PADDED:
                    stack = tl.sum((end <= row).to(tl.int32))
                row += tl.sum(tl.where(end <= row, gap, 0)) + handed_out
                if not PADDED:
                    row = tl.where(row < room, row, -1)  # counts of more than the buffer holds
            item += step
