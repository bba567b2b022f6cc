"""Drafts change how fast text comes, never which: greedy text token for token, sampled text in distribution."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moelab.config import ConfigError, MoelabError, ParallelConfig
from moelab.engine import speculative
from moelab.engine.batch import build, choose
from moelab.engine.engine import Engine
from moelab.engine.sampler import DRAFT, Opinion, draw, generator
from moelab.engine.sequence import Sampling, Sequence
from moelab.engine.speculative import Acceptance, Drafter, verify
from moelab.engine.timeline import Timeline
from moelab.model.deepseek import DeepSeek
from tests.conftest import SEED, make_oracle
from tests.engine.test_distributed import TINYSEEK
from tests.engine.test_distributed import prompts as tinyseek_prompts
from tests.engine.test_overlap import RECV, SEND
from tests.helpers import Session, load_alone
from tests.model.test_mtp import add_mtp, mtp_oracle


def checkpoint_with_mtp(folder, seed: int, **changes):
    main = make_oracle(seed, **changes)
    main.save_pretrained(folder)
    add_mtp(folder, mtp_oracle(main), layer=4)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint_with_mtp(tmp_path_factory.mktemp("with_mtp"), SEED + 3)


@pytest.fixture(scope="module")
def model(folder):
    return load_alone(folder, max_tokens=64)


def texts(model, prompts, lengths, draft_tokens=0, after_step=lambda engine: None, **options):
    """(output of each request, the engine afterwards, steps)."""
    engine = Engine(model, cache_tokens=2048, draft_tokens=draft_tokens, **options)
    requests = [
        engine.add(i, prompt, Sampling(count)) for i, (prompt, count) in enumerate(zip(prompts, lengths, strict=True))
    ]
    steps = 0
    while not engine.all_idle:
        engine.step()
        after_step(engine)
        steps += 1
    assert engine.cache.num_free == engine.cache.num_pages
    return [request.output for request in requests], engine, steps


def random_prompts(*lengths):
    return [torch.randint(2, 320, (n,)).tolist() for n in lengths]


@pytest.fixture
def guesses(monkeypatch):
    """Makes drafts right seven times of ten: guesses(plain) knows the plain texts."""

    def arrange(plain):
        def propose(sequence, opinion):
            place = sequence.num_output + len(sequence.drafts)
            right = plain[sequence.id][place] if place < len(plain[sequence.id]) else 5
            wrong = torch.rand(()) < 0.3
            sequence.drafts.append((right + 1) % 320 if wrong else right)
            sequence.draft_probabilities.append(None)

        monkeypatch.setattr(Drafter, "_propose", staticmethod(propose))

    return arrange


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 6])
@pytest.mark.parametrize("overlap", ["none", "microbatch"])
def test_greedy_text_is_the_plain_one_whatever_is_drafted(model, guesses, draft_tokens, overlap):
    """Prompts longer than a step beside short ones, requests that end inside drafts, and drafts of every quality."""
    prompts, lengths = random_prompts(150, 1, 40, 7, 3), [12, 1, 2, 9, 17]
    plain, _, _ = texts(model, prompts, lengths)
    drafted, engine, _ = texts(model, prompts, lengths, draft_tokens, overlap=overlap)
    assert drafted == plain
    assert engine.acceptance.tried[0] > 0
    guesses(plain)
    drafted, engine, _ = texts(model, prompts, lengths, draft_tokens, overlap=overlap)
    assert drafted == plain
    tried, accepted = engine.acceptance.tried, engine.acceptance.accepted
    assert tried[0] > accepted[0] > 0 and accepted[:-1] >= tried[1:]


@pytest.mark.parametrize("draft_tokens", [1, 2, 4])
def test_tinyseek_writes_the_same_in_fewer_steps(draft_tokens):
    model = load_alone(TINYSEEK, max_tokens=128)
    prompts = tinyseek_prompts()
    plain, _, steps = texts(model, prompts, [24] * len(prompts))
    drafted, engine, fewer = texts(model, prompts, [24] * len(prompts), draft_tokens)
    assert drafted == plain and fewer < 0.8 * steps
    assert engine.acceptance.accepted[0] > 0.8 * engine.acceptance.tried[0]
    # The chain falls at its first error.
    assert engine.acceptance.tried == sorted(engine.acceptance.tried, reverse=True)


@pytest.mark.parametrize("length", range(1, 8))
def test_a_request_ends_where_it_should_inside_its_drafts(model, guesses, length):
    (prompt,) = random_prompts(9)
    plain, _, _ = texts(model, [prompt], [8])
    guesses(plain)
    drafted, _, _ = texts(model, [prompt], [length], draft_tokens=4)
    assert drafted[0] == plain[0][:length]


@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_the_end_of_sequence_inside_drafts_ends_the_text(model, guesses, at):
    (prompt,) = random_prompts(9)
    plain, _, _ = texts(model, [prompt], [8])
    guesses(plain)
    ends = dataclasses.replace(model, config=model.config.replace(eos_token_id=plain[0][at]))
    drafted, _, _ = texts(ends, [prompt], [8], draft_tokens=4)
    assert drafted[0] == plain[0][: plain[0].index(plain[0][at]) + 1]


@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_rows_of_fallen_drafts_are_never_read(model, guesses, draft_tokens):
    """After each step, all that lies beyond a sequence's confirmed rows becomes NaN, in every layer's cache."""

    def poison(engine):
        for sequence in engine.running:
            pages = engine.cache.rows[:, torch.tensor(sequence.pages)].flatten(1, 2)
            assert pages[:, : sequence.num_cached].isfinite().all()  # the MTP layer's too: it keeps up
            pages[:, sequence.num_cached :] = float("nan")
            shape = (-1, len(sequence.pages), *engine.cache.rows.shape[2:])
            engine.cache.rows[:, torch.tensor(sequence.pages)] = pages.view(shape)

    prompts, lengths = random_prompts(20, 90, 5), [9, 12, 15]
    plain, _, _ = texts(model, prompts, lengths)
    clean, engine, _ = texts(model, prompts, lengths, draft_tokens)
    poisoned, again, _ = texts(model, prompts, lengths, draft_tokens, after_step=poison)
    assert clean == poisoned == plain
    assert again.acceptance == engine.acceptance  # the drafts are the same as well
    guesses(plain)
    assert texts(model, prompts, lengths, draft_tokens, after_step=poison)[0] == plain


def test_drafts_are_those_of_the_mtp_layer_run_alone(model, monkeypatch):
    """Of a text in one piece: the first draft from the model's hidden states, each further one from the layer's own
    output after its norm."""
    monkeypatch.setattr("moelab.engine.engine.verify", lambda opinion, s, n: opinion.best[:1])  # none stands
    (prompt,) = random_prompts(30)
    engine = Engine(model, draft_tokens=3)
    sequence = engine.add(0, prompt, Sampling(20))
    for _ in range(4):
        engine.step()
        session = Session(model)
        hidden = session.feed(sequence.tokens[:-1], absorbed=False)
        u = session.draft(hidden, sequence.tokens[1:], absorbed=False)[-1:]
        expected = [int(model.logits(u).argmax())]
        for _ in range(2):
            u = session.draft(u, expected[-1:], absorbed=True)
            expected.append(int(model.logits(u).argmax()))
        assert sequence.drafts == expected


def test_a_full_step_cuts_drafts():
    decoding = [Sequence(i, [1] * 10, Sampling(9), num_cached=9, drafts=[7, 8, 9]) for i in range(3)]
    chosen = choose(decoding, max_tokens=10)
    assert [count for _, count in chosen] == [4, 4, 2]
    for i, sequence in enumerate(decoding):
        sequence.pages = [i]
    batch = build(chosen, "cpu")
    assert batch.tokens.tolist() == [1, 7, 8, 9, 1, 7, 8, 9, 1, 7] and batch.absorbed
    assert batch.positions[-2:].tolist() == [9, 10]


def test_more_drafting_requests_than_a_step_holds_write_the_plain_text(folder):
    """max_tokens 8 and eleven requests that would bring 44 tokens."""
    model, prompts = load_alone(folder, max_tokens=8), random_prompts(*range(1, 12))
    plain, _, _ = texts(model, prompts, [6] * 11)
    assert texts(model, prompts, [6] * 11, draft_tokens=3)[0] == plain


@pytest.mark.parametrize(
    ("draft_tokens", "message"),
    [(-1, "draft_tokens is -1: give 0 or more"), (8, "brings 9 tokens to a step of at most 8; give 7 or fewer")],
)
def test_impossible_drafts_are_refused(folder, draft_tokens, message):
    with pytest.raises(MoelabError, match=message):
        Engine(load_alone(folder, max_tokens=8), draft_tokens=draft_tokens)


def test_drafts_without_mtp_layer_are_refused(tiny_checkpoint):
    with pytest.raises(ConfigError, match="draft_tokens is 2 and the model has no MTP layer to draft with: give 0"):
        Engine(load_alone(tiny_checkpoint), draft_tokens=2)


def text_of_rank(rank, folder: str, dp: int, tp: int, overlap: str, draft_tokens: int, prompts):
    parallel = ParallelConfig(dp, tp)
    model = DeepSeek.load(folder, parallel, 32, rank=rank.index, group=rank.groups[parallel.ep])
    engine = Engine(model, cache_tokens=1024, overlap=overlap, draft_tokens=draft_tokens)
    engine.timeline = Timeline()
    mine = prompts[parallel.dp_group(rank.index)]
    requests = [engine.add(i, prompt, Sampling(3 + 4 * i)) for i, prompt in enumerate(mine)]
    halves = []
    while not engine.all_idle:
        engine.step()
        halves.append([(s.micro_batch, s.layer, s.stage) for s in engine.timeline.spans() if s.stage in SEND + RECV])
    model.close()
    return [request.output for request in requests], halves


@pytest.mark.parametrize(("dp", "tp", "overlap"), [(4, 1, "microbatch"), (4, 1, "none"), (2, 2, "dispatch")])
def test_ranks_with_0_1_and_more_requests_draft_together(gloo_pool, model, folder, dp, tp, overlap):
    """Requests of one rank end while others go on, and one rank never has any: nobody leaves out a pass, nobody keeps
    the others from drafting."""
    prompts = [random_prompts(*lengths) for lengths in ((), (40,), (3, 17, 1), (5, 9))][-dp:]
    results = gloo_pool.run(text_of_rank, str(folder), dp, tp, overlap, 2, prompts, ranks=dp * tp)
    for rank, (found, halves) in enumerate(results):
        mine = prompts[rank // tp]
        plain, _, _ = texts(model, mine, [3 + 4 * i for i in range(len(mine))])
        assert found == plain, rank
        assert halves == results[0][1]
        layers = {layer for _, layer, _ in halves[0]}
        assert layers == {0, 1, 2, 3}  # 3 is the MTP layer
        passes = sum(layer == 3 for _, layer, stage in halves[0] if stage == "dispatch_send")
        assert passes == 2 * (2 if overlap == "microbatch" else 1)


VOCAB = 5


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected).square() / expected).sum())


def pairs_of_tokens(p_first, p_next, q_first, q_next, draws: int) -> torch.Tensor:
    """Counts [VOCAB, VOCAB] of the first two tokens, from steps with two drafts of distribution q."""
    counts = torch.zeros(VOCAB, VOCAB)
    for i in range(draws):
        sequence = Sequence(i, [0], Sampling(9, temperature=1.0, seed=SEED))
        for q in (q_first, q_next):
            q = q if q.dim() == 1 else q[sequence.drafts[-1]]
            sequence.draft_probabilities.append(q)
            sequence.drafts.append(draw(q, generator(sequence, len(sequence.drafts), DRAFT)))
        rows = torch.stack([p_first, *(p_next[draft] for draft in sequence.drafts)])
        new = verify(Opinion([], rows.log()), sequence, 2)
        if len(new) == 1:  # the next step, without drafts
            sequence.tokens += new
            new = new + verify(Opinion([], p_next[new[-1:]].log()), sequence, 0)
        counts[new[0], new[1]] += 1
    return counts


def naive(opinion, row, draft, sequence):
    """Judges as it should, but replaces from p: a draft of high q then comes too often."""
    p, source, q = opinion.logits[row].softmax(-1), generator(sequence, row, 2), sequence.draft_probabilities[row]
    return draft if torch.rand((), generator=source) * q[draft] < p[draft] else draw(p, source)


def without_q(opinion, row, draft, sequence):
    """Takes the draft for a proposal without a distribution, as if all of q were on it."""
    p, source = opinion.logits[row].softmax(-1), generator(sequence, row, 2)
    rest = p.clone()
    rest[draft] = 0
    return draft if torch.rand((), generator=source) < p[draft] else draw(rest, source)


@pytest.mark.parametrize("drafts", ["sampled", "greedy"])
def test_sampled_text_keeps_the_models_distribution(monkeypatch, drafts):
    """χ² over pairs of tokens, 24 degrees of freedom: 67 has p ≈ 6e-6. The naive replacement is far beyond."""
    p_first, p_next = torch.randn(VOCAB).softmax(-1), (1.5 * torch.randn(VOCAB, VOCAB)).softmax(-1)
    q_first, q_next = torch.randn(VOCAB).softmax(-1), (1.5 * torch.randn(VOCAB, VOCAB)).softmax(-1)
    if drafts == "greedy":
        q_first, q_next = (torch.nn.functional.one_hot(q.argmax(-1), VOCAB).float() for q in (q_first, q_next))
    draws = 8000
    expected = p_first[:, None] * p_next * draws
    assert chi_square(pairs_of_tokens(p_first, p_next, q_first, q_next, draws), expected) < 67
    monkeypatch.setattr(speculative, "_judge", naive)
    assert chi_square(pairs_of_tokens(p_first, p_next, q_first, q_next, draws), expected) > 150


def test_drafts_that_are_like_the_model_stand(monkeypatch):
    """With q = p every draft stands, at any temperature; a verdict that does not know q throws most of them away."""

    def accepted() -> float:
        p, fate = torch.randn(40).softmax(-1), Acceptance.none(1)
        for i in range(600):
            sequence = Sequence(i, [0], Sampling(9, temperature=1.0), draft_probabilities=[p])
            sequence.drafts.append(draw(p, generator(sequence, 0, DRAFT)))
            fate.count(sequence.drafts, verify(Opinion([], p.log().expand(2, -1)), sequence, 1))
        return fate.accepted[0] / fate.tried[0]

    assert accepted() > 0.999
    monkeypatch.setattr(speculative, "_judge", without_q)
    assert accepted() < 0.3


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_the_engines_samples_have_the_models_distribution(tmp_path, draft_tokens):
    """Many requests of one prompt on a model of twelve words: counts of the third token, beside the exact sum over
    what may come before."""
    model = load_alone(checkpoint_with_mtp(tmp_path, SEED + 4, vocab_size=12), max_tokens=1024)
    prompt, count = [3, 7, 5], 600
    after = torch.cartesian_prod(torch.arange(12), torch.arange(12))

    def next_token(rows) -> torch.Tensor:  # [n, 12], after each of n equally long texts
        session = Session(model, num_sequences=len(rows), length=64)
        hidden = session.feed(*rows, absorbed=True)
        return model.logits(hidden[len(rows[0]) - 1 :: len(rows[0])]).softmax(-1)

    with torch.no_grad():
        first = next_token([prompt])[0]
        second = next_token([[*prompt, a] for a in range(12)])
        third = next_token([[*prompt, *pair] for pair in after.tolist()])
    ended = model.config.eos_token_id
    second[ended], third[after[:, 1] == ended] = 0, 0  # a text that has ended goes on with nothing
    expected = (first[:, None] * second).flatten() @ third
    engine = Engine(model, cache_tokens=64 * count, draft_tokens=draft_tokens)
    requests = [engine.add(i, prompt, Sampling(6, temperature=1.0, seed=SEED)) for i in range(count)]
    for _ in engine.run():
        pass
    found = torch.bincount(torch.tensor([r.output[2] for r in requests if len(r.output) > 2]), minlength=12)
    assert chi_square(found, expected * count) < 42  # 11 degrees of freedom and the ended ones: p ≈ 3e-5
    if draft_tokens:
        assert engine.acceptance.accepted[0] > 0.1 * engine.acceptance.tried[0]
