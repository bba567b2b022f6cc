"""Block-FP8 grouped GEMM, padded and contiguous, by Triton, by DeepGEMM and by plain torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moelab.ops import deep_gemm
from moelab.ops import grouped_gemm_fp8 as op
from moelab.ops.checks import OpError
from moelab.ops.choice import Choice
from moelab.ops.grouped_gemm_fp8 import Config, default_config, expert_of_row, grouped_gemm_fp8
from moelab.ops.layout import empty_scales, segment_starts
from tests.ops.grouped_checks import assert_product, draw, poisoned_out

COUNTS = [0, 3, 0, 20, 1, 0]  # empty experts at both ends, a full one
ROOM = 20
SMALL = Config(64, 16, 3, 4, 1, 1)  # a tile in every program's share, even of a single step


def check(inputs, backend="triton", untouched=True, mask=None, **how):
    rows, weight, counts, populated = inputs
    out = poisoned_out(rows, weight)
    assert grouped_gemm_fp8(rows, weight, counts, out, backend=backend, **how) is out
    assert_product(out, rows, weight, counts, populated if mask is None else mask, untouched)
    return out


@pytest.mark.parametrize("layout", ["padded", "contiguous"])
@pytest.mark.parametrize("scale_format", ["row", "column_tma"])
def test_the_reference(layout, scale_format, monkeypatch):
    monkeypatch.setattr("moelab.ops.grouped_gemm_fp8.runs_on", lambda kernel, tensor: False)
    room = ROOM if layout == "padded" else None
    check(draw(layout, COUNTS, 200, 272, "cpu", room, scale_format), backend="auto")


@pytest.mark.parametrize("layout", ["padded", "contiguous"])
@pytest.mark.parametrize("scale_format", ["row", "column_tma"])
@pytest.mark.parametrize(
    ("n", "k", "config"),
    [
        (200, 272, SMALL),  # tails of N and K
        (128, 384, Config(128, 32, 3, 4, 2, 0)),  # whole tiles only
        (64, 128, SMALL),  # a single step: nothing to cut
        (320, 1040, Config(128, 16, 4, 4, 1, 2)),
    ],
)
def test_kernel(device, n, k, config, scale_format, layout):
    room = ROOM if layout == "padded" else None
    check(draw(layout, COUNTS, n, k, device, room, scale_format), config=config)


@pytest.mark.parametrize("layout", ["padded", "contiguous"])
def test_no_rows_at_all(device, layout):
    rows, weight, counts, mask = draw(layout, [0, 0, 0], 128, 256, device, 128)
    out = check((rows, weight, counts, mask), config=SMALL)
    assert out.isnan().all()
    rows, weight, counts, mask = draw(layout, [0, 0, 0], 128, 256, device, 0)
    assert grouped_gemm_fp8(rows, weight, counts).numel() == 0


@pytest.mark.parametrize("layout", ["padded", "contiguous"])
def test_counts_beyond_the_room_stand_for_the_room(device, layout):
    room = 18 if layout == "padded" else 2 * 128 + 18
    rows, weight, counts, mask = draw(layout, [2, 18, 18], 128, 256, device, room)
    counts[2 if layout == "contiguous" else 1] = 1000
    check((rows, weight, counts, mask), config=SMALL)
    counts[0] = -5  # nobody should; but it must not reach out of the buffer
    mask[(0,) if layout == "padded" else slice(0, 128)] = False
    if layout == "padded":
        check((rows, weight, counts, mask), config=SMALL)


def test_the_same_bits_on_every_run_and_counters_back_at_zero(device, monkeypatch):
    inputs = draw("padded", [5, 16, 1], 192, 1152, device, 16)
    counters = torch.zeros(1024, dtype=torch.int32, device=device)
    monkeypatch.setattr(op, "counters", lambda on: counters)
    first = check(inputs, config=Config(64, 16, 3, 4, 1, 2))
    assert not counters.any()
    again = check(inputs, config=Config(64, 16, 3, 4, 1, 2))
    assert torch.equal(first.nan_to_num(), again.nan_to_num())


def test_where_rows_belong(device):
    counts = torch.tensor([0, 3, 0, 128, 129, 0, 1, 0], dtype=torch.int32)
    for rows in (0, 1, 130, 5 * 128, 5 * 128 + 70):
        got = expert_of_row(counts.to(device), rows).cpu()
        want = torch.full((rows,), -1, dtype=torch.int32)
        for e, (start, count) in enumerate(zip(segment_starts(counts).tolist(), counts.tolist(), strict=True)):
            want[start : start + count] = e
        assert torch.equal(got, want)


@pytest.mark.parametrize(("layout", "table"), [((4, 256, 384), op.PADDED), ((1024, 384), op.CONTIGUOUS)])
def test_what_runs_is_what_the_table_says(monkeypatch, layout, table):
    asked, found = [], {}

    def pick(name, device, n, k, m, groups, backends):
        asked.append((name, n, k, m, groups, backends))
        return next((found[b] for b in backends if b in found), None)

    monkeypatch.setattr(op.choice, "pick", pick)
    monkeypatch.setattr(op.deep_gemm, "reason", lambda: None)
    w = SimpleNamespace(shape=(4, 256, 384))

    def choose(backend="auto", config=None, shape=layout, expected_m=16, scale_format="column_tma"):
        values = SimpleNamespace(shape=shape, dim=lambda: len(shape), is_cuda=True, device="cuda")
        return op._choose(backend, config, (values, empty_scales(shape, scale_format, "meta")), w, expected_m)

    assert choose() == ("triton", default_config(16))
    assert asked[-1] == (table, 256, 384, 16, 4, ("deep_gemm", "triton"))
    assert choose(expected_m=128)[0] == "deep_gemm" and choose("triton", expected_m=128)[0] == "triton"
    found["triton"] = Choice("triton", str(SMALL), 1.0)
    assert choose() == ("triton", SMALL) and choose(config=default_config(64)) == ("triton", default_config(64))
    found["deep_gemm"] = Choice("deep_gemm", "", 0.5)
    assert choose() == ("deep_gemm", None) and choose("triton") == ("triton", SMALL)
    uneven = (*layout[:-2], layout[-2] + 64, 384)  # a tile of DeepGEMM could hang over the end of the room
    assert choose(shape=uneven) == choose(scale_format="row") == ("triton", SMALL)
    with pytest.raises(OpError, match=r"rows\[0\]'s [MR] is \d+: accepted: a multiple of 128 with backend 'deep_gemm'"):
        choose("deep_gemm", shape=uneven)
    with pytest.raises(OpError, match=r"rows\[1\]'s strides .* the format column_tma with backend 'deep_gemm'"):
        choose("deep_gemm", scale_format="row")
    monkeypatch.setattr(op.deep_gemm, "reason", lambda: "not here")
    assert choose() == ("triton", SMALL)


# What only a GPU can show.


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["padded", "contiguous"])
@pytest.mark.parametrize(
    ("counts", "m"),
    [
        ([1, 1], 1),
        ([0, 2, 0, 0, 1, 0, 0, 4], 1),
        ([7] * 32, 8),
        ([0] * 31 + [256], 16),
        ([40, 0, 200, 256, 1, 16, 17, 130], 64),
        ([256, 255], 256),
    ],
)
@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (7168, 2048)])
@pytest.mark.parametrize("backend", ["auto", "triton", "deep_gemm"])
def test_the_shapes_of_deepseek_v3(gpu, backend, n, k, counts, m, layout):
    if backend == "deep_gemm" and deep_gemm.reason():
        pytest.skip(deep_gemm.reason())
    room = 256 if layout == "padded" else (sum(-(-c // 128) for c in counts) + 1) * 128
    inputs = draw(layout, counts, n, k, gpu, room)
    check(inputs, backend, expected_m=m, untouched=backend == "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 24, 60, 100, 200])
@pytest.mark.parametrize("least", [0, 1, 4])
def test_every_default_tile_with_every_way_to_share(gpu, m, least):
    config = default_config(m)
    config = Config(config.block_n, config.block_m, config.stages, config.warps, config.per_sm, least)
    assert Config.parse(str(config)) == config
    counts = torch.randint(0, 2 * m, (9,)).tolist()
    check(draw("padded", counts, 712, 2064, gpu, 2 * m), config=config)


HOPPER = ["h128x128/s6w8p1l7", "h64x64/s6w4p2l4", "h128x16/s6w4p2l0", "h64x32/s8w4p2l6", "h64x16/s10w4p2l8"]


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "scale_format"), [("padded", "column_tma"), ("contiguous", "row")])
@pytest.mark.parametrize("config", HOPPER)
def test_the_kernel_in_gluon(gpu, config, scale_format, layout):
    config = Config.parse(config)
    for counts in ([0, 3, 0, 200, 1, 0], [0, 0, 0], [130] * 32, [1]):
        for n, k in ((200, 1024), (4096, 2304)):
            room = 200 if layout == "padded" else None
            check(draw(layout, counts, n, k, gpu, room, scale_format), config=config)
    with pytest.raises(OpError, match="config is 'h.*one without h, but on Hopper with K a multiple of 128"):
        check(draw(layout, [3], 128, 272, gpu, 128, scale_format), config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", HOPPER)
def test_the_kernel_in_gluon_when_counts_change_and_lie(gpu, config):
    rows, weight, counts, _ = draw("padded", [64] * 4, 1000, 2048, gpu, 64)
    out = poisoned_out(rows, weight)
    how = dict(out=out, backend="triton", config=Config.parse(config))
    grouped_gemm_fp8(rows, weight, counts, **how)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm_fp8(rows, weight, counts, **how)
    for new in ([3, 0, 64, 1], [0, 0, 0, 0], [0, 7, 0, 64], [1000, 64, -1, 64]):
        actual = [min(64, max(0, c)) for c in new]
        new_rows, _, _, mask = draw("padded", actual, 1000, 2048, gpu, 64)
        for old, fresh in zip((*rows, counts), (*new_rows, torch.tensor(new)), strict=True):
            old.copy_(fresh)
        results = []
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            results.append(out.clone())
        assert_product(out, rows, weight, torch.tensor(actual), mask)
        assert all(torch.equal(result[mask], out[mask]) for result in results)


@pytest.mark.gpu
def test_deep_gemm_stays_within_the_room_of_an_expert(gpu):
    if deep_gemm.reason():
        pytest.skip(deep_gemm.reason())
    rows, weight, counts, mask = draw("padded", [128, 1, 128], 256, 512, gpu, 128)
    counts[0] = 4000
    out = check((rows, weight, counts, mask), "deep_gemm", untouched=False)
    assert out[1, 128:].isnan().all()
    rows, weight, counts, mask = draw("padded", [3, 1], 256, 512, gpu, 64)
    with pytest.raises(OpError, match=r"rows\[0\]'s M is 64: accepted: a multiple of 128"):
        grouped_gemm_fp8(rows, weight, counts, backend="deep_gemm")
    check((rows, weight, counts, mask), "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "deep_gemm"])
@pytest.mark.parametrize("layout", ["padded", "contiguous"])
def test_a_captured_graph_follows_the_counts(gpu, layout, backend):
    if backend == "deep_gemm" and deep_gemm.reason():
        pytest.skip(deep_gemm.reason())
    room = 128 if layout == "padded" else 1024
    rows, weight, counts, _ = draw(layout, [128] * 4, 256, 1024, gpu, room)
    out = poisoned_out(rows, weight)
    how = dict(out=out, backend=backend, expected_m=16)
    if backend == "triton":
        how["config"] = Config(64, 16, 3, 4, 1, 1)
    grouped_gemm_fp8(rows, weight, counts, **how)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm_fp8(rows, weight, counts, **how)
    for new in ([3, 0, 128, 1], [0, 7, 0, 64], [0, 0, 0, 0], [128, 128, 128, 128]):
        new_rows, _, new_counts, mask = draw(layout, new, 256, 1024, gpu, room)
        for old, fresh in zip((*rows, counts), (*new_rows, new_counts), strict=True):
            old.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()
        assert_product(out, rows, weight, counts, mask, untouched=backend == "triton")


@pytest.mark.gpu
def test_launches_on_two_streams_do_not_share_counters(gpu):
    config = Config(64, 16, 3, 4, 1, 1)
    inputs = [draw("padded", [9, 16], 512, 7168, gpu, 16) for _ in range(2)]
    want = [grouped_gemm_fp8(*i[:3], backend="triton", config=config).nan_to_num() for i in inputs]
    outs = [poisoned_out(rows, weight) for rows, weight, *_ in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(200):
        for (rows, weight, counts, _), out, stream in zip(inputs, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                grouped_gemm_fp8(rows, weight, counts, out, backend="triton", config=config)
    torch.cuda.synchronize()
    for (*_, mask), got, expected in zip(inputs, outs, want, strict=True):
        assert torch.equal(got[mask], expected[mask])


@pytest.mark.gpu
def test_offsets_beyond_32_bits(gpu):
    counts = torch.zeros(160, dtype=torch.int32)
    counts[-1] = 3
    rows, weight, _, _ = draw("padded", [0] * 160, 4096, 128, gpu, 1)
    values = torch.empty(160, 4096, 128, device=gpu, dtype=torch.float8_e4m3fn)
    scales = torch.rand(160, 4096, 1, device=gpu)
    values[-1, :3] = torch.randn(3, 128, device=gpu).to(torch.float8_e4m3fn)
    out = torch.empty(160, 4096, 4096, dtype=torch.bfloat16, device=gpu)  # 2.7e9 values
    out[-1, :4] = float("nan")
    grouped_gemm_fp8((values, scales), weight, counts.to(gpu), out, backend="triton")
    last = (weight[0][-1:], weight[1][-1:])
    mask = torch.tensor([[True] * 3 + [False]], device=gpu)
    assert_product(out[-1:, :4], (values[-1:, :4], scales[-1:, :4]), last, counts[-1:].to(gpu), mask)


# Arguments.


def arguments(**changed):
    rows, weight, counts, _ = draw("padded", [2, 4], 256, 384, "cpu", 4, "row")
    given = dict(values=rows[0], scales=rows[1], w=weight[0], w_scales=weight[1], counts=counts, out=None) | changed
    return (given["values"], given["scales"]), (given["w"], given["w_scales"]), given["counts"], given["out"]


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(values=torch.zeros(2, 4, 384)), r"rows\[0\]'s dtype is float32: accepted: float8_e4m3fn"),
        (dict(values=torch.zeros(384).to(FP8)), r"rows\[0\]'s shape is \[384\]: accepted: \[R, K\]"),
        (dict(values=torch.zeros(2, 8, 384).to(FP8)[:, ::2]), r"rows\[0\]'s strides .* contiguous"),
        (dict(values=torch.zeros(2, 4, 384, device="meta", dtype=FP8)), r"weight\[0\]'s device is cpu: accepted: meta"),
        (dict(scales=torch.zeros(2, 4, 2)), r"rows\[1\]'s shape is \[2, 4, 2\]: accepted: \[2, 4, 3\]"),
        (dict(scales=torch.zeros(2, 4, 3, dtype=torch.int32)), r"rows\[1\]'s dtype is torch.int32: accepted: float32"),
        (dict(scales=torch.zeros(2, 3, 5).mT[:, :4]), r"rows\[1\]'s strides .* \(row\) or .* \(column_tma\)"),
        (dict(w=torch.zeros(3, 256, 384).to(FP8)), r"weight\[0\]'s shape is \[3, 256, 384\]: accepted: \[2, N, 384\]"),
        (dict(w=torch.zeros(2, 384, 256).to(FP8).mT), r"weight\[0\]'s strides"),
        (dict(w_scales=torch.zeros(2, 3, 3)), r"weight\[1\]'s shape is \[2, 3, 3\]: accepted: \[2, 2, 3\]"),
        (dict(w_scales=torch.zeros(2, 2, 3).double()), r"weight\[1\]'s dtype is float64: accepted: float32"),
        (dict(counts=torch.zeros(3, dtype=torch.int32)), r"counts's shape is \[3\]: accepted: \[2\]"),
        (dict(counts=torch.zeros(2, dtype=torch.int64)), "counts's dtype is int64: accepted: int32"),
        (dict(out=torch.zeros(2, 4, 256)), "out's dtype is float32: accepted: bfloat16"),
        (dict(out=torch.zeros(2, 4, 128).bfloat16()), r"out's shape is \[2, 4, 128\]: accepted: \[2, 4, 256\]"),
        (dict(out=torch.zeros(2, 8, 256).bfloat16()[:, :4]), "out's strides"),
    ],
)
def test_what_is_refused(changed, message):
    with pytest.raises(OpError, match=message):
        grouped_gemm_fp8(*arguments(**changed))


def test_what_else_is_refused():
    with pytest.raises(OpError, match="backend is 'cublas': accepted: 'auto', 'deep_gemm', 'triton'"):
        grouped_gemm_fp8(*arguments(), backend="cublas")
    with pytest.raises(OpError, match="backend is 'deep_gemm' on cpu: accepted: 'auto' there"):
        grouped_gemm_fp8(*arguments(), backend="deep_gemm")
    with pytest.raises(OpError, match="expected_m is 0"):
        grouped_gemm_fp8(*arguments(), expected_m=0)
    with pytest.raises(OpError, match=r"rows is a Tensor: accepted: a pair \(values, scales\)"):
        grouped_gemm_fp8(arguments()[0][0], *arguments()[1:])
    rows, weight, counts, _ = draw("padded", [2], 16, 24, "cpu", 4)
    with pytest.raises(OpError, match=r"rows\[0\]'s K is 24: accepted: a positive multiple of 16"):
        grouped_gemm_fp8(rows, weight, counts)
    with pytest.raises(OpError, match="config is 'fast'"):
        Config.parse("fast")
    assert all(str(Config.parse(text)) == text for text in HOPPER)
