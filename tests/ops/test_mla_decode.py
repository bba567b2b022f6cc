"""MLA decode: every backend against float64, the base of its logarithms, padding, plans that follow one another."""

from __future__ import annotations

import pytest
import torch

from moelab.ops import mla_flashinfer, mla_hopper
from moelab.ops.attention import merge
from moelab.ops.checks import OpError
from moelab.ops.mla_cache import Fp8Cache
from moelab.ops.mla_decode import ReferenceDecode
from moelab.ops.mla_flashinfer import FlashInferDecode
from moelab.ops.mla_triton import TritonDecode
from tests.ops.mla_cases import SCALE, assert_close, draw

CPU = torch.device("cpu")
BACKENDS = ("triton", "flashinfer")


def backend(name, device, heads, max_batch, max_kv_len, max_q_len=4):
    if name == "flashinfer" and (why := mla_flashinfer.reason(device)):
        pytest.skip(why)
    kind = {"triton": TritonDecode, "flashinfer": FlashInferDecode, "reference": ReferenceDecode}[name]
    return kind(heads, SCALE, max_batch, max_kv_len, max_q_len, device)


def attend(decode, step, kv="bf16", cache=None):
    """Plan and run into poisoned outputs -> (out, lse)."""
    step.plan(decode)
    q_latent, q_pe = step.queries(decode.device)
    out = torch.full(q_latent.shape, float("nan"), dtype=torch.bfloat16, device=decode.device)
    lse = torch.full(q_latent.shape[:2], float("nan"), device=decode.device)
    assert decode.run(q_latent, q_pe, step.cache(kv, decode.device) if cache is None else cache, out, lse) is out
    return out, lse


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_the_reference(kv):
    step = draw(3, [70, 0, 64, 3, 1], [2, 1, 1, 3, 1])
    out, lse = attend(backend("reference", CPU, 3, 5, 80), step, kv)
    assert_close(out, lse, step.exact(kv, CPU))
    assert (out[2] == 0).all() and (lse[2] == float("-inf")).all()


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("heads", "kv_lens", "q_lens"),
    [
        (4, [70, 0, 64, 3, 200, 1], [2, 1, 1, 3, 4, 1]),  # one tile of rows; cuts, a full page, an absent sequence
        (12, [129, 4], [3, 4]),  # two, the second not in every sequence
        (16, [0, 0], [1, 1]),
    ],
)
def test_kernel(device, heads, kv_lens, q_lens, kv):
    step = draw(heads, kv_lens, q_lens)
    out, lse = attend(backend("triton", device, heads, len(kv_lens), 256), step, kv)
    assert_close(out, lse, step.exact(kv, device))


def ragged(count, longest, max_q_len):
    """Lengths from 1 page to the longest, with absent and just begun sequences and exact multiples of a page."""
    q_lens = torch.randint(1, max_q_len + 1, (count,)).tolist()
    kv_lens = [int(longest ** torch.rand(())) + q for q in q_lens]
    kv_lens[::5] = [0] * len(kv_lens[::5])
    kv_lens[1::7] = q_lens[1::7]
    kv_lens[2::7] = [-(-n // 64) * 64 for n in kv_lens[2::7]]
    return kv_lens, q_lens


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("heads", [128, 64, 32, 16])
@pytest.mark.parametrize(("count", "longest"), [(1, 9000), (7, 3000), (48, 1200)])
def test_on_the_gpu(gpu, name, heads, count, longest):
    decode = backend(name, gpu, heads, count, longest + 70)
    for max_q_len in (1, 4):  # with lengths of its own each, on the same buffers
        step = draw(heads, *ragged(count, longest, max_q_len) if count > 1 else ([longest], [max_q_len]))
        assert_close(*attend(decode, step), step.exact("bf16", gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 16])
def test_the_fp8_form_on_the_gpu(gpu, heads):
    step = draw(heads, *ragged(20, 2000, 2))
    assert_close(*attend(backend("triton", gpu, heads, 20, 2070, 2), step, "fp8"), step.exact("fp8", gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", [128, 16])
def test_the_kernel_of_other_gpus(gpu, monkeypatch, heads, kv):
    monkeypatch.setattr(mla_hopper, "runs_on", lambda device: False)
    step = draw(heads, *ragged(20, 2000, 2))
    assert_close(*attend(backend("triton", gpu, heads, 20, 2070, 2), step, kv), step.exact(kv, gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_what_unused_rows_and_pages_hold_does_not_matter(gpu, name):
    step = draw(128, [5, 1000, 64, 300], [2, 2, 1, 2])
    decode = backend(name, gpu, 128, 4, 1024)
    with_nan = attend(decode, step)
    step.rows = step.rows.nan_to_num(nan=3.0)
    again = attend(decode, step)
    assert torch.equal(with_nan[0], again[0]) and torch.equal(with_nan[1], again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_where_pages_lie_does_not_matter(gpu, name):
    step = draw(32, [777, 130, 2000], [2, 1, 4])
    decode = backend(name, gpu, 32, 3, 2048)
    before = attend(decode, step)
    order = torch.randperm(len(step.rows))
    step.rows = step.rows[order]
    valid = step.page_table >= 0
    step.page_table[valid] = order.argsort().to(torch.int32)[step.page_table[valid].long()]
    after = attend(decode, step)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


@pytest.mark.parametrize("name", ["reference", *(pytest.param(b, marks=pytest.mark.gpu) for b in BACKENDS)])
def test_chunks_merge_by_natural_logarithms(name, request):
    """Some pages of each sequence, then the others: an absent chunk has weight 0, and a lse of base 2 would show."""
    device = CPU if name == "reference" else request.getfixturevalue("gpu")
    step = draw(16, [640, 64, 300], [1, 1, 1])
    decode = backend(name, device, 16, 3, 640, 1)
    whole = attend(decode, step)
    parts, lens, table = [], step.kv_lens, step.page_table
    for kv_lens, first in (([256, 0, 128], 0), ([384, 64, 172], None)):
        step.kv_lens = kv_lens
        starts = [0, 0, 0] if first == 0 else [4, 0, 2]
        step.page_table = torch.stack([row.roll(-start) for row, start in zip(table, starts, strict=True)])
        out, lse = attend(decode, step)
        parts.append((out.float(), lse))
    assert [a + b for a, b in zip([256, 0, 128], [384, 64, 172], strict=True)] == lens
    assert (parts[0][1][1] == float("-inf")).all() and not parts[0][0][1].any()
    merged, lse = merge(parts)
    torch.testing.assert_close(lse, whole[1], rtol=0, atol=1e-3)
    torch.testing.assert_close(merged, whole[0].float(), rtol=0, atol=2**-6 * float(whole[0].abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_captured_graph_follows_the_plans(gpu, name, kv):
    """A large plan, then smaller ones: nothing of an earlier plan may be read, in whatever state the workspace is."""
    if name == "flashinfer" and kv == "fp8":
        pytest.skip("FlashInfer takes no scales")
    heads, count = 64, 12
    decode, fresh = backend(name, gpu, heads, count, 4096, 2), backend(name, gpu, heads, count, 4096, 2)
    large = draw(heads, [4096] * count, [2] * count, spare_pages=0)
    cache, (q_latent, q_pe) = large.cache(kv, gpu), large.queries(gpu)
    out, lse = torch.empty_like(q_latent), torch.empty(q_latent.shape[:2], device=gpu)
    large.plan(decode)
    decode.run(q_latent, q_pe, cache, out, lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.run(q_latent, q_pe, cache, out, lse)
    for kv_lens in ([4096] * count, [65, *[0] * (count - 2), 2], [0] * count, [500, 2, 64, 3000] * (count // 4)):
        poison(decode)
        decode.plan(large.page_table, kv_lens)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        fresh.plan(large.page_table, kv_lens)
        want_lse = torch.empty_like(lse)
        want = fresh.run(q_latent, q_pe, cache, lse=want_lse)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


def poison(decode):
    """What is left of earlier steps becomes NaN, or a number that as an index leads astray."""
    torch.cuda.synchronize()
    if isinstance(decode, TritonDecode):
        decode.partial.fill_(float("nan"))
        decode.partial_lse.fill_(float("nan"))
        decode.buffer.device.fill_(1 << 30)
        decode.buffer.host.fill_(1 << 30)
    else:
        decode._wrapper._float_workspace_buffer.fill_(0x7F)
        decode._wrapper._int_workspace_buffer.fill_(0x3F)
        decode._wrapper._kv_indices_buf.fill_(1 << 30)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_a_plan_waits_for_the_copy_of_the_one_before(gpu, name):
    """The GPU is held up while plans of different batches are made: each run must still meet its own."""
    heads, steps = 16, [draw(16, lens, [1] * len(lens)) for lens in ([900, 70, 300], [2, 1000], [64, 64, 640])]
    decode = backend(name, gpu, heads, 3, 1024, 1)
    inputs = [(*step.queries(gpu), step.cache("bf16", gpu)) for step in steps]
    want = [attend(decode, step)[0] for step in steps]
    torch.cuda.synchronize()
    got = []
    for _ in range(5):
        for step, arguments in zip(steps, inputs, strict=True):
            torch.cuda._sleep(3_000_000)
            step.plan(decode)
            got.append(decode.run(*arguments))
    for i, out in enumerate(got):
        assert torch.equal(out, want[i % 3])


@pytest.mark.gpu
def test_the_same_plan_gives_the_same_bits(gpu):
    step = draw(16, [5000, 777], [2, 2])
    decode = backend("triton", gpu, 16, 2, 5000, 2)
    first = attend(decode, step)
    for _ in range(5):
        assert torch.equal(attend(decode, step)[0], first[0])


def test_the_reference_takes_other_widths():
    """A small model on the CPU: 24 latent values, 8 of RoPE, float32."""
    decode = ReferenceDecode(2, 0.3, 2, 128, 1)
    decode.plan(torch.tensor([[1, 0], [2, 9]]), torch.tensor([100, 7]))
    cache, q = torch.randn(3, 64, 32), torch.randn(2, 2, 32)
    out = decode.run(q[..., :24], q[..., 24:], cache)
    rows = torch.cat((cache[1], cache[0]))[:100]
    weights = (torch.einsum("hd,ld->hl", q[0], rows) * 0.3).softmax(-1)
    torch.testing.assert_close(out[0], weights @ rows[:, :24])


TABLE = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("page_table", "kv_lens", "q_lens", "message"),
    [
        (TABLE, [1, 1, 1], None, r"kv_lens's length is 3: accepted: 1 … max_batch = 2"),
        (TABLE, [], None, r"kv_lens's length is 0"),
        (TABLE, [5, 5], [1], "q_lens's length is 1: accepted: 2, as of kv_lens"),
        (TABLE, [5, 5], [1, 3], "q_lens is 3: accepted: 1 … max_q_len = 2"),
        (TABLE, [5, 5], [0, 1], "q_lens is 0"),
        (TABLE, [1, 5], [2, 2], "kv_lens is 1: accepted: 0 or at least q_len = 2"),
        (TABLE, [5, 193], None, "kv_lens is 193: accepted: at most 2 pages of 64"),
        (TABLE[:1], [5, 5], None, r"page_table's shape is \[1, 3\]: accepted: \[2, P\]"),
        (TABLE.float(), [5, 5], None, "page_table's dtype is float32: accepted: int32 or int64"),
    ],
)
def test_plans_that_are_refused(page_table, kv_lens, q_lens, message):
    with pytest.raises(OpError, match=message):
        TritonDecode(16, SCALE, 2, 128, 2, "cpu").plan(page_table, kv_lens, q_lens)


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


FP8 = Fp8Cache.empty(3, "cpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q_latent": bf16(3, 16, 512)}, r"q_latent's shape is \[3, 16, 512\]: accepted: \[2, 16, 512\]"),
        ({"q_latent": torch.zeros(2, 16, 512)}, "q_latent's dtype is float32: accepted: bfloat16"),
        ({"q_latent": bf16(2, 512, 16).mT}, "q_latent's strides"),
        ({"q_latent": bf16(16, 2, 512).transpose(0, 1)}, "q_latent's strides .* one stride through heads and tokens"),
        ({"q_pe": bf16(2, 16, 63)}, r"q_pe's shape is \[2, 16, 63\]: accepted: \[2, 16, 64\]"),
        ({"cache": bf16(3, 32, 576)}, r"cache's shape is \[3, 32, 576\]: accepted: \[pages, 64, 576\]"),
        ({"cache": torch.zeros(3, 64, 576)}, "cache's dtype is float32: accepted: bfloat16"),
        ({"cache": bf16(3, 64, 640)[..., :576]}, "cache's strides .* contiguous pages"),
        ({"cache": Fp8Cache(FP8.values, FP8.scales.half(), FP8.rope)}, "cache.scales's dtype is float16"),
        ({"cache": Fp8Cache(FP8.values, FP8.scales, FP8.rope[:2])}, r"cache's pages is \[3, 3, 2\]"),
        ({"out": bf16(2, 16, 576)}, r"out's shape is \[2, 16, 576\]"),
        ({"lse": bf16(2, 16)}, "lse's dtype is bfloat16: accepted: float32"),
        ({"lse": torch.zeros(16, 2).T}, "lse's strides"),
        ({"q_pe": bf16(2, 16, 64).to("meta")}, "q_pe's device is meta: accepted: cpu"),
        ({"cache": bf16(3, 64, 576).to("meta")}, "cache's device is meta: accepted: cpu"),
    ],
)
def test_runs_that_are_refused(changed, message):
    decode = TritonDecode(16, SCALE, 2, 128, 2, "cpu")
    arguments = {"q_latent": bf16(2, 16, 512), "q_pe": bf16(2, 16, 64), "cache": bf16(3, 64, 576)}
    with pytest.raises(OpError, match="plan is missing"):
        decode.run(**arguments)
    decode.plan(torch.zeros(2, 2, dtype=torch.int32), [3, 4], [1, 1])
    with pytest.raises(OpError, match=message):
        decode.run(**{**arguments, **changed})


def test_flashinfer_says_why_it_cannot_serve():
    why = mla_flashinfer.reason("cpu")
    assert why is not None and "flashinfer" in why
    with pytest.raises(mla_flashinfer.FlashInferError, match="flashinfer"):
        FlashInferDecode(16, SCALE, 1, 64)
