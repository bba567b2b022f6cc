"""What users of other libraries have reported, one by one. Most of it is a matter of cases that other files run anyway:

| behaviour, and where it was reported | test |
|---|---|
| 1. no tokens on some ranks or on all, and the next round is right (deepseek-ai/DeepEP#374, uccl-project/uccl#940, sgl-project/sglang#25397, vllm-project/vllm#51984) | test_exchange: unequal_and_zero_batches, any_routing; test_lifecycle: many_rounds |
| 2. only M is agreed; ranks replay graphs of different sizes (vllm-project/vllm#25906, #53578, sgl-project/sglang#27945) | test_graphs |
| 3. more than M tokens: an error before launch; a device-side count is clamped and reported (deepseek-ai/DeepEP#165, sgl-project/sglang#28985) | test_lifecycle: wrong_arguments; here |
| 4. −1 sends nothing; a token with nothing else gets zeros (flashinfer-ai/flashinfer#4017, vllm-project/vllm#47733) | cases: check_out in every test |
| 5. ids out of range (debug assertions elsewhere) | test_lifecycle: wrong_arguments; here |
| 6. ids of any integer type and stride (vllm-project/vllm#20166, #45298, sgl-project/sglang#29929) | test_lifecycle: ids_of_both_dtypes |
| 7. any hidden of whole 16 bytes; what is unsupported says so at construction (deepseek-ai/DeepEP#731, #403, NVIDIA/TensorRT-LLM#17984) | test_exchange: any_routing; test_spec; here |
| 8. NaN left in receive buffers changes nothing (sgl-project/sglang#24850, deepseek-ai/DeepEP#589) | cases: whole(poisoned), NaN in the slot after every receive |
| 9. formats of scales, hidden not a multiple of 512 (deepseek-ai/DeepGEMM#33, #289, vllm-project/vllm#32619) | test_exchange: payloads_scales_and_layouts |
| 10. graphs at several T over one buffer, mixed with eager calls (deepseek-ai/DeepEP#93, #170, sgl-project/sglang#5014) | test_graphs |
| 11. two micro-batches in any order; one too many raises (deepseek-ai/DeepEP#513, #166, perplexityai/pplx-garden#16) | test_lifecycle: halves_interleave; test_graphs: two_streams |
| 12. several instances (deepseek-ai/DeepEP#76, NVIDIA/nccl#2303, perplexityai/pplx-kernels#22) | test_lifecycle: instances |
| 13. 10⁵ rounds of changing data, byte for byte (deepseek-ai/DeepEP#621, #632, #657) | stress, test_stress; no bulk stores are used |
| 14. a neighbour that overwrites x at once (flashinfer-ai/flashinfer#3697) | cases: send; test_graphs: neighbour |
| 15. every wait ends, reports, and leaves the process usable (deepseek-ai/DeepEP#382, flashinfer-ai/flashinfer#4637) | test_waits; here |
| 16. peer access is probed (vllm-project/vllm#19034, deepseek-ai/DeepEP#462, #164) | tests of `moelab doctor`; windows lie in NVSHMEM's heap, never in torch's |
| 17. the same input gives the same rows and bits | cases: check_exchange; test_exchange: any_routing |
| 18. nothing is compiled or allocated after construction (deepseek-ai/DeepEP#138) | test_graphs: no_allocation |
| 19. sums in float32, rounded once (deepseek-ai/DeepEP#402, InternLM/xtuner#2053) | cases: check_out |
| 20. experts that do not divide over the ranks | test_spec |
"""  # noqa: E501

from __future__ import annotations

import dataclasses

import pytest
import torch

from moelab.comm import CommError, ExchangeTimeout, InputError
from moelab.comm.library import MOST_BLOCKS
from tests.comm import cases
from tests.comm.scenario import Group, Scenario
from tests.conftest import SEED
from tests.pool import Rank


def scenario(pool, **options) -> Scenario:
    ep = pool.up_to(4)
    tp = 2 if ep > 2 else 1
    return Scenario(**dict(dp=ep // tp, tp=tp, tokens=(8, 5, 3, 6)[: ep // tp], seed=SEED) | options)


@dataclasses.dataclass(frozen=True)
class WithBadIds(Scenario):
    """Some ids are out of range in the ids that are sent; they count as -1."""

    def sent(self, group: int) -> torch.Tensor:
        ids = self.groups()[group].ids.clone()
        for i, bad in enumerate((self.num_experts, -2, 2**31 - 1, 2**40, -(2**40))):
            ids[i % len(ids), i % self.top_k] = bad
        return ids

    def _draw(self, n: int, generator: torch.Generator) -> Group:
        g = super()._draw(n, generator)
        for i in range(5):
            g.ids[i % n, i % self.top_k] = -1
        return g


def bad_ids(rank: Rank, s: WithBadIds, dtype: torch.dtype) -> None:
    with s.construct(rank) as a2a:
        cases.whole(rank, a2a, s)
        g, ids = cases.mine(rank, s), s.sent(rank.index // s.tp)
        if dtype is torch.int32:
            ids = ids.clamp(-(2**31), 2**31 - 1)
        h = a2a.dispatch_send(g.x, ids.to(rank.device, dtype), g.weights)
        with pytest.raises(InputError, match="topk_ids held ids other than 0…15 and -1, which went nowhere"):
            a2a.check()
        a2a.combine_send(h, cases.receive(rank, a2a, s, h))
        cases.finish(rank, a2a, s, h)
        cases.whole(rank, a2a, s)  # it was said once


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_out_of_range_on_the_device_are_masked_and_reported(kernel_pool, dtype):
    s = WithBadIds(**dataclasses.asdict(scenario(kernel_pool)))
    kernel_pool.run(bad_ids, s, dtype, ranks=s.ep)


def bad_counts(rank: Rank, s: Scenario, count: int) -> None:
    """All tokens there are, or none."""
    with s.construct(rank) as a2a:
        told = s if count > 0 else s.replace(tokens=(0,) * s.dp)
        g, n = cases.mine(rank, s), torch.tensor([count], dtype=torch.int32, device=rank.device)
        h = a2a.dispatch_send(g.x, g.ids, g.weights, num_tokens=n)
        with pytest.raises(InputError, match="num_tokens was not in 0…T"):
            a2a.check()
        a2a.combine_send(h, cases.receive(rank, a2a, told, h))
        out = torch.full(g.x.shape, torch.nan, device=rank.device)
        a2a.combine_recv(h, out)
        a2a.check()
        if count > 0:
            cases.check_out(s, s.groups()[rank.index // s.tp], out)
        else:
            assert out.isnan().all()
        cases.whole(rank, a2a, s)


@pytest.mark.parametrize("count", [9, 2**31 - 1, -1, -(2**31)])
def test_a_count_out_of_range_on_the_device_is_clamped_and_reported(kernel_pool, count):
    s = scenario(kernel_pool)
    kernel_pool.run(bad_counts, s, count, ranks=s.ep)


def refused(rank: Rank, s: Scenario) -> str:
    with pytest.raises(CommError) as info:
        s.construct(rank)
    return str(info.value)


def test_what_the_kernels_do_not_serve_is_refused_at_construction(kernel_pool):
    s = scenario(kernel_pool, num_experts=64, top_k=33, tokens=(1,) * scenario(kernel_pool).dp)
    assert all("top_k is more than 32" in said for said in kernel_pool.run(refused, s, ranks=s.ep))
    s = s.replace(top_k=2)
    kernel_pool.run(cases.check_exchange, s, ranks=s.ep)


@dataclasses.dataclass(frozen=True)
class AllOnes(Scenario):
    """Some values are sixteen bytes of ones and more, which are NaN in every format."""

    def _draw(self, n: int, generator: torch.Generator) -> Group:
        g = super()._draw(n, generator)
        g.x.view(torch.uint8)[0, :48] = 0xFF
        g.x.view(torch.uint8)[n - 1, -16:] = 0xFF
        return g


def nan_units(rank: Rank, s: AllOnes) -> None:
    with s.construct(rank, timeout_s=10) as a2a:
        for _ in range(3):
            g = cases.mine(rank, s)
            h, rows, _, counts = a2a.dispatch(g.x, g.ids, g.weights, g.scales)
            a2a.check()
            y = torch.zeros(s.spec.rows_shape, dtype=s.spec.output_dtype, device=rank.device)
            for e, n in enumerate(counts.tolist()):
                y[e, :n] = rows[e, :n].to(y.dtype)
                y[e, :n].view(torch.uint8)[rows[e, :n, 0].float().isnan(), :16] = 0xFF  # the way home as well
            out = torch.zeros(g.x.shape, device=rank.device)
            a2a.combine(h, y, out)
            a2a.check()
            sent = (g.ids >= 0).any(1, keepdim=True)
            assert torch.equal(out.isnan(), g.x.float().isnan() & sent)


@pytest.mark.parametrize("payload", ["bf16", "fp8", "f32"])
def test_sixteen_bytes_of_ones_arrive_as_nan_and_do_not_hang(kernel_pool, payload):
    s = AllOnes(**dataclasses.asdict(scenario(kernel_pool, payload=payload)))
    kernel_pool.run(nan_units, s, ranks=s.ep)


def all_output_dtypes(rank: Rank, s: Scenario) -> None:
    with s.construct(rank) as a2a:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            cases.whole(rank, a2a, s, dtype=dtype)


def test_outputs_of_every_dtype(kernel_pool):
    s = scenario(kernel_pool)
    kernel_pool.run(all_output_dtypes, s, ranks=s.ep)


# ---- numbers that come round, waits that end


def as_after(rank: Rank, s: Scenario, exchanges: int) -> None:
    """An exchange whose slots are as after so many of them. plan.h: a window's slot begins with `entered`, a state's
    with the epochs, one for each block."""
    rank.state["a2a"] = a2a = s.construct(rank)
    shared = a2a._backend._site._shared
    window, state, sizes = shared.windows[rank.index], shared.states[rank.index], shared.library.sizes(shared.shape)
    rank.state["epochs"] = []
    for slot in range(a2a.spec.slots):
        at = slot * sizes.slot_bytes
        window[at : at + 8 * s.ep].view(torch.int64).fill_(exchanges)
        at = slot * sizes.state_bytes // a2a.spec.slots
        rank.state["epochs"].append(epochs := state[at : at + 8 * MOST_BLOCKS].view(torch.int64))
        epochs.fill_(exchanges)
    if rank.device.type == "cuda":
        torch.cuda.synchronize()


def past_32_bits(rank: Rank, s: Scenario, exchanges: int) -> None:
    with rank.state.pop("a2a") as a2a:
        for i in range(6):
            cases.whole(rank, a2a, s.replace(seed=s.seed + i, tokens=tuple((n + 3 * i) % 9 for n in s.tokens)))
    epochs = rank.state.pop("epochs")
    assert (epochs[0] == exchanges + 6).all() and (epochs[1] == exchanges).all(), (
        "the epochs are not where we wrote them"
    )


def test_the_number_of_an_exchange_may_pass_32_bits(kernel_pool):
    if kernel_pool.kind.startswith("nvshmem"):
        pytest.skip("the kernels are the same over any memory; windows of threads are at hand")
    s = scenario(kernel_pool)
    for case in (as_after, past_32_bits):
        kernel_pool.run(case, s, 2**32 - 3, ranks=s.ep)


@dataclasses.dataclass(frozen=True)
class Alone(Scenario):
    """Every token goes to experts of rank 0, whichever group it is of."""

    def _draw(self, n: int, generator: torch.Generator) -> Group:
        g = super()._draw(n, generator)
        g.ids.remainder_(self.spec.local_experts).clamp_(min=0)
        return Group(g.x, g.ids, torch.randn(g.ids.shape, generator=generator), g.scales)


def first_exchange(rank: Rank, s: Scenario) -> None:
    """All of it on rank 0; rank 1 stops behind dispatch_recv."""
    rank.state["a2a"] = a2a = s.construct(rank, slots=1, timeout_s=1.5)
    rank.state["h"] = h = cases.send(rank, a2a, s)
    y = cases.receive(rank, a2a, s, h)
    if rank.index == 0:
        a2a.combine_send(h, y)
        cases.finish(rank, a2a, s, h)


def second_exchange(rank: Rank, s: Scenario) -> ExchangeTimeout:
    a2a = rank.state["a2a"]
    with pytest.raises(ExchangeTimeout) as info:
        cases.send(rank, a2a, s)
        a2a.check()
    return info.value


def close(rank: Rank) -> None:
    rank.state.pop("a2a").close()
    rank.state.clear()


def test_the_barrier_names_the_rank_that_has_not_read(kernel_pool):
    if kernel_pool.kind.startswith("gpu-virtual"):
        pytest.skip("virtual ranks on a GPU meet at every half, so none can be behind")
    ep = kernel_pool.up_to(2)
    s = Alone(dp=ep, tokens=(5, 0, 0, 0)[:ep], seed=SEED)
    kernel_pool.run(first_exchange, s, ranks=ep)
    error = kernel_pool.submit(0, second_exchange, s).result(30)
    assert error.half == "dispatch_send" and error.peer in range(1, ep), str(error)
    assert "it to have read exchange 1 of the slot" in str(error)
    kernel_pool.run(close, ranks=ep)
    kernel_pool.run(cases.check_exchange, s, ranks=ep)
