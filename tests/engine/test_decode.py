"""Steps of fixed shape: the same text as without, whatever is padding, and each rank its own size."""

from __future__ import annotations

import pytest
import torch

from moelab.config import ConfigError, MoelabError, ParallelConfig
from moelab.engine.decode import Output
from moelab.engine.engine import Engine
from moelab.engine.graphs import SIZES, DecodeGraphs, sizes_up_to, uncapturable
from moelab.engine.places import Places
from moelab.engine.sequence import Sampling
from moelab.engine.speculative import Drafter
from moelab.engine.timeline import Timeline
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from tests.conftest import SEED
from tests.engine.test_distributed import TINYSEEK
from tests.engine.test_distributed import prompts as tinyseek_prompts
from tests.engine.test_speculative import checkpoint_with_mtp, random_prompts, texts
from tests.helpers import load_alone

SCHEDULES = ("none", "dispatch", "microbatch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint_with_mtp(tmp_path_factory.mktemp("with_mtp"), SEED + 5)


@pytest.fixture(scope="module")
def model(folder):
    return load_alone(folder, max_tokens=64)


@pytest.fixture
def ran(monkeypatch):
    """(size, requests) of every step of fixed shape that was filled."""
    steps, fill = [], Places.fill
    monkeypatch.setattr(
        Places, "fill", lambda self, pieces: steps.append((self.size, len(pieces))) or fill(self, pieces)
    )
    return steps


@pytest.mark.parametrize("overlap", SCHEDULES)
@pytest.mark.parametrize("draft_tokens", [0, 1, 3])
def test_steps_of_fixed_shape_write_the_same_text(model, ran, overlap, draft_tokens):
    """Prompts longer than a step, requests that end one after another, inside drafts too, and sizes that are filled up,
    in float32 and thus with the same tokens."""
    prompts, lengths = random_prompts(150, 1, 40, 7, 3), [12, 1, 2, 9, 17]
    plain, _, _ = texts(model, prompts, lengths)
    fixed, engine, _ = texts(model, prompts, lengths, draft_tokens, overlap=overlap, batch_sizes=(1, 3, 6))
    assert fixed == plain
    assert {size for size, _ in ran} >= {0, 1, 3} and any(0 < count < size for size, count in ran)
    assert engine.acceptance == texts(model, prompts, lengths, draft_tokens)[1].acceptance


@pytest.mark.parametrize("draft_tokens", [1, 2])
def test_the_first_pass_that_follows_unseen_is_the_one_made_afterwards(monkeypatch, draft_tokens):
    """Text, drafts and what became of them, on a model whose drafts mostly stand; and that it does go unseen."""
    model, prompts = load_alone(TINYSEEK, max_tokens=64), [*tinyseek_prompts()[:3], [256, 100]]
    options = dict(draft_tokens=draft_tokens, batch_sizes=(2, 4))
    followed, follow = [], Drafter.follow
    monkeypatch.setattr(Drafter, "follow", lambda *a: followed.append(follow(*a)) or followed[-1])
    unseen, engine, _ = texts(model, prompts, [20] * 4, **options)
    assert sum(ahead is not None for ahead in followed) > 10
    monkeypatch.setattr(Drafter, "follow", lambda *a: None)
    seen, other, _ = texts(model, prompts, [20] * 4, **options)
    assert unseen == seen and engine.acceptance == other.acceptance
    assert engine.acceptance.accepted[0] > 0.7 * engine.acceptance.tried[0]


def test_sampled_text_is_the_same_too(model):
    prompt = random_prompts(20)[0]

    def write(**options):
        engine = Engine(model, cache_tokens=1024, draft_tokens=1, **options)
        requests = [engine.add(i, prompt, Sampling(9, temperature=0.8 * (i % 2), seed=SEED)) for i in range(4)]
        for _ in engine.run():
            pass
        return [request.output for request in requests]

    assert write(batch_sizes=(4,)) == write()


def poison(engine):
    """Whatever no request has confirmed becomes NaN: in pages of requests, in free ones, in every layer."""
    confirmed = torch.zeros(engine.cache.num_pages, 64, dtype=torch.bool)
    for sequence in engine.running:
        for position in range(sequence.num_cached):
            confirmed[sequence.pages[position // 64], position % 64] = True
    engine.cache.rows[:, ~confirmed] = float("nan")


@pytest.mark.parametrize("overlap", ["none", "microbatch"])
def test_padding_and_filled_up_rows_are_never_read(model, overlap):
    """Cache rows that no request has confirmed are NaN after every step, and what stood in the inputs of an earlier,
    larger step remains there: nothing of it shows."""
    prompts, lengths = random_prompts(20, 90, 5), [4, 12, 15]
    plain, _, _ = texts(model, prompts, lengths)
    options = dict(overlap=overlap, batch_sizes=(3,), after_step=poison)
    assert texts(model, prompts, lengths, draft_tokens=2, **options)[0] == plain


def test_filled_up_rows_are_routed_nowhere(model):
    """The loads of a step count real tokens only, drafts included and padding not."""
    engine = Engine(model, cache_tokens=1024, batch_sizes=(4,), draft_tokens=1)
    engine.timeline = seen = Loads()
    for i, prompt in enumerate(random_prompts(9, 3)):
        engine.add(i, prompt, Sampling(6))
    while not engine.all_idle:
        before = {s.id: (s.num_cached, len(s.drafts)) for s in engine.running}
        seen.rows.clear()
        engine.step()
        if before:  # after the prompts
            fed = sum(1 + drafts for _, drafts in before.values())
            assert seen.rows[:3] == [fed * model.config.num_experts_per_tok] * 3
    assert fed


class Loads(Timeline):
    """How many rows each exchange has brought."""

    def __init__(self):
        super().__init__()
        self.rows: list[int] = []

    def __call__(self, launch, state):
        super().__call__(launch, state)
        if launch.stage.name == "dispatch_recv":
            self.rows.append(int(state.counts.sum()))


def text_of_rank(rank, folder: str, dp: int, tp: int, options: dict, prompts, temperature: float = 0.0):
    parallel = ParallelConfig(dp, tp)
    model = DeepSeek.load(folder, parallel, 16, rank=rank.index, group=rank.groups[parallel.ep])
    engine = Engine(model, cache_tokens=1024, **options)
    mine = prompts[parallel.dp_group(rank.index)]
    sampling = [Sampling(3 + 4 * i, temperature, SEED) for i in range(len(mine))]
    requests = [engine.add(i, prompt, how) for i, (prompt, how) in enumerate(zip(mine, sampling, strict=True))]
    steps = 0
    while not engine.all_idle:
        engine.step()
        steps += 1
    model.close()
    return [request.output for request in requests], steps


@pytest.mark.parametrize(
    ("kind", "dp", "tp", "options"),
    [
        ("gloo", 4, 1, dict(overlap="microbatch", draft_tokens=2)),
        ("gloo", 2, 2, dict(overlap="dispatch")),
        ("emulated", 4, 1, dict(overlap="microbatch", draft_tokens=1)),
    ],
)
def test_every_group_has_its_own_size_and_all_stop_together(pools, model, folder, kind, dp, tp, options):
    """Groups of 0, 1, 3 and 2 requests at once, prompts beside decode: sizes and ways to run differ between ranks, the
    exchanges do not. Over processes, and over the kernels' source, which tells on the device that all are idle."""
    prompts = [random_prompts(*lengths) for lengths in ((), (40,), (3, 17, 1), (5, 9))][-dp:]
    options = dict(options, batch_sizes=(1, 2, 4))
    results = pools(kind).run(text_of_rank, str(folder), dp, tp, options, prompts, ranks=dp * tp)
    assert len({steps for _, steps in results}) == 1
    for rank, (found, _) in enumerate(results):
        mine = prompts[rank // tp]
        plain, _, _ = texts(model, mine, [3 + 4 * i for i in range(len(mine))])
        assert found == plain, rank


@pytest.mark.parametrize("draft_tokens", [0, 1])
def test_an_idle_group_beside_sampled_requests_stops_with_them(pools, folder, draft_tokens):
    """Their first pass of drafts comes after the verdict and may be empty; an idle group's came before. What it says of
    who has work must not take the place of what the step itself said."""
    options = dict(draft_tokens=draft_tokens, batch_sizes=(1, 2))
    prompts = [[], random_prompts(5)]
    results = pools("emulated").run(text_of_rank, str(folder), 2, 1, options, prompts, 0.9, ranks=2)
    assert results[0][1] == results[1][1] and [len(text) for text in results[1][0]] == [3]


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_block_fp8_in_steps_of_fixed_shape(cache_dtype):
    """The arithmetic of serving on tinyseek: as the eager engine in the same arithmetic, with its cache in bfloat16 and
    in FP8, nearly as float32."""
    model, prompts = load_alone(TINYSEEK, max_tokens=64, arithmetic=BlockFp8()), tinyseek_prompts()[:3]
    options = dict(cache_dtype=cache_dtype, draft_tokens=1)
    eager, _, _ = texts(model, prompts, [16] * 3, **options)
    fixed, engine, _ = texts(model, prompts, [16] * 3, batch_sizes=(2, 4), **options)
    assert fixed == eager
    assert engine.acceptance.accepted[0] > 0.7 * engine.acceptance.tried[0]
    exact, _, _ = texts(load_alone(TINYSEEK, max_tokens=64), prompts, [16] * 3)
    same = [a == b for ours, theirs in zip(fixed, exact, strict=True) for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) > 0.6 * len(same)  # texts part for good at their first difference


def test_sizes():
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(5) == (1, 2, 4, 5)
    assert sizes_up_to(256) == SIZES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(batch_sizes=(8, 64), draft_tokens=1),
            "batch of 64 requests with 2 tokens each exceeds .* max_tokens, 64",
        ),
        (dict(batch_sizes=(1,), draft_tokens=4), "5 tokens of a request in a step: attention takes at most 4"),
        (dict(batch_sizes=(-1, 4)), r"batch sizes are \[-1, 4\]: give positive numbers"),
    ],
)
def test_what_cannot_be_is_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        Engine(model, **options)


def test_a_request_longer_than_the_page_tables_is_refused(model):
    engine = Engine(model, cache_tokens=1024, batch_sizes=(1,), max_kv_len=100)
    with pytest.raises(MoelabError, match="a request of 109 tokens exceeds max_kv_len, 100: shorten it"):
        engine.add(0, [5] * 80, Sampling(30))
    request = engine.add(0, [5] * 80, Sampling(21))
    for _ in engine.run():
        pass
    assert request.num_output == 21


def test_what_cannot_be_captured_says_why_and_what_to_do(model):
    assert "a step in float32 asks the host for counts" in uncapturable(model)
    served = load_alone(TINYSEEK, max_tokens=64, arithmetic=BlockFp8())
    assert "over the virtual exchange asks the host" in uncapturable(served)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", SCHEDULES)
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_a_graph_is_its_eager_step_bit_for_bit(monkeypatch, overlap, cache_dtype):
    """The same requests through captured steps and through the same steps run eagerly: text and hidden states."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    from moelab.comm import VirtualRanks
    from moelab.comm.library import load

    group = VirtualRanks(1, load()).rank(0)
    model = load_alone(TINYSEEK, max_tokens=64, arithmetic=BlockFp8(), device="cuda", group=group)
    seen, opinions = [], Output.opinions

    def keep(output, model, rows):
        index = [row for _, mine in rows for row in mine]
        seen.append(output.hidden[index].cpu())
        return opinions(output, model, rows)

    monkeypatch.setattr(Output, "opinions", keep)
    options = dict(overlap=overlap, draft_tokens=1, batch_sizes=(1, 2, 4), cache_dtype=cache_dtype)
    found = {}
    for capture in (False, True):
        written, engine, _ = texts(model, tinyseek_prompts()[:4], [9, 16, 5, 12], capture=capture, **options)
        found[capture], seen = (written, seen[:]), seen.clear() or seen
    assert found[True][0] == found[False][0]
    for replayed, eager in zip(found[True][1], found[False][1], strict=True):
        assert torch.equal(replayed, eager)
    assert engine.acceptance.accepted[0] > 0.7 * engine.acceptance.tried[0]
    model.close()


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True])
def test_nothing_within_a_step_waits_for_the_device(monkeypatch, capture):
    """From laying out to the MTP pass, torch raises for whatever would wait; what the step came to is read after."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    from moelab.comm import VirtualRanks
    from moelab.comm.library import load

    def strict(method):
        def run(*args, **options):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    group = VirtualRanks(1, load()).rank(0)
    model = load_alone(TINYSEEK, max_tokens=64, arithmetic=BlockFp8(), device="cuda", group=group)
    engine = Engine(model, cache_tokens=2048, draft_tokens=1, batch_sizes=(1, 4), capture=capture)
    for i, prompt in enumerate(tinyseek_prompts()[:3]):
        engine.add(i, prompt, Sampling(20))
    while not all(sequence.num_output for sequence in engine.running) or engine.waiting:
        engine.step()
    monkeypatch.setattr(DecodeGraphs, "run", strict(DecodeGraphs.run))
    followed, follow = [], strict(Drafter.follow)
    monkeypatch.setattr(Drafter, "follow", lambda *a: followed.append(follow(*a)) or followed[-1])
    for _ in range(4):
        engine.step()
    assert len(followed) == 4 and all(followed)
    with pytest.raises(RuntimeError):
        strict(torch.Tensor.item)(torch.ones(1, device="cuda"))
    model.close()
