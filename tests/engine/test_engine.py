"""The engine of one rank: batching, pages, limits, and steps that every rank makes alike."""

from __future__ import annotations

import threading

import pytest
import torch

from moelab.comm import VirtualRanks
from moelab.config import ConfigError, MoelabError, ParallelConfig
from moelab.engine.batch import build, choose
from moelab.engine.engine import Engine
from moelab.engine.kv_cache import PagedCache
from moelab.engine.sampler import Opinion, sample
from moelab.engine.sequence import Sampling, Sequence
from moelab.model.arithmetic import Plain
from moelab.model.deepseek import DeepSeek
from tests.helpers import load_alone


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_alone(tiny_checkpoint, max_tokens=64)


def oracle_greedy(oracle, prompt, count):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == 1:
                break
    return tokens[len(prompt) :]


def outputs(engine):
    return {token.sequence.id: token.sequence.output for token in engine.run()}


def test_greedy_text_equals_transformers_for_prompts_longer_and_shorter_than_a_step(model, oracle):
    engine = Engine(model, cache_tokens=1024)
    prompts = [torch.randint(2, 320, (n,)).tolist() for n in (150, 1, 40)]
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, Sampling(12))
    assert outputs(engine) == {i: oracle_greedy(oracle, prompt, 12) for i, prompt in enumerate(prompts)}
    assert engine.cache.num_free == engine.cache.num_pages


def test_requests_wait_for_pages_and_all_of_them_finish(model, oracle):
    engine = Engine(model, cache_tokens=192)  # three pages, one request each
    prompts = [torch.randint(2, 320, (20 + i,)).tolist() for i in range(7)]
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, Sampling(5))
    engine.step()
    assert len(engine.running) == 3 and len(engine.waiting) == 4
    rest = outputs(engine)
    assert rest == {i: oracle_greedy(oracle, prompt, 5) for i, prompt in enumerate(prompts)}


def test_the_end_of_sequence_id_ends_a_request(model):
    engine = Engine(model)
    sequence = engine.add(0, [5, 6, 7], Sampling(10))
    sequence.pages = engine.cache.take(12)
    tokens = engine._extend(sequence, [9, 1, 8])
    assert [(token.id, token.last) for token in tokens] == [(9, False), (1, True)]
    assert sequence.finished and sequence.output == [9, 1] and engine.cache.num_free == engine.cache.num_pages


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "prompt is empty"),
        ([1], 0, "max_tokens is 0"),
        ([5] * 1000, 25, "exceed the model's 1024 positions"),
        ([320], 1, "outside the vocabulary of 320"),
        ([-1], 1, "outside the vocabulary of 320"),
        ([5] * 200, 1, "needs 4 cache pages of 64, there are 3"),
    ],
)
def test_requests_that_can_never_run_are_refused(model, prompt, max_tokens, message):
    engine = Engine(model, cache_tokens=192)
    with pytest.raises(MoelabError, match=message):
        engine.add(0, prompt, Sampling(max_tokens))
    assert not engine.waiting


def test_a_step_takes_decoding_sequences_first_and_cuts_the_prompt_that_does_not_fit():
    decoding = [Sequence(i, [1] * 10, Sampling(5)) for i in range(3)]
    for sequence in decoding:
        sequence.num_cached = 9
    prompt = Sequence(3, [1] * 100, Sampling(5))
    chosen = choose([*decoding, prompt, Sequence(4, [1] * 5, Sampling(5))], max_tokens=32)
    assert [count for _, count in chosen] == [1, 1, 1, 29]
    for i, (sequence, _) in enumerate(chosen):
        sequence.pages = [7 - i, 20 + i]
    batch = build(chosen, "cpu")
    assert not batch.absorbed and batch.num_tokens == 32
    assert batch.slots[:3].tolist() == [7 * 64 + 9, 6 * 64 + 9, 5 * 64 + 9]
    assert build(chosen[:3], "cpu").absorbed
    empty = build([], "cpu")
    assert empty.num_tokens == 0 and not empty.has_work and empty.tokens.dtype == torch.int64


def test_draws_depend_on_seed_request_and_place_alone():
    logits = torch.randn(320)

    def draw(seed, id, length):
        return sample(Opinion([], logits[None]), 0, Sequence(id, [1] * length, Sampling(5, temperature=1.0, seed=seed)))

    assert draw(1, 2, 3) == draw(1, 2, 3)
    for other in (
        [draw(s, 2, 3) for s in range(40)],
        [draw(1, i, 3) for i in range(40)],
        [draw(1, 2, n) for n in range(40)],
    ):
        assert len(set(other)) > 10
    counts = torch.bincount(torch.tensor([draw(s, 0, 0) % 4 for s in range(2000)]), minlength=4)
    expected = logits.softmax(-1).view(-1, 4).sum(0) * 2000
    assert ((counts - expected).square() / expected).sum() < 25  # chi², 3 degrees of freedom, p ≈ 1e-5


def test_pages_are_never_handed_out_twice():
    cache = PagedCache(1, 5, 4, torch.float32)
    first, second = cache.take(65), cache.take(128)
    assert len({*first, *second}) == 4 and cache.take(65) is None and cache.num_free == 1
    cache.give_back(first)
    assert len({*cache.take(130), *second}) == 5
    assert cache.rows.isnan().all()


def test_ranks_with_unequal_and_no_requests_step_together_and_stop_after_the_same_step(tiny_checkpoint, oracle):
    """DP groups of 0, 1, 4 and 0 requests: equal steps, equal exchanges, no word about batch sizes."""
    world, parallel = VirtualRanks(4), ParallelConfig(4, 1)
    prompts = [[torch.randint(2, 320, (9 + 5 * i,)).tolist() for i in range(n)] for n in (0, 1, 4, 0)]
    steps, texts, failures = {}, {}, []

    def rank(r):
        try:
            model = DeepSeek.load(tiny_checkpoint, parallel, 32, rank=r, group=world.rank(r))
            engine = Engine(model, cache_tokens=512)
            requests = [engine.add(i, prompt, Sampling(3 + 4 * r)) for i, prompt in enumerate(prompts[r])]
            steps[r] = 0
            while not engine.all_idle:
                engine.step()
                steps[r] += 1
            texts[r] = [request.output for request in requests]
            model.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(4)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    assert not failures, failures
    assert len(set(steps.values())) == 1
    for r in range(4):
        assert texts[r] == [oracle_greedy(oracle, prompt, 3 + 4 * r) for prompt in prompts[r]]


def test_half_precision_is_refused_before_anything_is_read(tiny_checkpoint):
    with pytest.raises(ConfigError, match="float16: legal are torch.float32, torch.bfloat16"):
        load_alone(tiny_checkpoint, arithmetic=Plain(torch.float16))
