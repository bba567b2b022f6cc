"""The kernels of a stand-in do what plain torch does: on a GPU, and on the CPU in Triton's interpreter, which wants a
process of its own. And on a GPU they wait as long as they were asked to, in a graph."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from moelab.comm.stand_in_moves import KernelMoves, PlainMoves  # noqa: E402
from moelab.comm.stand_in_reduce import StandInReduce  # noqa: E402
from moelab.config import preset  # noqa: E402
from moelab.ops.layout import dequantize_rows  # noqa: E402
from tests.comm.scenario import same_bits  # noqa: E402
from tests.comm.test_stand_in import H, M, make, nothing, tokens, whole  # noqa: E402

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU; none here")
    if request.param == "cpu" and not INTERPRETING:
        pytest.skip("runs in the interpreter, below")
    return request.param


@pytest.mark.skipif(INTERPRETING, reason="it is")
def test_under_the_interpreter():
    here = Path(__file__).resolve()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", str(here)],
        cwd=here.parents[2], env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("payload", "scales", "quantized_first"), [
    ("bf16", "row", True), ("f32", "row", True), ("fp8", "row", True), ("fp8", "column_tma", True),
    ("fp8", "ue8m0", True), ("fp8", "column_tma", False), ("fp8", "ue8m0", False),
])  # fmt: skip
@pytest.mark.parametrize(("dp", "tp", "rank"), [(2, 2, 3), (8, 1, 2)])
def test_as_plain_torch(device, payload, scales, quantized_first, dp, tp, rank):
    options = dict(dp=dp, tp=tp, rank=rank, routing="zipf", payload=payload, scales=scales)
    ours, stand_in = make(device=device, **options)
    plain, plain_stand_in = make(**options)
    assert isinstance(ours._backend._moves, KernelMoves)
    there, here = ours._backend._windows, plain._backend._windows
    plain._backend._moves = PlainMoves(here, plain._backend.holds)
    for name in ("arrived", "arrived_scales", "home"):  # what a GPU draws the CPU does not
        getattr(here, name).copy_(getattr(there, name))
    for number, (n, num) in enumerate(((M, None), (0, None), (6, 4), (1, None))):
        given = tokens(n, payload, scales)
        if not quantized_first:
            given = (torch.randn(n, H).bfloat16(), *given[1:3], None)
        given[1][:, 1] = given[1][:, 0]  # an expert named twice
        counted = None if num is None else torch.tensor([num], dtype=torch.int32)
        results = []
        for a2a, on in ((ours, device), (plain, "cpu")):
            torch.manual_seed(7)  # of what the experts make
            moved = tuple(t if t is None else t.to(on) for t in given)
            results.append(
                [t if t is None else t.cpu() for t in whole(a2a, moved, None if num is None else counted.to(on))]
            )
        (counts, rows, row_scales, out), (counts2, rows2, row_scales2, out2) = results
        assert counts.tolist() == counts2.tolist()
        for e, count in enumerate(counts):
            assert same_bits(rows[e, :count], rows2[e, :count])
            if row_scales is not None:
                assert same_bits(row_scales[e, :count], row_scales2[e, :count])
        assert torch.allclose(out, out2, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert same_bits(there.notes, here.notes)
        if payload != "fp8" or quantized_first or device == "cuda":
            assert same_bits(there.sent, here.sent)
        else:  # the interpreter casts to FP8 as no hardware does
            values = (t.view(torch.float8_e4m3fn).float() for t in (there.sent, here.sent))
            assert torch.allclose(*values, rtol=0.15, atol=0.1)
        assert same_bits(there.sent_scales, here.sent_scales)
        left = tp * stand_in.load.arrivals[number % 3, n if num is None else num]
        if left <= len(here.returned):  # else they come round again, in no order
            sums = (t[:left].cpu().float() for t in (there.returned, here.returned))
            assert torch.allclose(*sums, rtol=1e-2, atol=1e-2)
    assert stand_in.moved() == plain_stand_in.moved()
    assert stand_in.held()["dispatch"].asked_us.tolist() == plain_stand_in.held()["dispatch"].asked_us.tolist()


def test_the_reduce_as_plain_torch(device):
    reduce = StandInReduce(4, nothing, M, 2 * 4096, device, num_sms=2)
    for rows in (M, 3):
        x = torch.randn(rows, 4096, device=device).bfloat16()
        before = x.clone()
        assert reduce.all_reduce(x) is x and same_bits(x, before)
        sent = rows * 2048 * 3 // 4
        assert torch.equal(reduce._away[:sent], x.view(torch.int32).view(-1)[:sent])
    assert reduce.moved() == (2, 2 * (M + 3) * 8192 * 3 // 4) and reduce.programs == 2


def gpu_only():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; none here")


@pytest.mark.gpu
@pytest.mark.parametrize(("dispatch", "combine"), [(77.0, 133.0), (192.0, 369.0)])
def test_a_graph_holds_as_long_as_asked(dispatch, combine):
    gpu_only()
    a2a, stand_in = make(
        dp=8, payload="fp8", scales="column_tma", us=(lambda n: dispatch, lambda n: combine), device="cuda"
    )
    x, ids, weights, scales = (t.cuda() for t in tokens(M, "fp8"))
    out = torch.full((M, H), torch.nan, device="cuda")
    y = torch.randn(a2a.spec.rows_shape, device="cuda").bfloat16()

    def step():
        for _ in range(3):
            handle = a2a.dispatch_send(x, ids, weights, scales)
            a2a.dispatch_recv(handle)
            a2a.combine_send(handle, y)
            a2a.combine_recv(handle, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    stand_in.clear()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        graph.replay()
    held = stand_in.held()
    assert torch.cuda.memory_allocated() == before and out.isfinite().all()
    assert [m.calls for m in stand_in.moved().values()] == [60] * 4
    for name, us in (("dispatch", dispatch), ("combine", combine)):
        h = held[name]
        assert len(h.held_us) == 60 and (h.asked_us == us).all() and h.waited.all()
        assert (h.held_us >= us).all(), "never shorter than asked"
        assert h.held_us.max() <= 1.03 * us, f"{name}: {h.held_us.max()} µs for {us}"


@pytest.mark.gpu
def test_a_graph_of_another_size_after_a_large_one():
    gpu_only()
    a2a, stand_in = make(dp=8, device="cuda")
    for n in (M, 1, 0, 5):
        counts, rows, _, out = whole(a2a, tokens(n, device="cuda"))
        assert out.isfinite().all()
        for e, count in enumerate(counts.tolist()):
            assert rows[e, :count].float().isfinite().all()


@pytest.mark.gpu
def test_full_size_rows_on_a_gpu_and_no_wait_where_there_is_none():
    """DeepSeek-V3's sizes: 16 rows a tile, and every counted row is there."""
    gpu_only()
    from moelab.comm import AllToAll
    from moelab.comm.stand_in import StandIn
    from moelab.config import ParallelConfig
    from moelab.perf.rank_load import rank_load

    model, parallel = preset("deepseek-v3"), ParallelConfig(8)
    stand_in = StandIn(rank_load("uniform", model, parallel, 256, 3), nothing, nothing, rank=3, num_sms=24)
    a2a = AllToAll(parallel, 256, 8, 7168, 256, "fp8", scales="column_tma", group=stand_in, device="cuda")
    x = torch.randn(256, 7168, device="cuda").bfloat16()
    ids = torch.rand(256, 256, device="cuda").topk(8).indices
    handle, rows, scales, counts = a2a.dispatch(x, ids, torch.rand(256, 8, device="cuda"))
    assert counts.tolist() == stand_in.load.counts[0, 256].tolist() and stand_in.programs == 24
    values = dequantize_rows(rows, scales)
    found = torch.cat([values[e, :count] for e, count in enumerate(counts.tolist())])
    assert found.isfinite().all() and found.std().item() == pytest.approx(1, rel=0.05)
    y = torch.randn(rows.shape, device="cuda", dtype=torch.bfloat16)
    out = torch.full((256, 7168), torch.nan, device="cuda", dtype=torch.bfloat16)
    a2a.combine(handle, y, out)
    a2a.check()
    assert out.isfinite().all() and 0.5 < out.float().std().item() < 1.5
    assert not stand_in.held()["dispatch"].waited.any()
