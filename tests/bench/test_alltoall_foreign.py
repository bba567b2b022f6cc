"""DeepEP and pplx-kernels as the benchmark calls them: stand-ins with their signatures, over `AllToAll`, whose rows
stand in another order. They show that the check holds whatever the order and finds faults, not that the real libraries
take these calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from moelab.bench import alltoall_foreign as foreign
from moelab.bench.alltoall_case import Case, WrongResult
from moelab.bench.alltoall_setting import Copies
from moelab.bench.timer import BenchError
from moelab.comm import AllToAll
from tests.bench.test_alltoall import setting


def turned(rows, counts):
    if rows is None:
        return None
    out = rows.clone()
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = rows[expert, :count].flip(0)
    return out


class Fake:
    """Both libraries' calls. (`AllToAll` wants the weights in dispatch already.)"""

    def __init__(self, rank, s, case: Case, fault: bool) -> None:
        self.rank, self.s, self.case, self.fault = rank, s, case, fault
        self.a2a = AllToAll(s.parallel(), s.experts, s.top_k, s.hidden, s.tokens, s.payload, group=rank.groups[s.ep])

    def _dispatch(self, x, ids, scales):
        self.handle, rows, row_scales, counts = self.a2a.dispatch(x, ids.to(torch.int32), self.case.weights, scales)
        self.counts = counts.clone()
        return turned(rows, counts), turned(row_scales, counts)

    def _combine(self, y, out):
        y = turned(y, self.counts)
        if self.fault and self.rank.index == 0:
            y = y.roll(1, 0)  # the outputs of other experts
        self.a2a.combine(self.handle, y, out)

    # DeepEP.
    def low_latency_dispatch(self, x, ids, most, experts, use_fp8=True):
        assert (x.dtype, ids.dtype, most, experts) == (torch.bfloat16, torch.int64, self.s.tokens, self.s.experts)
        rows, scales = self._dispatch(self.case.x, ids, self.case.scales)  # as if it had quantised them
        return (rows, scales) if use_fp8 else rows, self.counts, "handle", None, None

    def low_latency_combine(self, y, ids, weights, handle, out):
        assert handle == "handle" and torch.equal(weights, self.case.weights)
        self._combine(y, out)

    # pplx-kernels.
    def dispatch(self, counts, rows, scales, x, x_scales, ids, bound):
        assert ids.dtype == torch.uint32 and bound.tolist() == [self.s.tokens]
        got, got_scales = self._dispatch(x, ids.to(torch.int64), x_scales)
        for to, what in ((counts, self.counts), (rows, got), (scales, got_scales)):
            if to is not None:
                to.copy_(what)

    def combine(self, out, ids, weights, y, bound):
        self._combine(y, out)

    def destroy(self):
        self.a2a.close()


def run(rank, kind: str, s, fault: bool) -> tuple[int, int]:
    case = Case(s, rank.index, rank.device)
    fake = Fake(rank, s, case, fault)

    class Buffer:
        get_low_latency_rdma_size_hint = staticmethod(lambda *sizes: 1)

        def __new__(cls, group, **options):
            assert options["low_latency_mode"] and options["num_qps_per_rank"] == s.local_experts
            return fake

    def intranode(**options):
        assert options["hidden_dim_scale_bytes"] == 4 * s.num_scales and options["dp_size"] == s.tp
        return fake

    modules = {
        "deep_ep": SimpleNamespace(Buffer=Buffer),
        "pplx_kernels": SimpleNamespace(AllToAll=SimpleNamespace(intranode=intranode)),
    }
    patch = pytest.MonkeyPatch()
    patch.setattr(foreign, "_import", lambda name, how: modules[name])
    patch.setattr(foreign.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="0")))
    try:
        it = {"deep_ep": foreign.DeepEP, "pplx": foreign.Pplx}[kind](case)
    finally:
        patch.undo()
    it.pair()
    if fault and rank.index == 0:
        with pytest.raises(WrongResult):
            it.check()
    elif not fault:
        it.check()
        it.poison()
        it.check()  # a pair of its own
    else:
        try:
            it.check()  # its tokens may all have gone elsewhere
        except WrongResult:
            pass
    it.pair()
    it.close()
    return it.sent_bytes(Copies.of(s))


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("payload", ["fp8", "bf16"])
@pytest.mark.parametrize("kind", ["deep_ep", "pplx"])
def test_rows_in_any_order_and_faults(gloo_pool, kind, payload, fault):
    s = setting(payload=payload)
    (dispatch, combine), _ = gloo_pool.run(run, kind, s, fault, ranks=2)
    assert dispatch > 0 and combine % (2 * s.hidden) == 0


def test_what_cannot_be_imported_says_how_to_get_it(monkeypatch):
    case = Case(setting(), 0, torch.device("cpu"))
    for name, kind in (("deep_ep", foreign.DeepEP), ("pplx_kernels", foreign.Pplx)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(BenchError, match=f"cannot import {name} .*from source"):
            kind(case)


def test_deepep_knows_no_tp():
    patch = pytest.MonkeyPatch()
    patch.setattr(foreign, "_import", lambda name, how: None)
    with pytest.raises(BenchError, match="it knows no TP groups, this is TP 2"):
        foreign.DeepEP(Case(setting(dp=1, tp=2), 0, torch.device("cpu")))
    patch.undo()
