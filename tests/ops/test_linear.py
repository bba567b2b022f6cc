"""The block-FP8 linear op against a float64 product of the same dequantised operands."""

from __future__ import annotations

import pytest
import torch

from moelab.ops import arrivals, block_gemm_hopper, choice, deep_gemm
from moelab.ops.block_gemm import Config, block_gemm, parse
from moelab.ops.checks import OpError
from moelab.ops.choice import Choice, Row
from moelab.ops.deep_gemm import DeepGemmError
from moelab.ops.fp8 import dequantize_block, quantize_block
from moelab.ops.layout import dequantize_rows, empty_scales
from moelab.ops.linear import default_config, linear, linear_reference, merge_weights
from moelab.ops.quantize import quantize_reference
from tests.ops.conftest import INTERPRETING

FORMATS = ("row", "column_tma")
SHAPES = [(3, 80, 200), (20, 192, 512), (1, 64, 100), (17, 130, 640)]  # tails of every tile and of K
CONFIGS = [
    Config(64, 16, 1, 4, 1, 3),
    Config(64, 16, 3, 4, 1, 4),
    Config(128, 32, 2, 4, 2, 3),
    Config(128, 16, 2, 8, 4, 2),
]


def draw_rows(rows, depth, scale_format, device):
    """Rows and groups of very different size, one group of zeros. Behind the last row, and in the padding of the
    scales, there is NaN."""
    x = torch.randn(rows, depth) * torch.logspace(-3, 3, rows)[:, None] * torch.logspace(1, -1, depth)[None, :]
    x[rows // 2, :128] = 0
    values, scales = quantize_reference(x)
    wide = torch.full((rows + 40, depth), float("nan"), device=device).to(torch.float8_e4m3fn)
    wide[:rows] = values.to(device)
    padded = empty_scales((rows + 40, depth), "row", device).fill_(float("nan"))
    spread = padded[:rows] if scale_format == "row" else _column_tma(rows, depth, device)
    return wide[:rows], spread.copy_(scales)


def _column_tma(rows, depth, device):
    scales = empty_scales((rows, depth), "column_tma", device)
    scales.as_strided((scales.shape[1], scales.stride(1)), (scales.stride(1), 1)).fill_(float("nan"))
    return scales


def draw_weight(columns, depth, device):
    """Blocks of very different size; NaN behind the last row."""
    groups = torch.logspace(-2, 2, -(-columns // 64)).repeat_interleave(64)[:columns]
    values, scales = quantize_block(torch.randn(columns, depth) * groups[:, None])
    wide = torch.full((columns + 128, depth), float("nan"), device=device).to(torch.float8_e4m3fn)
    wide[:columns] = values.to(device)
    return wide[:columns], scales.to(device)


def exact(x, weight):
    return dequantize_rows(*x).double() @ dequantize_block(*weight).double().T


def poisoned(rows, columns, device):
    return torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device=device)


def assert_close(got, x, weight):
    """Each element to a rounding to bfloat16 and 2^-9 of the sum of the sizes of its terms: the tensor cores add 32
    products at a time, cut off some 13 bits below the largest. Rows of 64 elements, in the mean, to hardly more than
    the rounding (0.0017). Interpreted, conversion to bfloat16 cuts off."""
    want = exact(x, weight)
    size = dequantize_rows(*x).double().abs() @ dequantize_block(*weight).double().abs().T
    error = (got.double() - want).abs()
    assert (error <= want.abs() * (2**-7 if INTERPRETING else 2**-8.9) + size * 2**-9).all()
    for start in range(0, want.shape[1] - 63, 64):  # which differ in size
        part = slice(start, start + 64)
        limit = (5e-3 if INTERPRETING else 2.5e-3) * want[:, part].norm(dim=1)
        assert (error[:, part].norm(dim=1) <= limit + size[:, part].amax(1) * 1e-4).all()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape, scale_format):
    rows, columns, depth = shape
    x, weight = draw_rows(rows, depth, scale_format, "cpu"), draw_weight(columns, depth, "cpu")
    assert_close(linear_reference(x, weight), x, weight)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(device, shape, scale_format, config):
    rows, columns, depth = shape
    x, weight = draw_rows(rows, depth, scale_format, device), draw_weight(columns, depth, device)
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = poisoned(rows, columns, device)
        block_gemm(*x, *weight, out, config)
        assert_close(out, x, weight)


HOPPER = ("64x32/1 w4 u2 s3 a0", "64x32/3 w4 u4 s2 a8", "128x64/2 w4 u2 s2 a0", "128x128/3 w8 u2 s2 a0")


@pytest.mark.gpu
@pytest.mark.parametrize("config", HOPPER)
@pytest.mark.parametrize("shape", [(20, 192, 512), (1, 64, 128), (17, 130, 640), (200, 320, 1152)])
def test_hopper_kernel(gpu, shape, config):
    rows, columns, depth = shape
    x, weight = draw_rows(rows, depth, "column_tma", gpu), draw_weight(columns, depth, gpu)
    if not block_gemm_hopper.takes(*x, weight[0]):
        pytest.skip("needs a Hopper GPU and a Triton with Gluon")
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = poisoned(rows, columns, gpu)
        block_gemm_hopper.block_gemm(*x, *weight, out, parse(config))
        assert_close(out, x, weight)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_linear_takes_the_kernel(device, scale_format):
    x, weight = draw_rows(5, 512, scale_format, device), draw_weight(192, 512, device)
    out = poisoned(5, 192, device)
    assert linear(x, weight, out=out) is out
    assert_close(out, x, weight)
    assert torch.equal(linear(x, weight), out)


def test_strided_out_and_inputs(device):
    wide = draw_rows(6, 512, "row", device)
    x = (wide[0][::2, 128:384], wide[1][::2, 1:3])
    values, scales = draw_weight(192, 512, device)
    weight = (values[:, 128:384], scales[:, 1:3])
    out = poisoned(3, 320, device)
    linear(x, weight, out=out[:, 64:256])
    assert_close(out[:, 64:256], x, weight)
    assert out[:, :64].isnan().all() and out[:, 256:].isnan().all()


def test_nan_spoils_its_row_and_no_other(device):
    x, weight = draw_rows(4, 256, "column_tma", device), draw_weight(64, 256, device)
    clean = linear(x, weight)
    x[1][1, 1] = float("nan")
    got = linear(x, weight)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 64, 256), (4, 0, 256), (4, 64, 0)])
def test_nothing_to_do(device, rows, columns, depth):
    pair = (torch.empty(rows, depth, device=device).to(torch.float8_e4m3fn), empty_scales((rows, depth), "row", device))
    weight = (torch.empty(columns, depth, device=device).to(torch.float8_e4m3fn),
              torch.empty(-(-columns // 128), -(-depth // 128), device=device))  # fmt: skip
    out = linear(pair, weight)
    assert out.shape == (rows, columns) and (out == 0).all()


def test_merged_weights_give_both_products():
    x, q, kv = draw_rows(5, 256, "row", "cpu"), draw_weight(256, 256, "cpu"), draw_weight(192, 256, "cpu")
    both = merge_weights((q, kv))
    assert both[0].shape == (448, 256) and both[1].shape == (4, 2)
    assert torch.equal(linear(x, both), torch.cat([linear(x, q), linear(x, kv)], dim=1))


def test_weights_that_cut_a_block_are_not_merged():
    weights = (draw_weight(192, 256, "cpu"), draw_weight(128, 256, "cpu"))
    with pytest.raises(OpError, match=r"weights\[0\]'s rows is 192: accepted: a multiple of 128 for all but the last"):
        merge_weights(weights)
    with pytest.raises(OpError, match=r"weights\[1\]\[0\]'s shape is \[128, 128\]: accepted: \[N, 256\]"):
        merge_weights((draw_weight(128, 256, "cpu"), draw_weight(128, 128, "cpu")))


@pytest.mark.parametrize("config", [*CONFIGS, default_config(48, 2112, 7168)], ids=str)
def test_a_config_is_read_as_it_was_written(config):
    assert parse(str(config)) == config


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 5000])
@pytest.mark.parametrize(("columns", "depth"), [(2112, 7168), (576, 7168), (24576, 1536), (64, 100)])
def test_the_default_config_is_one_the_kernel_has(rows, columns, depth):
    config = default_config(rows, columns, depth)
    assert config.block_m in (32, 64) and 1 <= config.split <= max(1, depth // 512)
    assert rows > config.block_m // 2 or config.block_m == 32


V3 = [(2112, 7168), (576, 7168), (24576, 1536), (7168, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper", "deep_gemm", None])
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 100, 256, 1000])
@pytest.mark.parametrize(("columns", "depth"), V3)
def test_projections_of_v3(gpu, columns, depth, rows, backend):
    if backend == "deep_gemm" and (why := deep_gemm.reason()):
        pytest.skip(why)
    if backend == "hopper" and not block_gemm_hopper.runs_on(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and a Triton with Gluon")
    x, weight = draw_rows(rows, depth, "column_tma", gpu), draw_weight(columns, depth, gpu)
    out = poisoned(rows, columns, gpu)
    linear(x, weight, out=out, backend=backend)
    assert_close(out, x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["64x64/4 w4 u2 s2 a0", "64x64/8 w4 u2 s2 a8", "128x64/7 w4 u2 s2 a0"])
@pytest.mark.parametrize("kernel", [block_gemm, block_gemm_hopper.block_gemm], ids=["triton", "hopper"])
def test_many_programs_of_split_k_give_the_same_bits(gpu, kernel, config):
    x, weight = draw_rows(64, 7168, "column_tma", gpu), draw_weight(2112, 7168, gpu)
    first = poisoned(64, 2112, gpu)
    kernel(*x, *weight, first, parse(config))
    assert_close(first, x, weight)
    for _ in range(50):
        out = poisoned(64, 2112, gpu)
        kernel(*x, *weight, out, parse(config))
        assert torch.equal(out, first)
    bank, rows = arrivals._bank(x[0].device)
    assert rows and not bank[0].any() and not (bank[1] % arrivals.ROUND).any()


@pytest.mark.gpu
def test_rounds_wrap_around(gpu):
    x, weight = draw_rows(64, 7168, "column_tma", gpu), draw_weight(2112, 7168, gpu)
    if not block_gemm_hopper.takes(*x, weight[0]):
        pytest.skip("needs a Hopper GPU and a Triton with Gluon")
    arrivals.rounds(x[0].device).fill_(2**31 - arrivals.ROUND)
    for _ in range(3):
        out = poisoned(64, 2112, gpu)
        block_gemm_hopper.block_gemm(*x, *weight, out, parse("64x64/4 w4 u2 s2 a0"))
        assert_close(out, x, weight)
    assert (arrivals.rounds(x[0].device)[:33] == -(2**31) + 2 * arrivals.ROUND).all()


@pytest.mark.gpu
def test_weights_and_rows_written_by_the_kernel_ahead(gpu):
    """The kernel is launched early; what stands ahead of it writes all that it reads."""
    from moelab.ops.quantize import quantize_rows

    weight = draw_weight(2112, 7168, gpu)
    source = [torch.randn(48, 7168, device=gpu, dtype=torch.bfloat16) for _ in range(8)]
    x = quantize_rows(source[0], "column_tma")
    graph, outs = torch.cuda.CUDAGraph(), [poisoned(48, 2112, gpu) for _ in source]
    linear(x, weight, out=outs[0])
    with torch.cuda.graph(graph):
        for rows, out in zip(source, outs, strict=True):
            quantize_rows(rows, "column_tma", out=x)
            linear(x, weight, out=out)
    for _ in range(3):
        for rows, out in zip(source, outs, strict=True):
            rows.normal_()
            out.fill_(float("nan"))
        graph.replay()
        for rows, out in zip(source, outs, strict=True):
            assert_close(out, quantize_rows(rows, "column_tma"), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_streams_side_by_side(gpu, backend):
    x, weight = draw_rows(64, 7168, "column_tma", gpu), draw_weight(576, 7168, gpu)
    want = linear(x, weight, backend=backend)
    streams = [torch.cuda.Stream() for _ in range(5)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(30):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(linear(x, weight, backend=backend))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(gpu):
    """The last rows of a weight of more than 2 GiB, and of an output likewise."""
    wide = torch.zeros(300_032, 7168, dtype=torch.float8_e4m3fn, device=gpu)
    tail = draw_weight(128, 7168, gpu)
    wide[-128:] = tail[0]
    scales = torch.ones(2344, 56, device=gpu)
    scales[-1] = tail[1]
    x = draw_rows(3, 7168, "column_tma", gpu)
    for pair in (x, (x[0], x[1].contiguous())):  # by TMA and by pointers
        out = linear(pair, (wide, scales), backend="triton")
        assert_close(out[:, -128:], x, tail)
        assert (out[:, :-128] == 0).all()


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Puts rows into a table that counts; returns the calls that reach DeepGEMM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deep_gemm, "reason", lambda: None)
    calls = []
    monkeypatch.setattr(deep_gemm, "gemm", lambda x, weight, out: calls.append(out) or out.fill_(7))

    def put(*rows):
        choice.write(choice.table_path(choice.DEFAULT_RECORDS, "linear", torch.cuda.get_device_name()), rows, "a test")
        choice.tables.cache_clear()
        return calls

    yield put
    choice.tables.cache_clear()


@pytest.mark.gpu
def test_the_table_decides(gpu, table):
    x, weight = draw_rows(4, 512, "column_tma", gpu), draw_weight(192, 512, gpu)
    measured = Choice("deep_gemm", "", 5.0), Choice("triton", "64x16/2 w4 u1 s3 a0", 6.0)
    calls = table(*(Row(0, 192, 512, 8, one) for one in measured))
    assert (linear(x, weight) == 7).all() and len(calls) == 1
    by_row = (x[0], x[1].contiguous())  # scales that DeepGEMM would transpose first
    assert_close(linear(by_row, weight), x, weight)
    assert_close(linear(x, weight, backend="triton"), x, weight)
    assert len(calls) == 1
    table(Row(0, 192, 512, 8, measured[1]))
    assert_close(linear(x, weight), x, weight)


@pytest.mark.gpu
def test_what_deep_gemm_does_not_read(gpu, table):
    table()
    x, weight = draw_rows(4, 512, "row", gpu), draw_weight(192, 512, gpu)
    with pytest.raises(OpError, match="not as deep_gemm reads it: accepted: for deep_gemm and hopper"):
        linear(x, weight, backend="deep_gemm")


@pytest.mark.gpu
def test_deep_gemm_where_it_cannot_be_used(gpu, monkeypatch):
    monkeypatch.setattr(deep_gemm, "reason", lambda: "not today")
    deep_gemm._library.cache_clear()
    x, weight = draw_rows(4, 512, "column_tma", gpu), draw_weight(192, 512, gpu)
    with pytest.raises(DeepGemmError, match="not today"):
        linear(x, weight, backend="deep_gemm")
    assert_close(linear(x, weight), x, weight)


X = (torch.zeros(4, 256).to(torch.float8_e4m3fn), torch.ones(4, 2))
W = (torch.zeros(192, 256).to(torch.float8_e4m3fn), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=X[0]), r"x is a Tensor: accepted: a \(values, scales\) tuple"),
        (dict(x=(X[0].float(), X[1])), r"x\[0\]'s dtype is float32: accepted: float8_e4m3fn"),
        (dict(x=(X[0][None], X[1])), r"x\[0\]'s shape is \[1, 4, 256\]: accepted: \[M, K\]"),
        (dict(x=(X[0], X[1].int())), r"x\[1\]'s dtype is torch.int32: accepted: float32"),
        (dict(x=(X[0], X[1][:3])), r"x\[1\]'s shape is \[3, 2\]: accepted: \[4, 2\]"),
        (dict(x=(X[0], torch.ones(8, 4)[::2, ::2])), r"x\[1\]'s strides is \(8, 2\)"),
        (dict(weight=(W[0][:, :128], W[1])), r"weight\[0\]'s shape is \[192, 128\]: accepted: \[N, 256\]"),
        (dict(weight=(W[0], W[1][:1])), r"weight\[1\]'s shape is \[1, 2\]: accepted: \[2, 2\]"),
        (dict(weight=(W[0], W[1].half())), r"weight\[1\]'s dtype is float16: accepted: float32"),
        (dict(out=torch.zeros(4, 192)), "out's dtype is float32: accepted: bfloat16"),
        (dict(out=torch.zeros(4, 190).bfloat16()), r"out's shape is \[4, 190\]: accepted: \[4, 192\]"),
        (dict(out=torch.zeros(192, 4).bfloat16().T), "out's strides"),
        (dict(backend="cublas"), "backend is 'cublas': accepted: 'deep_gemm', 'hopper', 'triton'"),
        (dict(backend="triton"), "backend is 'triton' on cpu: accepted: None"),
    ],
)  # fmt: skip
def test_what_is_refused(change, message):
    with pytest.raises(OpError, match=message):
        linear(**{"x": X, "weight": W, **change})
