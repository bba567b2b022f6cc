"""The reference model against transformers' `DeepseekV3ForCausalLM`, in float32."""

from __future__ import annotations

import pytest
import torch

from moelab.config import ModelConfig
from moelab.model.arithmetic import Plain
from tests.conftest import SEED, make_oracle
from tests.helpers import Session, load_alone

LENGTH = 300  # beyond the tiny configuration's 128 original positions, so that YaRN matters


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_alone(tiny_checkpoint)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(320, (LENGTH,), generator=torch.Generator().manual_seed(SEED)).tolist()


@pytest.fixture(scope="module")
def expected(oracle, tokens):
    with torch.no_grad():
        return oracle(torch.tensor([tokens])).logits[0]


def close(ours, theirs, tolerance=2e-5):
    assert theirs.std() > 0.3, "logits without spread would hide an error"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(1.0, theirs.std().item()))


@pytest.mark.parametrize("absorbed", [False, True])
def test_one_pass(model, tokens, expected, absorbed):
    close(model.logits(Session(model).feed(tokens, absorbed=absorbed)), expected)


def test_chunked_prefill_then_absorbed_decode(model, tokens, expected):
    session = Session(model)
    chunks = [tokens[:1], tokens[1:70], tokens[70:257]]
    hidden = [session.feed(chunk, absorbed=False) for chunk in chunks]
    hidden += [session.feed([token], absorbed=True) for token in tokens[257:]]
    close(model.logits(torch.cat(hidden)), expected)


def test_ragged_batch_with_sequences_at_different_lengths_and_empty_contexts(model, oracle):
    """Sequences of one batch do not see each other, whatever pages they lie on."""
    a, b, c = (torch.randint(320, (n,)).tolist() for n in (90, 33, 150))
    session = Session(model, num_sequences=3)
    first = session.feed(a[:40], [], c[:101], absorbed=False)
    second = session.feed(a[40:], b, c[101:], absorbed=False)
    with torch.no_grad():
        logits = [oracle(torch.tensor([t])).logits[0] for t in (a, b, c)]
    close(model.logits(first), torch.cat([logits[0][:40], logits[2][:101]]))
    close(model.logits(second), torch.cat([logits[0][40:], logits[1], logits[2][101:]]))


def test_no_tokens_at_all(model):
    session = Session(model)
    for absorbed in (False, True):
        assert session.feed([], absorbed=absorbed).shape == (0, 128)


def test_the_physical_order_of_pages_changes_no_bit(model, tokens):
    torch.manual_seed(1)
    one = Session(model).feed(tokens, absorbed=True)
    torch.manual_seed(2)
    other = Session(model).feed(tokens, absorbed=True)
    assert torch.equal(one, other)


def test_moe_is_routed_experts_with_the_weights_plus_the_unscaled_shared_expert(model):
    """MoE(x) = Σ w·E(x) + Shared(x), Σ w = 2.5: the routed scaling factor is applied exactly once."""
    from moelab.ops.activation import silu_mul
    from tests.helpers import one_state

    state = one_state(model, torch.randint(320, (50,)).tolist())
    layer = model.moe_layers[0]
    for stage in layer.stages:
        before = state.residual
        layer.run(stage, state)
    moe = layer.feed_forward
    torch.testing.assert_close(state.topk_weights.sum(-1), torch.full((50,), 2.5))
    x = state.x.double()
    expected = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(state.topk_ids, state.topk_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            hidden = silu_mul(moe.gate_up_w[expert].double() @ x[token])
            expected[token] += weight * (moe.down_w[expert].double() @ hidden)
    expected += silu_mul(x @ moe.shared_mlp.gate_up.double().T) @ moe.shared_mlp.down.double().T
    torch.testing.assert_close((state.residual - before).double(), expected, rtol=0, atol=1e-4)


def test_head_dim_of_the_config_is_not_believed(model, tiny_checkpoint):
    assert ModelConfig.from_hf(tiny_checkpoint).latent_dim == 32 + 8
    assert model.moe_layers[0].attention.w_uk.shape == (4, 32, 16)


@pytest.mark.parametrize("change", [dict(rope_scaling=None), dict(n_group=1, topk_group=1), dict(n_shared_experts=2)])
def test_other_configurations(tmp_path, change):
    other = make_oracle(7, **change)
    other.save_pretrained(tmp_path)
    tokens = torch.randint(320, (80,)).tolist()
    with torch.no_grad():
        expected = other(torch.tensor([tokens])).logits[0]
    model = load_alone(tmp_path)
    close(model.logits(Session(model).feed(tokens, absorbed=True)), expected)


def test_bfloat16_stays_near(oracle, tiny_checkpoint, tokens, expected):
    """Bias and router stay in float32; the rest rounds. The error is that of transformers in bfloat16."""
    model = load_alone(tiny_checkpoint, arithmetic=Plain(torch.bfloat16))
    assert model.moe_layers[0].feed_forward.gate_bias.dtype == torch.float32
    ours = model.logits(Session(model).feed(tokens, absorbed=False))
    error = (ours - expected).square().mean().sqrt() / expected.std()
    assert 1e-4 < error < 0.3
