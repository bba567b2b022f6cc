"""One rank of a deployment, alone: it runs, all is finite, and what stood in for the others says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moelab.config import ConfigError, ParallelConfig, preset
from moelab.engine import shadow
from moelab.engine.executor import run_layers
from moelab.engine.shadow import first_layers, shadow_rank, stood_in
from moelab.hardware import gpu
from moelab.model.arithmetic import Plain
from moelab.perf import tables
from moelab.perf.fabric import Exchange
from moelab.perf.rank_load import ROUTINGS
from tests.conftest import SEED
from tests.helpers import Session, load_alone, one_state

TINY, V3 = preset("tinyseek"), preset("deepseek-v3")


FOUR = ParallelConfig(4)


def small(parallel=FOUR, max_tokens=16, layers=3, **options):
    config = options.pop("config", TINY)
    return shadow_rank(config, parallel, max_tokens=max_tokens, layers=layers, seed=SEED, **options)


@torch.no_grad()
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("overlap", ["none", "microbatch"])
def test_a_step_runs_and_is_finite(routing, overlap):
    model = small(routing=routing, rank=2, num_sms=4)
    state = one_state(model, torch.randint(384, (11,)).tolist())
    found = []

    def observe(launch, s):
        if launch.stage.name == "dispatch_recv":
            found.append(s.counts.tolist())

    run_layers(model, state, overlap, observe)
    hidden = model.finish(state)
    assert hidden.isfinite().all() and hidden.float().std() == pytest.approx(1, rel=0.3)
    load = model.all_to_all.group.load
    tokens = [11] if overlap == "none" else [11, 0]  # one request: the other half is empty
    expected = [load.counts[i % len(load.counts), tokens[i % len(tokens)]].tolist() for i in range(2 * len(tokens))]
    assert sorted(found) == sorted(expected), "counts of two MoE layers, a draw for each exchange"
    model.close()


@torch.no_grad()
@pytest.mark.parametrize(("parallel", "arithmetic"), [(ParallelConfig(2, 2), None), (ParallelConfig(2, 2), Plain())])
def test_tp_is_stood_in_for(parallel, arithmetic):
    model = small(parallel, rank=3, arithmetic=arithmetic, fabric="ib400")
    hidden = Session(model, length=64).feed(torch.randint(384, (5,)).tolist(), absorbed=True)
    assert hidden.isfinite().all()
    found = {thing.what: thing for thing in stood_in(model)}
    assert list(found) == ["weights", "arrivals", "dispatch", "combine", "tp_reduce"]
    reduce = found["tp_reduce"]
    width = TINY.hidden_size * (2 if arithmetic is None else 4)
    assert reduce.calls == 3 and reduce.sent_bytes == 5 * width // 2 and "nvlink" in reduce.by
    assert model.layers[0].attention.num_heads == 2


@torch.no_grad()
def test_what_stood_in_is_named_with_its_numbers():
    model = small(fabric="efa", parallel=ParallelConfig(16), layers=2)
    tokens = torch.randint(384, (9,)).tolist()
    Session(model, length=64).feed(tokens, absorbed=True)
    found = {thing.what: thing for thing in stood_in(model)}
    assert "tp_reduce" not in found and "equal" in found["arrivals"].by and "random" in found["weights"].by
    law = shadow.law(TINY, ParallelConfig(16), "efa", "deepep", gpu("H200"))
    load, spec = model.all_to_all.group.load, model.all_to_all.spec
    for what, us in (("dispatch", law.dispatch(9)), ("combine", law.combine(9))):
        thing = found[what]
        assert thing.calls == 1 and thing.num_sms >= 1 and thing.by.startswith("efa: ")
        assert all(
            asked == pytest.approx(us, abs=1e-3) and (held >= asked).all() for asked, held in thing.held_us.items()
        )
        assert thing.exposed_us >= 0
    assert found["dispatch"].received_bytes == load.counts[0, 9].sum() * (256 + 4 * 2)
    assert 9 * (spec.wire_row_bytes + 8 * 4) <= found["dispatch"].sent_bytes <= 4 * 9 * (spec.wire_row_bytes + 8 * 4)
    assert found["combine"].sent_bytes == load.arrivals[0, 9] * 512
    shadow.clear(model)
    assert [thing.calls for thing in stood_in(model)] == [0] * 4


def test_the_law_is_that_of_the_performance_model():
    parallel = ParallelConfig(32, 4)
    exchange = Exchange(gpu("H200"), V3, parallel, "deepep", "ib400", tables.load())
    law = shadow.law(V3, parallel, "ib400", "deepep", gpu("H200"))
    assert law.dispatch(256) == exchange.time("dispatch", 64).us > 25  # four ranks share the sending
    assert law.combine(256) == exchange.time("combine", 256).us > law.dispatch(256)
    assert law.reduce(256) == exchange.reduce(256, 4).us > 0
    assert law.source.startswith("ib400: ")
    none = shadow.law(V3, parallel, "none", "deepep", gpu("H200"))
    assert none.dispatch(256) == none.combine(256) == none.reduce(256) == 0


@pytest.mark.parametrize("fabric", ["nvlink", "ib400"])
def test_inside_a_node_it_is_nvlink(fabric):
    law = shadow.law(V3, ParallelConfig(8), fabric, "deepep", gpu("H200"))
    assert law.source.startswith("nvlink: ")


def test_first_layers():
    assert first_layers(V3, None) is V3
    for layers, dense in ((61, 3), (40, 3), (4, 3), (3, 0), (1, 0)):
        cut = first_layers(V3, layers)
        assert (cut.num_hidden_layers, cut.first_k_dense_replace) == (layers, dense) and cut.num_moe_layers > 0
    for layers in (0, 62):
        with pytest.raises(ConfigError, match=f"layers is {layers}: legal are 1…61"):
            first_layers(V3, layers)


def test_shares_of_tinyseek():
    own, many = shadow.tinyseek_shares(16), shadow.tinyseek_shares(256, SEED)
    assert own.shape == (4, 16) and many.shape == (4, 256)
    for shares in (own, many):
        assert shares.mean(1) == pytest.approx(np.ones(4)) and (shares > 0).all()
    # Measured while it was trained, over other text: most over mean is 1.18 … 1.27.
    assert 1.05 < own.max(1).min() and own.max() < 2
    assert many.std(1) == pytest.approx(own.std(1))
    assert (np.sort(many[0]) != many[0]).any()


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("fabric is 'roce'", {"fabric": "roce"}), ("alltoall", {"library": "nobody", "fabric": "ib400"}),
        ("fabric nvlink joins 8", {"fabric": "nvlink", "parallel": ParallelConfig(16)}),
        ("routing is 'even'", {"routing": "even"}), ("rank is 4", {"rank": 4}), ("layers is 9", {"layers": 9}),
        ("kv_lora_rank", {"config": TINY.replace(kv_lora_rank=256)}),
        ("ep = dp·tp is 3", {"parallel": ParallelConfig(3)}),
    ],
)  # fmt: skip
def test_errors_name_the_argument(named, options):
    with pytest.raises(ConfigError, match=named):
        small(**options)


def test_a_real_rank_has_nothing_that_stood_in(tiny_checkpoint):
    with pytest.raises(ConfigError, match="no shadow rank"):
        stood_in(load_alone(tiny_checkpoint))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("parallel", "fabric"), [(ParallelConfig(8), "nvlink"), (ParallelConfig(32, 4), "ib400")])
def test_four_layers_of_deepseek_v3(parallel, fabric):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; none here")
    model = shadow_rank(V3, parallel, max_tokens=64, layers=4, routing="uniform", fabric=fabric, device="cuda")
    for overlap in ("none", "dispatch", "microbatch"):
        state = one_state(model, torch.randint(1000, (48,)).tolist())
        run_layers(model, state, overlap)
        hidden = model.finish(state)
        assert hidden.isfinite().all() and 0.5 < hidden.float().std().item() < 1.5
    found = {thing.what: thing for thing in stood_in(model)}
    assert found["dispatch"].calls == 4
    for thing in found.values():
        for asked, held in thing.held_us.items():
            # Short waits are as exact as the clock, which ticks every µs on some GPUs.
            assert (held >= asked).all() and held.max() <= max(1.03 * asked, asked + 1.1)
    model.close()
