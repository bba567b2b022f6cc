"""The fused forms give what the halves give, and FP8 made while sending is the FP8 of `moelab.ops.quantize`."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from moelab.comm import AllToAll, CommError, InputError, VirtualRanks
from moelab.config import ParallelConfig
from moelab.ops.quantize import quantize_reference
from tests.comm import cases
from tests.comm.scenario import Group, Scenario, nan_, same_bits
from tests.conftest import SEED
from tests.pool import Rank


def scenario(pool, kind=Scenario, **options) -> Scenario:
    ep = pool.up_to(4)
    tp = 2 if ep > 2 else 1
    return kind(**dict(dp=ep // tp, tp=tp, tokens=(5, 8, 3, 0)[: ep // tp], hidden=144, seed=SEED) | options)


def dispatch(rank: Rank, a2a: AllToAll, s: Scenario, fused: bool, **options):
    """(handle, outputs of the experts), all of it checked; arguments are overwritten at once."""
    if not fused:
        h = cases.send(rank, a2a, s, **options)
        return h, cases.receive(rank, a2a, s, h, poisoned=True)
    g = cases.mine(rank, s)
    h, *received = a2a.dispatch(g.x, g.ids, g.weights, g.scales, **options)
    for t in (g.x, g.weights, g.scales):
        nan_(t)
    done = SimpleNamespace(device=a2a.device, dispatch_recv=lambda handle: received)
    return h, cases.receive(rank, done, s, h, poisoned=True)


def combine(rank: Rank, a2a: AllToAll, s: Scenario, h, y: torch.Tensor, fused: bool) -> torch.Tensor:
    if not fused:
        a2a.combine_send(h, y)
        nan_(y)
        return cases.finish(rank, a2a, s, h)
    g = s.groups()[rank.index // s.tp]
    out = torch.full(g.x.shape, torch.nan, device=rank.device)
    assert a2a.combine(h, y, out) is out
    nan_(y)
    cases.check_out(s, g, out)
    return out


def all_forms(rank: Rank, s: Scenario) -> None:
    with s.construct(rank, slots=1) as a2a:
        cases.whole(rank, a2a, s)  # leaves NaN in the slot
        results = []
        for forms in ((False, False), (True, False), (False, True), (True, True)):
            h, y = dispatch(rank, a2a, s, forms[0], has_work=rank.index // s.tp == 0)
            assert not h.all_idle
            results.append(combine(rank, a2a, s, h, y, forms[1]))
            with pytest.raises(CommError, match="it is finished"):
                a2a.combine(h, y, results[-1])
        assert all(same_bits(result, results[0]) for result in results)
        a2a.check()


@pytest.mark.parametrize("layout", ["expert_padded", "contiguous_128"])
@pytest.mark.parametrize("payload, scales", [("f32", "row"), ("bf16", "row"), ("fp8", "column_tma")])
def test_fused_and_split_forms_agree_bit_for_bit(pool, payload, scales, layout):
    s = scenario(pool, payload=payload, scales=scales, layout=layout)
    pool.run(all_forms, s, ranks=s.ep)


def rules(rank: Rank, s: Scenario) -> None:
    with s.construct(rank, slots=1) as a2a, s.construct(rank) as other:
        g = cases.mine(rank, s)
        out = torch.empty(g.x.shape, device=rank.device)
        if rank.index == 0:  # nothing of this may send anything, or the others' exchange below goes wrong
            with pytest.raises(InputError, match=re.escape(f"topk_ids has shape [{len(g.ids)}, 1]")):
                a2a.dispatch(g.x, g.ids[:, :1], g.weights)
        h = a2a.dispatch_send(g.x, g.ids, g.weights)
        y = torch.zeros(s.spec.rows_shape, dtype=s.spec.output_dtype, device=rank.device)
        with pytest.raises(CommError, match="combine of exchange 0 out of order: its next half is dispatch_recv"):
            a2a.combine(h, y, out)
        with pytest.raises(CommError, match="1 exchanges are in flight and slots is 1"):
            a2a.dispatch(g.x, g.ids, g.weights)
        y = cases.receive(rank, a2a, s, h)
        with pytest.raises(CommError, match="started by another AllToAll"):
            other.combine(h, y, out)
        with pytest.raises(InputError, match="y has shape"):
            a2a.combine(h, y[:1], out)
        with pytest.raises(InputError, match="out has shape"):
            a2a.combine(h, y, out[:, :16])
        combine(rank, a2a, s, h, y, fused=True)
        h, y = dispatch(rank, a2a, s, fused=True)
        with pytest.raises(CommError, match="dispatch_recv of exchange 1 out of order: its next half is combine_send"):
            a2a.dispatch_recv(h)
        combine(rank, a2a, s, h, y, fused=True)


def test_fused_forms_keep_the_rules(pool):
    s = scenario(pool)
    pool.run(rules, s, ranks=s.ep)


@dataclasses.dataclass(frozen=True)
class Quantized(Scenario):
    """Its groups are what sending makes of the bfloat16 values of `plain`."""

    payload: str = "fp8"

    @property
    def plain(self) -> Scenario:
        return Scenario(**dataclasses.asdict(self) | {"payload": "bf16", "scales": "row"})

    def _draw(self, n: int, generator: torch.Generator) -> Group:
        g = self.plain._draw(n, generator)
        x, scales = quantize_reference(g.x, power_of_two=self.scales == "ue8m0")
        return Group(x, g.ids, g.weights, scales)


def quantized(rank: Rank, s: Quantized, fused: bool, options: dict) -> None:
    with s.construct(rank) as a2a:
        cases.whole(rank, a2a, s)
        g, x = cases.mine(rank, s), s.plain.groups()[rank.index // s.tp].x.to(rank.device)
        x = x.T.contiguous().T if options.get("strided") else x
        n, num_tokens = len(x), None
        if options.get("longer"):
            more = s.max_tokens - n
            x = torch.cat([x, torch.full((more, s.hidden), torch.nan, dtype=x.dtype, device=rank.device)])
            g = Group(g.x, *(torch.cat([t, t.new_full((more, s.top_k), 1)]) for t in (g.ids, g.weights)), None)
            num_tokens = torch.tensor([n], dtype=torch.int32, device=rank.device)
        if fused:
            h, *received = a2a.dispatch(x, g.ids, g.weights, num_tokens=num_tokens)
        else:
            h = a2a.dispatch_send(x, g.ids, g.weights, num_tokens=num_tokens)
        nan_(x)
        if not fused:
            received = a2a.dispatch_recv(h)
        done = SimpleNamespace(device=a2a.device, dispatch_recv=lambda handle: received)
        y = cases.receive(rank, done, s, h, poisoned=True)
        out = torch.full(x.shape, torch.nan, device=rank.device)
        a2a.combine(h, y, out)
        cases.check_out(s, s.groups()[rank.index // s.tp], out[:n])
        assert out[n:].isnan().all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [{}, {"strided": True}, {"longer": True}], ids=str)
@pytest.mark.parametrize("scales, hidden", [("row", 144), ("column_tma", 640), ("ue8m0", 144)])
def test_bfloat16_is_quantised_as_it_is_sent(pool, scales, hidden, options, fused):
    s = scenario(pool, Quantized, scales=scales, hidden=hidden)
    pool.run(quantized, s, fused, options, ranks=s.ep)


def test_what_has_no_amax_stays_visible():
    a2a = AllToAll(ParallelConfig(), 2, 1, 256, 2, "fp8", group=VirtualRanks(1).rank(0))
    x = torch.randn(2, 256).bfloat16()
    x[0, 200] = torch.inf
    _, rows, scales, counts = a2a.dispatch(x, torch.tensor([[1], [1]]), torch.ones(2, 1))
    values, wanted = quantize_reference(x)
    assert counts.tolist() == [0, 2] and same_bits(rows[1, :2], values) and same_bits(scales[1, :2], wanted)
    assert scales[1, :2].isnan().tolist() == [[False, True], [False, False]]


def test_only_bfloat16_without_scales_is_quantised():
    a2a = AllToAll(ParallelConfig(), 4, 2, 64, 8, "fp8", group=VirtualRanks(1).rank(0))
    ids, weights, scales = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2), torch.ones(3, 1)
    for x, given, words in [
        (torch.zeros(3, 64), None, "x is float32: legal are float8_e4m3fn"),
        (torch.zeros(3, 64).bfloat16(), scales, "x is bfloat16: legal are float8_e4m3fn"),
        (torch.zeros(3, 64).to(torch.float8_e4m3fn), None, "scales is None: an fp8 payload needs float32 [3, 1]; or "),
        (torch.zeros(3, 48).bfloat16(), None, "x has shape [3, 48]: expected [T, 64]"),
    ]:
        for call in (a2a.dispatch_send, a2a.dispatch):
            with pytest.raises(InputError, match=re.escape(words)):
                call(x, ids, weights, given)
