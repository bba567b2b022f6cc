"""What the ranks do: functions that a pool runs on each rank at once, asserting there."""

from __future__ import annotations

import torch
from torch import Tensor

from moelab.comm import AllToAll, Handle, VirtualRanks
from moelab.comm.layout import grouped_layout, segment_starts
from moelab.comm.reference import dense_moe, expected_rows, rounding_bound
from moelab.config import ParallelConfig
from tests.comm.scenario import Group, Scenario, is_nan, nan_, same_bits
from tests.pool import Rank


def mine(rank: Rank, s: Scenario) -> Group:
    """This rank's copy of its DP group's tokens."""
    g = s.groups()[rank.index // s.tp]
    scales = None if g.scales is None else g.scales.to(rank.device)
    return Group(g.x.to(rank.device), g.ids.to(rank.device), g.weights.to(rank.device), scales)


def send(rank: Rank, a2a: AllToAll, s: Scenario, **options) -> Handle:
    """dispatch_send, after which everything given to it is overwritten."""
    g = mine(rank, s)
    h = a2a.dispatch_send(g.x, g.ids, g.weights, g.scales, **options)
    for t in (g.x, g.weights, g.scales):
        nan_(t)
    g.ids.fill_(-1)
    return h


def experts(s: Scenario, rank: int, h: Handle, rows: Tensor, row_scales: Tensor | None, counts: Tensor) -> Tensor:
    """Outputs of this rank's experts; NaN beyond the counts, as are the results of uninitialised rows."""
    y = torch.full(s.spec.rows_shape, torch.nan, dtype=s.spec.output_dtype, device=rows.device)
    values = s.received(rows, row_scales)
    for e, n in enumerate(counts.tolist()):
        place = (e, slice(n)) if h.starts is None else slice(int(h.starts[e]), int(h.starts[e]) + n)
        y[place] = s.expert(rank * s.spec.local_experts + e, values[place])
    return y


def receive(rank: Rank, a2a: AllToAll, s: Scenario, h: Handle, poisoned: bool = False) -> Tensor:
    """dispatch_recv with everything about it checked; the experts' outputs. Leaves NaN in the slot."""
    rows, row_scales, counts = a2a.dispatch_recv(h)
    h._owner.check()  # a kernel that waits in vain has only been launched so far
    spec, groups = s.spec, s.groups()
    expected = expected_rows(spec, rank.index, [g.ids for g in groups])
    assert counts.dtype == torch.int32 and counts.device == a2a.device
    assert counts.tolist() == [len(e) for e in expected]
    assert rows.shape == spec.rows_shape and rows.dtype == spec.payload_dtype
    assert (row_scales is None) == (s.payload != "fp8")
    if s.layout == "contiguous_128":
        assert same_bits(h.starts, segment_starts(counts)) and not (h.starts % 128).any()
        layout = grouped_layout(counts, spec.capacity).tolist()
    else:
        assert h.starts is None
    flat = rows.view(-1, s.hidden)
    plain = None if row_scales is None else s.plain_scales(row_scales).reshape(len(flat), -1)
    raw = None if row_scales is None else row_scales.reshape(len(flat), -1)
    used = torch.zeros(len(flat), dtype=torch.bool)
    for e, pairs in enumerate(expected):
        first = e * spec.expert_rows if h.starts is None else int(h.starts[e])
        used[first : first + len(pairs)] = True
        if not pairs:
            continue
        want = torch.stack([groups[g].x.view(torch.uint8)[t] for g, t in pairs])
        assert same_bits(flat[first : first + len(pairs)].view(torch.uint8), want), f"rows of expert {e}"
        if plain is not None:
            want = torch.stack([groups[g].scales[t] for g, t in pairs])
            assert same_bits(plain[first : first + len(pairs)], want), f"scales of expert {e}"
        if s.layout == "contiguous_128":
            assert layout[first : first + len(pairs)] == [e] * len(pairs)
    if s.layout == "contiguous_128":
        assert sum(n >= 0 for n in layout) == used.sum()
    if poisoned:
        assert is_nan(flat)[~used.to(flat.device)].all(), "a row beyond the counts was written"
        assert raw is None or is_nan(raw)[~used.to(flat.device)].all(), "a scale beyond the counts was written"
    y = experts(s, rank.index, h, rows, row_scales, counts)
    nan_(rows)
    nan_(row_scales)
    return y


def finish(rank: Rank, a2a: AllToAll, s: Scenario, h: Handle, dtype=torch.float32) -> Tensor:
    """combine_recv into a poisoned tensor, compared with the dense MoE."""
    g = s.groups()[rank.index // s.tp]
    out = torch.full(g.x.shape, torch.nan, dtype=dtype, device=rank.device)
    assert a2a.combine_recv(h, out) is out
    a2a.check()
    check_out(s, g, out)
    return out


def check_out(s: Scenario, g: Group, out: Tensor) -> None:
    """Within one rounding of the float64 sum; exact zeros where no expert was asked."""
    values = s.values(g.x, g.scales)
    want = dense_moe(values, g.ids, g.weights, s.expert)
    bound = rounding_bound(values, g.ids, g.weights, s.expert)
    once = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[out.dtype]
    bound = bound + once * (want.abs() + bound) + 1e-7 * (out.dtype == torch.float16)
    assert ((out.cpu().double() - want).abs() <= bound).all()
    nowhere = (g.ids < 0).all(1)
    assert same_bits(out[nowhere.to(out.device)], torch.zeros_like(out[nowhere.to(out.device)]))


def alone(s: Scenario, group: int) -> Tensor:
    """The float32 result of one DP group's tokens with all experts on one rank."""
    s1, g = s.replace(dp=1, tp=1, tokens=(s.tokens[group],)), s.groups()[group]
    a2a = AllToAll(
        ParallelConfig(), s.num_experts, s.top_k, s.hidden, s.max_tokens, s.payload, layout=s.layout,
        scales=s.scales, group=VirtualRanks(1).rank(0),
    )  # fmt: skip
    h = a2a.dispatch_send(g.x, g.ids, g.weights, g.scales)
    received = a2a.dispatch_recv(h)
    a2a.combine_send(h, experts(s1, 0, h, *received))
    return a2a.combine_recv(h, torch.full(g.x.shape, torch.nan))


def whole(rank: Rank, a2a: AllToAll, s: Scenario, dtype=torch.float32, poisoned: bool = False) -> Tensor:
    """One exchange, every half checked; y is overwritten as soon as it is sent."""
    h = send(rank, a2a, s)
    y = receive(rank, a2a, s, h, poisoned)
    a2a.combine_send(h, y)
    nan_(y)
    return finish(rank, a2a, s, h, dtype)


def fused(rank: Rank, a2a: AllToAll, s: Scenario) -> Tensor:
    """One exchange in two calls, arguments overwritten after each."""
    g = mine(rank, s)
    h, *received = a2a.dispatch(g.x, g.ids, g.weights, g.scales)
    for t in (g.x, g.weights, g.scales):
        nan_(t)
    a2a.check()
    y = experts(s, rank.index, h, *received)
    out = torch.full(g.x.shape, torch.nan, device=rank.device)
    a2a.combine(h, y, out)
    nan_(y)
    a2a.check()
    check_out(s, s.groups()[rank.index // s.tp], out)
    return out


def check_exchange(rank: Rank, s: Scenario) -> tuple[int, torch.Tensor]:
    """Everything about one scenario. Returns (rows received, result)."""
    with s.construct(rank) as a2a:
        first = whole(rank, a2a, s)
        again = whole(rank, a2a, s, poisoned=True)  # the slot's buffers now hold NaN
        assert same_bits(again, first), "the same input gave other bits"
        assert same_bits(fused(rank, a2a, s), first), "the fused forms gave other bits"
        rounded = whole(rank, a2a, s, dtype=torch.bfloat16)
        assert same_bits(rounded, first.to(torch.bfloat16)), "not rounded once from float32"
        if rank.device.type == "cpu":
            assert same_bits(first, alone(s, rank.index // s.tp)), "bits depend on the number of ranks"
        else:
            assert torch.equal(first.cpu(), alone(s, rank.index // s.tp))
        expected = expected_rows(s.spec, rank.index, [g.ids for g in s.groups()])
        return sum(map(len, expected)), first.cpu()
