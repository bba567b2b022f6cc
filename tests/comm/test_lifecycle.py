"""Handles, slots, instances, arguments: the rules of calling, the same for every backend."""

from __future__ import annotations

import gc
import random
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moelab.comm import AllToAll, CommError, InputError
from moelab.config import ConfigError
from tests.comm import cases
from tests.comm.scenario import Scenario, nan_, same_bits
from tests.conftest import SEED
from tests.pool import Rank


def scenario(pool, ranks: int = 2, **options) -> Scenario:
    dp = pool.up_to(ranks)
    tokens = tuple((5, 3, 8, 0, 1, 7, 2, 4)[:dp])
    return Scenario(**dict(dp=dp, tokens=tokens, seed=SEED) | options)


# ---- order and slots


def interleaving(exchanges: int, slots: int, seed: int) -> list[int]:
    """Each exchange four times, at most `slots` of them begun and not finished at any point."""
    draw, done, order, begun = random.Random(seed), {}, [], 0
    while begun < exchanges or done:
        choices = list(done) + [begun] * (begun < exchanges and len(done) < slots)
        i = draw.choice(choices)
        begun += i == begun
        done[i] = done.get(i, 0) + 1
        order.append(i)
        if done[i] == 4:
            del done[i]
    return order


def walk(rank: Rank, s: Scenario, slots: int, order: list[int]) -> None:
    """Exchanges of changing batches, their halves in the given order; one too many if all slots are taken."""
    with s.construct(rank, slots=slots) as a2a:
        live: dict[int, list] = {}
        for i in order:
            draw = random.Random(f"{s.seed} {i}")
            si = s.replace(seed=s.seed + i, tokens=tuple(draw.randrange(s.max_tokens + 1) for _ in s.tokens))
            if i not in live:
                live[i] = [cases.send(rank, a2a, si)]
            elif len(live[i]) == 1:
                live[i].append(cases.receive(rank, a2a, si, live[i][0]))
            elif len(live[i]) == 2:
                a2a.combine_send(*live[i])
                nan_(live[i][1])
                live[i].append(None)
            else:
                cases.finish(rank, a2a, si, live.pop(i)[0])
            if len(live) == slots:
                with pytest.raises(CommError, match=rf"{slots} exchanges are in flight and slots is {slots}"):
                    cases.send(rank, a2a, si)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(slots=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_halves_interleave_in_any_order(pool, slots, seed):
    s = scenario(pool, 4, seed=seed)
    pool.run(walk, s, slots, interleaving(5, slots, seed), ranks=s.ep)


def test_many_rounds_of_changing_batches(pool):
    s = scenario(pool, 4, payload="fp8", hidden=144, layout="contiguous_128")
    pool.run(walk, s, 2, interleaving(60, 2, SEED), ranks=s.ep)


def wrong_order(rank: Rank, s: Scenario) -> None:
    y = torch.zeros(s.spec.rows_shape, dtype=s.spec.output_dtype, device=rank.device)
    with s.construct(rank) as a2a, s.construct(rank) as other:
        out = torch.empty_like(cases.mine(rank, s).x)
        h = cases.send(rank, a2a, s)
        with pytest.raises(CommError, match="all_idle of exchange 0 is not known yet: call dispatch_recv first"):
            _ = h.all_idle
        for call in (lambda: a2a.combine_send(h, y), lambda: a2a.combine_recv(h, out)):
            with pytest.raises(CommError, match="out of order: its next half is dispatch_recv"):
                call()
        with pytest.raises(CommError, match="started by another AllToAll"):
            other.dispatch_recv(h)
        y = cases.receive(rank, a2a, s, h)
        with pytest.raises(CommError, match="next half is combine_send"):
            a2a.dispatch_recv(h)
        a2a.combine_send(h, y)
        with pytest.raises(CommError, match="next half is combine_recv"):
            a2a.combine_send(h, y)
        cases.finish(rank, a2a, s, h)
        with pytest.raises(CommError, match="it is finished"):
            a2a.combine_recv(h, out)
        cases.whole(rank, a2a, s)  # none of it did harm


def test_wrong_order_of_halves(pool):
    s = scenario(pool)
    pool.run(wrong_order, s, ranks=s.ep)


def two_sends(rank: Rank, s: Scenario) -> None:
    rank.state["a2a"] = a2a = s.construct(rank)
    rank.state["handles"] = [cases.send(rank, a2a, s) for _ in range(2)]


def rest_of_two(rank: Rank, s: Scenario) -> None:
    a2a = rank.state.pop("a2a")
    for h in rank.state.pop("handles"):
        a2a.combine_send(h, cases.receive(rank, a2a, s, h))
        cases.finish(rank, a2a, s, h)
    a2a.close()


def construct_only(rank: Rank, s: Scenario) -> None:
    rank.state["a2a"] = s.construct(rank)


def sends_of_constructed(rank: Rank, s: Scenario) -> None:
    a2a = rank.state["a2a"]
    rank.state["handles"] = [cases.send(rank, a2a, s) for _ in range(2)]


def test_sends_return_while_no_peer_has_called(pool):
    if pool.kind.startswith("gpu-virtual"):
        pytest.skip("the halves of virtual ranks on a GPU are one launch: every call is a meeting")
    s = scenario(pool)
    pool.run(construct_only, s, ranks=s.ep)
    pool.submit(0, sends_of_constructed, s).result(20)
    for rank in range(1, s.ep):
        pool.submit(rank, sends_of_constructed, s).result(20)
    pool.run(rest_of_two, s, ranks=s.ep)


def leaks(rank: Rank, s: Scenario) -> int:
    """Tensors alive after 30 exchanges, beyond those alive after 3."""
    with s.construct(rank) as a2a:
        alive = []
        for rounds in (3, 27):
            for _ in range(rounds):
                cases.whole(rank, a2a, s)
            gc.collect()
            alive.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
        return alive[1] - alive[0]


def test_a_finished_exchange_leaves_nothing_behind(gloo_pool):
    s = scenario(gloo_pool)
    assert gloo_pool.run(leaks, s, ranks=s.ep) == [0] * s.ep


# ---- idle


def idle_bits(rank: Rank, s: Scenario, busy: int | None) -> bool:
    with s.construct(rank) as a2a:
        h = cases.send(rank, a2a, s, has_work=rank.index // s.tp == busy)
        a2a.combine_send(h, cases.receive(rank, a2a, s, h))
        cases.finish(rank, a2a, s, h)
        return h.all_idle


def test_all_idle_is_the_same_everywhere(pool):
    ep = pool.up_to(4)
    s = Scenario(dp=ep // 2, tp=2, tokens=(0,) * (ep // 2), seed=SEED)
    for busy in (None, *range(s.dp)):
        assert pool.run(idle_bits, s, busy, ranks=ep) == [busy is None] * ep


# ---- arguments


def bad_arguments(s: Scenario, device, values: bool) -> list[tuple[dict, str]]:
    """Changes to right arguments, and what the error must say; also of values, where the host reads them."""
    k, e, h, m = s.top_k, s.num_experts, s.hidden, s.max_tokens
    ids, weights = torch.zeros(2, k, dtype=torch.int64, device=device), torch.ones(2, k, device=device)
    too_big, too_small = ids.clone(), ids.clone()
    too_big[1, 2], too_small[0, 1] = e, -2
    x = torch.zeros(2, h, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones(2, 2, device=device)
    odd = scales.clone()
    odd[1, 0] = 3.0
    n = torch.tensor(3, dtype=torch.int32, device=device)
    many = torch.zeros(m + 1, h, dtype=torch.float8_e4m3fn, device=device)
    good = dict(x=x, topk_ids=ids, topk_weights=weights, scales=scales)
    changes = [
        (dict(x=many), f"x has {m + 1} tokens: max_tokens is {m}"),
        (dict(x=x[:, :16]), f"x has shape [2, 16]: expected [T, {h}]"),
        (dict(x=x.to(torch.bfloat16)), "x is bfloat16: legal are float8_e4m3fn"),
        (dict(x=[1.0]), "x is a list"),
        (dict(topk_ids=ids.float()), "topk_ids is float32: legal are int32, int64"),
        (dict(topk_ids=ids[:1]), f"topk_ids has shape [1, {k}]: expected [2, {k}]"),
        (dict(topk_weights=weights.double()), "topk_weights is float64: legal are float32"),
        (dict(topk_weights=weights[:, :1]), "topk_weights has shape [2, 1]"),
        (dict(scales=None), "scales is None: an fp8 payload needs float32 [2, 2]"),
        (dict(scales=scales[:, :1]), "scales has shape [2, 1]: expected [2, 2]"),
        (dict(num_tokens=2), "num_tokens is 2: give an int32 tensor"),
        (dict(x=x.to("meta")), "x is on meta: this AllToAll works on "),
    ]
    if values:
        changes += [
            (dict(topk_ids=too_big), f"topk_ids[1, 2] is {e}: legal are 0…{e - 1}"),
            (dict(topk_ids=too_small), "topk_ids[0, 1] is -2"),
            (dict(scales=odd), "scales[1, 0] is 3.0: UE8M0 holds only powers of two"),
            (dict(scales=-scales), "scales[0, 0] is -1.0"),
            (dict(scales=scales * 0), "scales[0, 0] is 0.0"),
            (dict(scales=scales * torch.nan), "scales[0, 0] is nan"),
            (dict(num_tokens=n), "num_tokens is 3: legal are 0…2"),
        ]
    return [(good | change, words) for change, words in changes]


def refuse(rank: Rank, s: Scenario) -> int:
    """Rank 0 errs wherever it can; had anything been sent, the exchange that follows would go wrong."""
    with s.construct(rank) as a2a:
        tried = 0
        if rank.index == 0:
            for arguments, words in bad_arguments(s, rank.device, values=not rank.kernels):
                with pytest.raises(InputError, match=re.escape(words)):
                    a2a.dispatch_send(**arguments)
                tried += 1
        h = cases.send(rank, a2a, s)
        y = cases.receive(rank, a2a, s, h)
        for wrong in (y[:1], y.float(), y.to("meta")):
            with pytest.raises(InputError, match="y "):
                a2a.combine_send(h, wrong)
        a2a.combine_send(h, y)
        shape = cases.mine(rank, s).x.shape
        for wrong in (
            torch.empty(99, s.hidden),
            torch.empty(shape).double(),
            torch.empty(shape, device="meta"),
        ):
            with pytest.raises(InputError, match="out "):
                a2a.combine_recv(h, wrong)
        cases.finish(rank, a2a, s, h)
        return tried


def test_wrong_arguments_are_refused_before_anything_is_sent(pool):
    s = scenario(pool, payload="fp8", scales="ue8m0", hidden=144)
    assert pool.run(refuse, s, ranks=s.ep)[0] == (12 if pool.kernels else 19)


def dtypes_and_strides(rank: Rank, s: Scenario) -> None:
    with s.construct(rank) as a2a:
        g = cases.mine(rank, s)
        wide = torch.full((len(g.ids), 3 * s.top_k), -7, device=rank.device)
        wide[:, ::3] = g.ids
        strided = torch.empty(g.x.shape[1], g.x.shape[0], dtype=g.x.dtype, device=rank.device).t()
        strided.copy_(g.x)
        variants = [
            (g.x, g.ids, g.weights, g.scales),
            (g.x, g.ids.int(), g.weights, g.scales),
            (strided, wide[:, ::3], g.weights.t().contiguous().t(), g.scales.t().contiguous().t()),
        ]
        results = []
        for x, ids, weights, scales in variants:
            h = a2a.dispatch_send(x, ids, weights, scales)
            a2a.combine_send(h, cases.receive(rank, a2a, s, h))
            results.append(cases.finish(rank, a2a, s, h))
        assert all(same_bits(r, results[0]) for r in results)


@pytest.mark.parametrize("hidden", [128, 144])
def test_ids_of_both_dtypes_and_any_strides_agree(pool, hidden):
    s = scenario(pool, payload="fp8", hidden=hidden)
    pool.run(dtypes_and_strides, s, ranks=s.ep)


def fewer_tokens(rank: Rank, s: Scenario) -> None:
    """num_tokens = T of the scenario, in tensors that are longer and hold nonsense beyond it."""
    with s.construct(rank) as a2a:
        g = cases.mine(rank, s)
        n, more = len(g.x), s.max_tokens - len(g.x)
        x = torch.cat([g.x, torch.full((more, s.hidden), torch.nan, dtype=g.x.dtype, device=rank.device)])
        ids = torch.cat([g.ids, torch.full((more, s.top_k), 999, device=rank.device)])
        weights = torch.cat([g.weights, torch.full((more, s.top_k), torch.nan, device=rank.device)])
        num_tokens = torch.tensor(n, dtype=torch.int32, device=rank.device)
        h = a2a.dispatch_send(x, ids, weights, num_tokens=num_tokens)
        a2a.combine_send(h, cases.receive(rank, a2a, s, h))
        out = torch.full(x.shape, torch.nan, device=rank.device)
        a2a.combine_recv(h, out)
        cases.check_out(s, s.groups()[rank.index // s.tp], out[:n])
        assert out[n:].isnan().all(), "rows beyond num_tokens were written"


def test_num_tokens_replaces_the_length(pool):
    s = scenario(pool, 4)
    pool.run(fewer_tokens, s, ranks=s.ep)


def in_and_out_of_inference_mode(rank: Rank, s: Scenario) -> None:
    with s.construct(rank, slots=1) as a2a:
        with torch.inference_mode():
            first = cases.whole(rank, a2a, s)
        assert same_bits(cases.whole(rank, a2a, s), first)


def test_inference_mode_may_change_between_exchanges(pool):
    s = scenario(pool)
    pool.run(in_and_out_of_inference_mode, s, ranks=s.ep)


# ---- instances


def several(rank: Rank, s: Scenario) -> None:
    """Three exchanges of different shape at once; the middle one closes and a fourth opens in mid-flight."""
    shapes = [
        s,
        s.replace(hidden=128, payload="f32", seed=s.seed + 1),
        s.replace(top_k=1, layout="contiguous_128"),
    ]
    a2as = [shape.construct(rank) for shape in shapes]
    handles = [cases.send(rank, a, shape) for a, shape in zip(a2as, shapes, strict=True)]
    ys = {i: cases.receive(rank, a2as[i], shapes[i], handles[i]) for i in (2, 0, 1)}
    for i in (1, 0, 2):
        a2as[i].combine_send(handles[i], ys[i])
    cases.finish(rank, a2as[1], shapes[1], handles[1])
    a2as[1].close()
    with s.construct(rank) as fourth:
        h = cases.send(rank, fourth, s)
        cases.finish(rank, a2as[2], shapes[2], handles[2])
        fourth.combine_send(h, cases.receive(rank, fourth, s, h))
        cases.finish(rank, a2as[0], shapes[0], handles[0])
        cases.finish(rank, fourth, s, h)
    for i in (0, 2):
        cases.whole(rank, a2as[i], shapes[i])
        a2as[i].close()


def test_instances_do_not_meet(pool):
    s = scenario(pool, 4)
    pool.run(several, s, ranks=s.ep)


def close_twice(rank: Rank, s: Scenario) -> None:
    a2a = s.construct(rank)
    cases.whole(rank, a2a, s)
    a2a.close()
    a2a.close()
    with pytest.raises(CommError, match="can no longer be used: it is closed"):
        cases.send(rank, a2a, s)
    dropped = s.construct(rank)
    cases.whole(rank, dropped, s)
    if rank.index == 0 and not rank.closes_together:
        del dropped  # never closed: forgetting one must not wait for anybody
        gc.collect()
    else:
        dropped.close()


def test_close_is_idempotent_and_final(pool):
    s = scenario(pool)
    pool.run(close_twice, s, ranks=s.ep)


def until_combine_send(rank: Rank, s: Scenario) -> None:
    rank.state["a2a"] = a2a = s.construct(rank)
    rank.state["h"] = h = cases.send(rank, a2a, s)
    a2a.combine_send(h, cases.receive(rank, a2a, s, h))


def finish_and_close(rank: Rank, s: Scenario) -> None:
    a2a = rank.state["a2a"]
    cases.finish(rank, a2a, s, rank.state.pop("h"))
    if not rank.closes_together:
        a2a.close()


def close(rank: Rank) -> None:
    rank.state.pop("a2a").close()


def test_a_rank_that_closes_early_takes_nothing_from_the_others(pool):
    if pool.kind.startswith("gpu-virtual"):
        pytest.skip("the halves of virtual ranks on a GPU are one launch: every call is a meeting")
    s = scenario(pool, 4, masked=0.0)
    pool.run(until_combine_send, s, ranks=s.ep)
    for rank in range(s.ep):
        pool.submit(rank, finish_and_close, s).result(20)
    pool.run(close, ranks=s.ep)


def differing(rank: Rank, s: Scenario) -> str:
    changed = s.replace(max_tokens=s.max_tokens + (rank.index == s.ep - 1))
    try:
        a2a = changed.construct(rank, timeout_s=2 if rank.kind.startswith("emulated") else 30)
        a2a.dispatch_recv(cases.send(rank, a2a, s))  # virtual ranks do not wait for one another before
    except (ConfigError, CommError) as error:
        return str(error)
    return "nothing"


def test_ranks_that_disagree_about_max_tokens_are_told(pool):
    s = scenario(pool)
    errors = pool.run(differing, s, ranks=s.ep)
    if pool.kind.startswith("emulated"):  # a kernel that runs already hears of nothing, but its wait ends
        told = [e for e in errors if "waited for rank" not in e]
        assert told, errors
        errors = told
    assert all(re.search(r"max_tokens is [89] on rank \d but [89] on rank \d", e) for e in errors), errors


def agreeing(rank: Rank, s: Scenario, odd: int) -> str:
    """Agrees twice, the second time with another setting on rank `odd`, and goes on, as long as nothing is raised."""
    try:
        with s.construct(rank, timeout_s=2 if rank.kind.startswith("emulated") else 30) as a2a:
            a2a.agree(overlap="none", draft_tokens=0)
            try:
                a2a.agree(overlap="none", draft_tokens=int(rank.index == odd))
                cases.whole(rank, a2a, s)
            except ConfigError:
                with pytest.raises(CommError, match="can no longer be used: it failed earlier"):
                    a2a.agree()
                raise
    except (ConfigError, CommError) as error:
        return str(error)
    return "nothing"


def test_ranks_that_agree_go_on(pool):
    s = scenario(pool, 4)
    assert pool.run(agreeing, s, -1, ranks=s.ep) == ["nothing"] * s.ep


def test_ranks_that_disagree_about_what_they_were_told_are_told(pool):
    s = scenario(pool, 4)
    errors = pool.run(agreeing, s, s.ep - 1, ranks=s.ep)
    if pool.kind.startswith("emulated"):  # as above
        told = [e for e in errors if "waited for rank" not in e]
        assert told and errors[-1] in told, errors
        errors = told
    said = re.compile(r"draft_tokens is (\d) on rank (\d) but (\d) on rank (\d): give every rank the same")
    for rank, error in enumerate(errors):
        match = said.fullmatch(error)
        assert match, errors
        ours, who, theirs, peer = map(int, match.groups())
        assert {(who, ours), (peer, theirs)} & {(s.ep - 1, 1)} and ours + theirs == 1
        if not pool.kind.startswith(("virtual", "emulated", "gpu-virtual")):
            assert who == rank


def test_available_names_every_backend():
    reasons = AllToAll.available()
    assert set(reasons) == {"torch-gloo", "torch-nccl", "virtual", "nvshmem"}
    assert reasons["virtual"] == reasons["torch-gloo"] == "ok"
    assert all(reasons.values())
