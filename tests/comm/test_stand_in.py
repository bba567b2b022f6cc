"""One rank with nobody else there: what arrives is what was asked for, what is moved is what the real one moves, and no
wait is shorter than asked."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from moelab.comm import AllToAll, CommError, InputError
from moelab.comm.stand_in import StandIn, window_bytes
from moelab.comm.stand_in_clock import ENTRIES, Hold
from moelab.comm.traffic import traffic
from moelab.config import ConfigError, ModelConfig, ParallelConfig
from moelab.ops.layout import dequantize_rows
from moelab.ops.quantize import quantize_rows
from moelab.perf.rank_load import RankLoad, rank_load
from tests.comm.scenario import is_nan, nan_
from tests.conftest import SEED

E, K, H, M = 16, 4, 256, 8
MODEL = ModelConfig(
    hidden_size=H, n_routed_experts=E, num_experts_per_tok=K, n_group=4, topk_group=2, num_attention_heads=4,
    weight_block_size=None,
)  # fmt: skip


def nothing(tokens: int) -> float:
    return 0.0


def make(
    dp=2, tp=1, rank=0, routing="uniform", payload="bf16", scales="row", us=(nothing, nothing), device="cpu", **options
):
    """(AllToAll, StandIn)"""
    parallel = ParallelConfig(dp, tp)
    shares = np.random.default_rng(SEED).random(E) + 0.1 if routing == "tinyseek" else None
    load = rank_load(routing, MODEL, parallel, M, rank, draws=3, seed=SEED, shares=shares)
    stand_in = StandIn(load, *us, rank=rank)
    a2a = AllToAll(parallel, E, K, H, M, payload, scales=scales, group=stand_in, device=device, **options)
    for slot in a2a._backend._slots:
        nan_(slot.rows)
        nan_(slot.scales)
    return a2a, stand_in


def tokens(n: int, payload="bf16", scales="row", device="cpu"):
    """x, ids, weights, scales; a part of the ids goes nowhere, and one token does not go at all."""
    ids = torch.rand(n, E).argsort(1)[:, :K]
    ids[torch.rand(n, K) < 0.2] = -1
    ids[:1] = -1
    x, s = torch.randn(n, H), None
    if payload == "fp8":
        x, s = quantize_rows(x, power_of_two=scales == "ue8m0")
    else:
        x = x.to({"bf16": torch.bfloat16, "f32": torch.float32}[payload])
    return tuple(t if t is None else t.to(device) for t in (x, ids, torch.rand(n, K), s))


def places(ids: torch.Tensor, ranks: int) -> list[set[int]]:
    return [{e // (E // ranks) for e in chosen if e >= 0} for chosen in ids.tolist()]


def whole(a2a: AllToAll, given, number_tokens=None):
    """One exchange: (counts, rows, scales, out)."""
    x, ids, weights, scales = given
    handle = a2a.dispatch_send(x, ids, weights, scales, number_tokens)
    rows, row_scales, counts = a2a.dispatch_recv(handle)
    y = torch.full(rows.shape, torch.nan, dtype=a2a.spec.output_dtype, device=rows.device)
    for expert, count in enumerate(counts.tolist()):
        y[expert, :count] = torch.randn(count, H)
    a2a.combine_send(handle, y)
    out = torch.full(x.shape, torch.nan, device=x.device)
    a2a.combine_recv(handle, out)
    return counts, rows, row_scales, out


@pytest.mark.parametrize("routing", ["equal", "uniform", "zipf", "tinyseek"])
@pytest.mark.parametrize(("dp", "tp", "rank"), [(2, 1, 1), (2, 2, 3), (8, 1, 5), (1, 1, 0)])
def test_counts_are_what_the_load_says(routing, dp, tp, rank):
    a2a, stand_in = make(dp, tp, rank, routing)
    load = stand_in.load
    for number, n in enumerate((M, 0, 3, 1, M)):
        counts, rows, _, out = whole(a2a, tokens(n))
        expected = load.counts[number % len(load.counts), n]
        assert counts.tolist() == expected.tolist() and counts.dtype == torch.int32
        assert rows.shape == (E // (dp * tp), dp * M, H)
        assert out.isfinite().all()
        for expert, count in enumerate(expected):
            assert rows[expert, :count].float().isfinite().all()
    a2a.close()


@pytest.mark.parametrize(
    ("payload", "scales"), [("bf16", "row"), ("f32", "row"), *(("fp8", s) for s in ("row", "column_tma", "ue8m0"))]
)
@pytest.mark.parametrize("quantized_first", [True, False])
def test_rows_have_variance_one_and_nothing_beyond_the_counts_is_written(payload, scales, quantized_first):
    a2a, _ = make(payload=payload, scales=scales)
    given = tokens(M, payload, scales)
    if payload == "fp8" and not quantized_first:
        given = (torch.randn(M, H).bfloat16(), *given[1:3], None)
    counts, rows, row_scales, _ = whole(a2a, given)
    values = rows.float() if row_scales is None else dequantize_rows(rows, row_scales)
    found = torch.cat([values[e, :count] for e, count in enumerate(counts)])
    assert found.isfinite().all() and found.std() == pytest.approx(1, rel=0.1)
    for expert, count in enumerate(counts):
        assert is_nan(rows[expert, count:]).all()
        assert row_scales is None or is_nan(row_scales[expert, count:]).all()


def test_num_tokens_on_the_device_counts_and_what_lies_beyond_is_left_alone():
    a2a, stand_in = make(dp=4)
    given = tokens(M)
    given[1][5:] = 999
    counts, _, _, out = whole(a2a, given, torch.tensor([5], dtype=torch.int32))
    assert counts.tolist() == stand_in.load.counts[0, 5].tolist()
    assert out[:5].isfinite().all() and out[5:].isnan().all()


def test_a_token_that_goes_nowhere_gets_zeros():
    a2a, _ = make(dp=4)
    x, ids, weights, _ = tokens(M)
    ids[1:] = torch.rand(M - 1, E).argsort(1)[:, :K]
    _, _, _, out = whole(a2a, (x, ids, weights, None))
    assert (out[0] == 0).all() and (out[1:].std(1) > 0.1).all()


@pytest.mark.parametrize("tp", [1, 2])
def test_moved_bytes_are_those_of_the_real_exchange(tp):
    a2a, stand_in = make(4, tp, rank=tp + 1, payload="fp8", routing="equal")
    spec, load, pairs, own, mine, received, arrived = a2a.spec, stand_in.load, 0, 0, 0, 0, 0
    for n in (M, 3, 0, M):
        given = tokens(n, "fp8")
        whole(a2a, given)
        goes = places(given[1], spec.parallel.ep)
        sent = goes[a2a.rank % tp :: tp]
        pairs += sum(map(len, sent))
        own += sum(a2a.rank in where for where in sent)
        received += sum(map(len, goes))
        mine += load.counts[0, n].sum()
        arrived += load.arrivals[0, n]
        # The same that comm.traffic counts, which leaves out what stays on the rank, and adds the counts of rows.
        ids = [np.full((n, K), -1)] * spec.parallel.dp
        ids[spec.parallel.dp_group(a2a.rank)] = given[1].numpy()
        counted = traffic(spec, ids)["rank"].dispatch[a2a.rank] - (spec.parallel.ep - 1) * spec.header_bytes
        leaves = sum(len(where - {a2a.rank}) for where in sent)
        assert counted == leaves * (spec.wire_row_bytes + 8 * K)
    moved = stand_in.moved()
    assert [m.calls for m in moved.values()] == [4] * 4
    assert own < pairs and moved["dispatch_send"].bytes == pairs * (H + 4 * 2 + 4 + 8 * K)
    assert moved["dispatch_recv"].bytes == mine * (H + 4 * 2)
    assert moved["combine_send"].bytes == arrived * tp * 2 * H
    assert moved["combine_recv"].bytes == received * 2 * H
    stand_in.clear()
    assert [(m.calls, m.bytes) for m in stand_in.moved().values()] == [(0, 0)] * 4


def test_sent_rows_are_the_tokens_once_for_each_rank():
    a2a, _ = make(2, 2, rank=3)
    x, ids, weights, _ = given = tokens(M)
    whole(a2a, given)
    window = a2a._backend._windows
    for number, token in enumerate(range(1, M, 2)):  # those of TP rank 1
        first = {}
        for k, e in enumerate(ids[token].tolist()):
            if e >= 0:
                first.setdefault(e // 4, k)
        for k in range(K):
            row = window.sent[number * K + k].view(torch.bfloat16)
            if k in first.values():
                assert torch.equal(row, x[token])
                note = window.notes[number * K + k]
                assert note[:K].tolist() == ids[token].tolist() and note[-1] == token
                assert torch.equal(note[K : 2 * K].view(torch.float32), weights[token])
            else:
                assert not row.any()


def test_what_the_experts_made_is_read_to_the_last_row():
    """The sums that leave, together, are the rows that were counted."""
    a2a, stand_in = make(2, 2, rank=1, payload="f32", routing="zipf")
    handle = a2a.dispatch_send(*tokens(M, "f32")[:3])
    rows, _, counts = a2a.dispatch_recv(handle)
    y = torch.full(rows.shape, torch.nan)
    for expert, count in enumerate(counts):
        y[expert, :count] = torch.randn(count, H)
    a2a.combine_send(handle, y)
    arrived = stand_in.load.arrivals[0, M]
    sums = a2a._backend._windows.returned[: 2 * arrived].view(2, arrived, H)
    assert torch.equal(sums[0], sums[1])  # to both TP ranks
    assert sums[0].sum(0) == pytest.approx(y.nansum((0, 1)), abs=1e-4)
    assert (sums[0].abs().sum(1) > 0).all()


def test_windows_are_as_large_as_said_and_what_is_more_comes_round_again():
    for options in ({"payload": "fp8", "tp": 2}, {"payload": "bf16", "dp": 8}, {"payload": "f32"}):
        a2a, stand_in = make(routing="zipf", **options)
        window = a2a._backend._windows
        held = [t for name, t in vars(window).items() if isinstance(t, torch.Tensor) and name != "tally"]
        assert sum(t.nbytes for t in held) == window_bytes(a2a.spec)
    a2a, stand_in = make(8, routing="tinyseek", rank=0)
    stand_in._backend._load[0][:] = M * 8  # all tokens of all groups come
    stand_in._backend._load[1][:] = M * 8
    counts, rows, _, _ = whole(a2a, tokens(M))
    assert M * 8 > len(a2a._backend._windows.arrived) and counts.tolist() == [M * 8] * 2
    assert rows.float().isfinite().all() and rows.float().std() == pytest.approx(1, rel=0.1)


def test_waits_are_never_shorter_than_asked():
    asked = {"dispatch": lambda n: 30_000.0 + 500 * n, "combine": lambda n: 20_000.0 + n}
    a2a, stand_in = make(us=tuple(asked.values()))
    for n in (M, 0, 2):
        whole(a2a, tokens(n))
    held = stand_in.held()
    for name, us in asked.items():
        h = held[name]
        assert h.asked_us.tolist() == [us(M), us(0), us(2)] and h.waited.any()
        assert (h.held_us >= h.asked_us).all() and (h.entered_us > 0).all()
        assert (h.exposed_us[~h.waited] == 0).all() and (h.exposed_us[h.waited] > 0).all()
    stand_in.clear()
    assert not len(stand_in.held()["dispatch"].held_us)


def test_a_late_receive_does_not_wait():
    a2a, stand_in = make(us=(lambda n: 100.0, nothing))
    handle = a2a.dispatch_send(*tokens(2)[:3])
    time.sleep(0.005)
    a2a.dispatch_recv(handle)
    (entered,), (held,) = stand_in.held()["dispatch"].entered_us, stand_in.held()["dispatch"].held_us
    assert held == entered > 5000 and not stand_in.held()["dispatch"].waited.any()


def test_the_log_keeps_the_last():
    hold = Hold(lambda n: 0.001 * n, 3, 2, torch.device("cpu"))
    hold.log[0] = ENTRIES + 1
    hold.begin(1)
    hold.wait(1, 3)
    assert len(hold.read().held_us) == ENTRIES and hold.read().asked_us[1] == 0.003


def test_slots_interleave_and_order_is_kept():
    a2a, stand_in = make(dp=4, slots=2)
    first, second = (a2a.dispatch_send(*tokens(n)[:3]) for n in (3, 7))
    with pytest.raises(CommError, match="slots is 2"):
        a2a.dispatch_send(*tokens(1)[:3])
    with pytest.raises(CommError, match="its next half is dispatch_recv"):
        a2a.combine_send(first, torch.zeros(4, 4 * M, H, dtype=torch.bfloat16))
    rows2, _, counts2 = a2a.dispatch_recv(second)
    rows1, _, counts1 = a2a.dispatch_recv(first)
    assert rows1.data_ptr() != rows2.data_ptr()
    assert counts1.tolist() == stand_in.load.counts[0, 3].tolist()
    assert counts2.tolist() == stand_in.load.counts[1, 7].tolist()
    for handle, n in ((first, 3), (second, 7)):
        a2a.combine_send(handle, torch.zeros(4, 4 * M, H, dtype=torch.bfloat16))
        out = torch.full((n, H), torch.nan, dtype=torch.bfloat16)
        assert a2a.combine_recv(handle, out) is out and out.isfinite().all()


def test_fused_halves_and_idleness():
    a2a, stand_in = make()
    handle, _, _, counts = a2a.dispatch(*tokens(4)[:3], has_work=False)
    assert handle.all_idle and handle.starts is None and counts.tolist() == stand_in.load.counts[0, 4].tolist()
    out = torch.full((4, 2 * H), torch.nan)[:, ::2]  # not contiguous
    a2a.combine(handle, torch.zeros(8, 2 * M, H, dtype=torch.bfloat16), out)
    assert out.isfinite().all()
    assert not a2a.dispatch(*tokens(4)[:3])[0].all_idle
    assert a2a.backend == "stand-in" and a2a.rank == 0 and stand_in.programs == 1
    a2a.agree(overlap="none")
    a2a.check()


def test_arguments_are_checked_before_anything_moves():
    a2a, stand_in = make()
    x, ids, weights, _ = tokens(3)
    for named, given in {
        "x has 9 tokens": (torch.zeros(9, H, dtype=torch.bfloat16), ids, weights), "topk_ids": (x, ids[:2], weights),
        r"topk_ids\[0, 0\] is 16": (x, torch.full_like(ids, E), weights),
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=named):
            a2a.dispatch_send(*given)
    assert stand_in.moved()["dispatch_send"].calls == 0


def test_closed_it_still_says_what_was():
    a2a, stand_in = make()
    whole(a2a, tokens(3))
    a2a.close()
    assert stand_in.moved()["combine_recv"].calls == 1 and len(stand_in.held()["combine"].held_us) == 1
    with pytest.raises(CommError, match="closed"):
        whole(a2a, tokens(3))
    with pytest.raises(CommError, match="moved"):
        _ = a2a.sent_bytes


def test_errors_name_what_does_not_fit():
    load = rank_load("equal", MODEL, ParallelConfig(2), M)
    crowded = RankLoad("equal", np.full_like(load.counts, 2 * M + 1), load.arrivals)
    with pytest.raises(ConfigError, match="num_sms is -1"):
        StandIn(load, nothing, nothing, num_sms=-1)
    with pytest.raises(CommError, match="serves no AllToAll yet"):
        StandIn(load, nothing, nothing).held()

    def build(stand_in, dp=2, max_tokens=M, **options):
        return AllToAll(ParallelConfig(dp), E, K, H, max_tokens, group=stand_in, device="cpu", **options)

    used = StandIn(load, nothing, nothing)
    build(used)
    for named, stand_in, options in (
        ("already serves", used, {}),
        ("layout is 'contiguous_128'", StandIn(load, nothing, nothing), {"layout": "contiguous_128"}),
        ("load is for 8 tokens and 8 experts", StandIn(load, nothing, nothing), {"dp": 4}),
        ("load is for 8 tokens", StandIn(load, nothing, nothing), {"max_tokens": 9}),
        ("17 rows for an expert", StandIn(crowded, nothing, nothing), {}),
        ("rank is 2", StandIn(load, nothing, nothing, rank=2), {}),
        ("time for 1 tokens is -1", StandIn(load, nothing, lambda n: -float(n)), {}),
        ("time for 0 tokens is nan", StandIn(load, lambda n: float("nan"), nothing), {}),
    ):
        with pytest.raises(ConfigError, match=named):
            build(stand_in, **options)
