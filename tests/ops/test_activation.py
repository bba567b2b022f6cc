"""SiLU·mul, quantised, on dense, padded and contiguous rows."""

from __future__ import annotations

import pytest
import torch

from moelab.ops.activation import silu_mul, silu_mul_quantize
from moelab.ops.checks import OpError
from moelab.ops.layout import FORMATS, dequantize_rows, segment_starts, unpack_ue8m0
from tests.ops.fp8_checks import POISON, assert_rounds, poisoned_pair

COUNTS = [0, 3, 0, 5, 1, 0]  # empty experts at both ends, a full one
ROOM = 5


def draw(layout, intermediate, dtype, counts=COUNTS, room=ROOM):
    """(gate_up with NaN wherever no row is, counts or None, mask of the rows that are)."""
    counts = torch.tensor(counts, dtype=torch.int32)
    if layout == "dense":
        mask, shape = torch.ones(room, dtype=torch.bool), (room,)
    elif layout == "padded":
        mask, shape = torch.arange(room) < counts[:, None], (len(counts), room)
    else:
        mask, shape = torch.zeros(int((counts + 127).div(128, rounding_mode="floor").sum()) * 128 + 3).bool(), None
        for start, count in zip(segment_starts(counts).tolist(), counts.tolist(), strict=True):
            mask[start : start + count] = True
        shape = tuple(mask.shape)
    gate_up = torch.full((*shape, 2 * intermediate), float("nan"))
    gate_up[mask] = torch.randn(int(mask.sum()), 2 * intermediate) * torch.tensor([8.0, 3.0]).repeat_interleave(
        intermediate
    )
    return gate_up.to(dtype), None if layout == "dense" else counts, mask


def check(gate_up, counts, mask, scale_format, device):
    intermediate = gate_up.shape[-1] // 2
    out = poisoned_pair((*gate_up.shape[:-1], intermediate), scale_format, device)
    got = silu_mul_quantize(gate_up.to(device), None if counts is None else counts.to(device), scale_format, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    values, scales = got[0].cpu(), got[1].cpu()
    gate, up = gate_up[mask].double().chunk(2, -1)
    want = gate * torch.sigmoid(gate) * up
    back = dequantize_rows(values, scales)[mask]
    untouched = scales[~mask]
    assert (untouched == POISON).all() if scale_format == "ue8m0" else untouched.isnan().all()
    assert values[~mask].float().isnan().all()
    if scale_format == "ue8m0":
        scales = unpack_ue8m0(scales, -(-intermediate // 128))
    scales = scales[mask]
    # amax lands within float32's error on 448 (or, of a power of two, in the upper half below it)
    groups = torch.nn.functional.pad(want, (0, -intermediate % 128)).unflatten(-1, (-1, 128))
    ratio = scales.double() * 448 / groups.abs().amax(-1).clamp(min=1e-4)
    assert (ratio > 1 - 1e-5).all() and (ratio < (2 if scale_format == "ue8m0" else 1) + 1e-5).all()
    assert_rounds(back, want, scales, 1e-5)


@pytest.mark.parametrize("layout", ["dense", "padded", "contiguous"])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_the_reference(layout, scale_format, monkeypatch):
    monkeypatch.setattr("moelab.ops.activation.runs_on", lambda kernel, tensor: False)
    check(*draw(layout, 300, torch.bfloat16), scale_format, torch.device("cpu"))


@pytest.mark.parametrize("layout", ["dense", "padded", "contiguous"])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(
    ("intermediate", "dtype"),
    [(512, torch.bfloat16), (100, torch.bfloat16), (2200, torch.float32)],
)
def test_kernel(device, intermediate, dtype, scale_format, layout):
    check(*draw(layout, intermediate, dtype), scale_format, device)


def test_counts_of_nothing_and_counts_beyond_the_room(device):
    gate_up, _, mask = draw("padded", 128, torch.float32)
    check(gate_up, torch.zeros(6, dtype=torch.int32), torch.zeros_like(mask), "row", device)
    gate_up, counts, mask = draw("padded", 128, torch.float32, counts=[2, 5, 3])
    check(gate_up, torch.where(counts == 5, 9, counts).to(torch.int32), mask, "column_tma", device)


def test_nan_and_infinity_spoil_their_group(device):
    gate_up, counts, _ = draw("padded", 256, torch.float32, counts=[3])
    gate_up[0, 0, 3], gate_up[0, 1, 256 + 200] = float("nan"), float("inf")
    back = dequantize_rows(*silu_mul_quantize(gate_up.to(device), counts.to(device)))[0, :3].cpu()
    spoilt = torch.zeros(3, 256, dtype=torch.bool)
    spoilt[0, :128] = spoilt[1, 128:] = True
    assert torch.equal(back.isnan(), spoilt)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["padded", "contiguous"])
@pytest.mark.parametrize("experts", [1, 32, 256])
def test_more_rows_than_programs(gpu, experts, layout):
    room = 6000 if experts == 1 else 70
    counts = torch.randint(0, room + 1, (experts,)).tolist()
    check(*draw(layout, 640, torch.bfloat16, counts, room), "column_tma", gpu)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_counts(gpu):
    gate_up = torch.randn(4, 64, 512, device=gpu, dtype=torch.bfloat16)
    counts = torch.zeros(4, dtype=torch.int32, device=gpu)
    out = poisoned_pair((4, 64, 256), "column_tma", gpu)
    silu_mul_quantize(gate_up, counts, "column_tma", out=out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        silu_mul_quantize(gate_up, counts, "column_tma", out=out)
    for new in ([3, 0, 64, 1], [0, 7, 0, 64]):
        counts.copy_(torch.tensor(new))
        gate_up.normal_()
        out[0].view(torch.uint8).fill_(0x7F)
        graph.replay()
        mask = torch.arange(64, device=gpu) < counts[:, None]
        want = silu_mul_quantize(gate_up, counts, "column_tma")
        assert torch.equal(out[0][mask].float(), want[0][mask].float()) and torch.equal(out[1][mask], want[1][mask])
        assert out[0][~mask].float().isnan().all()


@pytest.mark.gpu
def test_offsets_beyond_32_bits(gpu):
    gate_up = torch.empty(160, 4096, 4096, dtype=torch.bfloat16, device=gpu)  # 2.7e9 values
    gate_up[-1, :3].normal_()
    counts = torch.zeros(160, dtype=torch.int32, device=gpu)
    counts[-1] = 3
    values, scales = silu_mul_quantize(gate_up, counts, "column_tma")
    want = silu_mul_quantize(gate_up[-1, :3], scale_format="column_tma")
    assert torch.equal(values[-1, :3].float(), want[0].float()) and torch.equal(scales[-1, :3], want[1])


def test_the_plain_form_rounds_as_torch_does():
    gate_up = torch.randn(4, 256, dtype=torch.bfloat16)
    gate, up = gate_up[:, :128].float(), gate_up[:, 128:]
    want = (gate / (1 + (-gate).exp())).to(torch.bfloat16) * up
    torch.testing.assert_close(silu_mul(gate_up), want, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("gate_up", "counts", "message"),
    [
        (torch.zeros(4, 256, dtype=torch.float16), None, "gate_up's dtype is float16: accepted: bfloat16 or float32"),
        (torch.zeros(256), None, r"gate_up's shape is \[256\]: accepted: \[M, 2·I\]"),
        (torch.zeros(4, 257), None, "gate_up's last size is 257: accepted: 2·I"),
        (torch.zeros(2, 4, 256), None, r"counts is None: accepted: int32 \[E\]"),
        (torch.zeros(2, 4, 256), torch.zeros(3, dtype=torch.int32), r"counts's shape is \[3\]: accepted: \[2\]"),
        (torch.zeros(2, 4, 256), torch.zeros(2, dtype=torch.int64), "counts's dtype is int64: accepted: int32"),
        (torch.zeros(2, 8, 256)[:, :4], torch.zeros(2, dtype=torch.int32), "gate_up's strides .* one after another"),
    ],
)
def test_what_is_refused(gate_up, counts, message):
    with pytest.raises(OpError, match=message):
        silu_mul_quantize(gate_up, counts)
