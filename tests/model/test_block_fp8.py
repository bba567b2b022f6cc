"""The arithmetic of serving, beside the reference: on the CPU by the ops' references, on a GPU by their kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from moelab.comm import VirtualRanks
from moelab.config import ConfigError, ParallelConfig, preset
from moelab.engine.executor import run_layers
from moelab.engine.routing import heldout_windows
from moelab.model.block_fp8 import BlockFp8, wide_linear
from moelab.model.deepseek import DeepSeek
from moelab.model.tokenizer import Tokenizer
from moelab.stages import SCHEDULES
from tests.engine.test_distributed import TINYSEEK
from tests.helpers import Session, load_alone, one_state

# Of tinyseek's logits, as a share of their deviation. An FP8 value is off by 2⁻⁴ of itself at most, 2.6 % in the mean
# square; products of two such, summed with random signs, keep about 3.7 %, of which each layer adds a share to a stream
# that the layers before have written most of.
LOGITS_ERROR = 0.04
LENGTH = 128


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return request.param


@pytest.fixture(scope="module")
def windows():
    tokenizer = Tokenizer(TINYSEEK, preset("tinyseek").bos_token_id)
    return heldout_windows(tokenizer, 64 if torch.cuda.is_available() else 4, LENGTH)


@pytest.fixture(scope="module")
def reference(windows):
    """float32 logits [n, LENGTH, vocab] of the windows."""
    with torch.no_grad():
        model = load_alone(TINYSEEK, max_tokens=len(windows) * LENGTH)
        return logits_of(model, windows, absorbed=False)


def logits_of(model, windows, absorbed: bool) -> torch.Tensor:
    session = Session(model, len(windows), LENGTH)
    hidden = session.feed(*(window for window in windows), absorbed=absorbed)
    return model.logits(hidden).cpu().unflatten(0, (len(windows), LENGTH))


def serving(device: str, max_tokens: int, **options) -> DeepSeek:
    return load_alone(TINYSEEK, max_tokens=max_tokens, arithmetic=BlockFp8(), device=device, **options)


def bits_per_byte(logits: torch.Tensor, windows) -> float:
    targets = torch.tensor([window[1:] for window in windows])
    return cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten()).item() / torch.tensor(2.0).log().item()


@pytest.mark.parametrize("absorbed", [False, True])
@torch.no_grad()
def test_tinyseek_as_it_is_served_stays_near_float32(device, windows, reference, absorbed):
    """Logits, bits per byte, and the likeliest token: where that differs, the reference's own first two are as near to
    each other as the error."""
    found = logits_of(serving(device, len(windows) * LENGTH), windows, absorbed)
    error = (found - reference).square().mean().sqrt()
    assert 0.002 * reference.std() < error < LOGITS_ERROR * reference.std()
    assert abs(bits_per_byte(found, windows) - bits_per_byte(reference, windows)) < 0.01
    other = found.argmax(-1) != reference.argmax(-1)
    assert other.float().mean() < 0.03
    top = reference[other].topk(2).values
    assert (top[:, 0] - top[:, 1] < 8 * error).all()  # two errors of four deviations each


@pytest.mark.parametrize("overlap", SCHEDULES)
@torch.no_grad()
def test_every_schedule_computes_the_same(device, overlap):
    """Between none and dispatch not a bit differs; halves choose other tiles on a GPU, and differ by rounding."""
    model = serving(device, 64)
    prompts = [torch.randint(256, (n,)).tolist() for n in (9, 1, 17, 5)]
    found = {}
    for name in {"none", overlap}:
        session = Session(model, len(prompts), 64)
        state = model.begin(session._batch(prompts, session.lengths, absorbed=True), session.cache)
        run_layers(model, state, name)
        found[name] = model.logits(model.finish(state))
    if overlap != "microbatch" or device == "cpu":
        assert torch.equal(found[overlap], found["none"])
    difference = (found[overlap] - found["none"]).square().mean().sqrt()
    assert difference < LOGITS_ERROR * found["none"].std()


@pytest.mark.parametrize("dp", [2, 4])
@torch.no_grad()
def test_experts_on_several_ranks_compute_the_same(dp):
    """Virtual ranks, each with its own tokens, beside one rank alone. Experts then have rows of several groups, whose
    products the CPU may sum in another order: now and then that changes a rounding to FP8."""
    parallel, world = ParallelConfig(dp), VirtualRanks(dp)
    models = [
        DeepSeek.load(TINYSEEK, parallel, 32, rank=r, arithmetic=BlockFp8(), group=world.rank(r)) for r in range(dp)
    ]
    alone = serving("cpu", 64)
    prompts = [torch.randint(256, (n,)).tolist() for n in (9, 1, 17, 5)[:dp]]
    states = [one_state(model, prompt) for model, prompt in zip(models, prompts, strict=True)]
    for layer in range(len(alone.layers)):
        for stage in alone.layers[layer].stages:
            for model, state in zip(models, states, strict=True):
                model.layers[layer].run(stage, state)
    for model, state, prompt in zip(models, states, prompts, strict=True):
        expected = one_state(alone, prompt)
        run_layers(alone, expected)
        found, expected = model.logits(model.finish(state)), alone.logits(alone.finish(expected))
        assert (found - expected).square().mean().sqrt() < LOGITS_ERROR / 2 * expected.std()
        model.close()


@torch.no_grad()
def test_padding_is_routed_nowhere_and_changes_nothing(device):
    """Rows that are not real, NaN among them, between real ones."""
    model = serving(device, 64)
    tokens = torch.randint(256, (12,)).tolist()
    state, padded = one_state(model, tokens), one_state(model, tokens)
    real = torch.ones(12, dtype=torch.bool)
    real[[3, 7, 8]] = False
    padded.batch.real = real.to(device)
    layer = model.moe_layers[0]
    for s in (state, padded):
        for stage in layer.stages:
            if stage.name == "gate" and s is padded:
                s.x.plain[~padded.batch.real] = float("nan")
            layer.run(stage, s)
    assert (padded.topk_ids[~padded.batch.real] == -1).all()
    assert int(padded.counts.sum()) == 9 * model.config.num_experts_per_tok
    routed = padded.update[0]
    assert torch.equal(routed[padded.batch.real], state.update[0][padded.batch.real])
    assert not routed[~padded.batch.real].any()


def test_wide_sums_are_not_rounded_to_bfloat16(device):
    x, weight = torch.randn(5, 7168).bfloat16().to(device), torch.randn(256, 7168).bfloat16().to(device)
    exact = x.double() @ weight.double().T
    assert wide_linear(x, weight).dtype == torch.float32
    torch.testing.assert_close(wide_linear(x, weight).double(), exact, rtol=0, atol=1e-2)
    assert (exact - exact.bfloat16().double()).abs().max() > 0.1
    assert wide_linear(x[:0], weight).shape == (0, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_lora_rank=256), "kv_lora_rank is 256: in FP8 it is 512, or take Plain"),
        (dict(v_head_dim=64), "v_head_dim is 64: in FP8 it is 128"),
        (dict(moe_intermediate_size=192), "moe_intermediate_size is 192: in FP8 it is a multiple of 128"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        BlockFp8().check(preset("tinyseek").replace(**change))
    BlockFp8().check(preset("tinyseek"))
    BlockFp8().check(preset("deepseek-v3"))
