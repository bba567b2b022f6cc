"""Random weights: what a checkpoint's source gives, in shape and size, and the same for the same question."""

from __future__ import annotations

import pytest
import torch

from moelab.config import ParallelConfig, preset
from moelab.model import random_weights
from moelab.model.deepseek import DeepSeek
from moelab.model.random_weights import RandomWeights
from moelab.model.weights import CheckpointError
from moelab.ops.fp8 import dequantize_block
from tests.conftest import SEED
from tests.helpers import Session

CONFIG = preset("tinyseek")
LATENT, QUERY, OUT = (
    f"model.layers.1.self_attn.{name}" for name in ("kv_a_proj_with_mqa", "q_b_proj", "o_proj")
)  # kv_a has 576 rows: four blocks and a half


def source(seed: int = SEED, **options) -> RandomWeights:
    return RandomWeights(CONFIG, seed=seed, **options)


def same(a, b) -> bool:
    return all(torch.equal(x.float(), y.float()) for x, y in zip(a, b, strict=True))


def test_shapes_and_what_goes_through_keeps_its_size():
    weights = source()
    for name, shape in ((LATENT, (576, 256)), (QUERY, (768, 128)), (OUT, (256, 512))):
        values, scales = weights.quantized(name)
        assert values.shape == shape and values.dtype == torch.float8_e4m3fn
        assert scales.shape == (-(-shape[0] // 128), shape[1] // 128) and scales.dtype == torch.float32
        assert values.float().isfinite().all() and scales.min() > 0 and scales.unique().numel() > 1
        assert 224 < values.float().abs().max() <= 448  # of the whole range of e4m3
        out = torch.randn(512, shape[1]) @ dequantize_block(values, scales).T
        assert out.var() == pytest.approx(1, rel=0.15)


def test_linear_is_what_is_quantised():
    weights = source(dtype=torch.float32)
    assert torch.equal(weights.linear(LATENT), dequantize_block(*weights.quantized(LATENT)))
    assert source().linear(LATENT).dtype == torch.bfloat16


def test_a_cut_has_its_own_size_and_the_variance_of_the_whole():
    values, scales = source().quantized(OUT, cols=slice(128, 256))
    assert values.shape == (256, 128) and scales.shape == (2, 1)
    assert dequantize_block(values, scales).var() == pytest.approx(1 / 512, rel=0.15)
    values, scales = source().quantized(QUERY, rows=slice(384, 768))
    assert values.shape == (384, 128) and scales.shape == (3, 1)


def test_the_same_question_has_the_same_answer(monkeypatch):
    assert same(source().quantized(OUT), source().quantized(OUT))
    others = [
        source(SEED + 1).quantized(OUT), source().quantized(OUT.replace(".1.", ".2.")),
        source().quantized(OUT, slice(0, 256)),
    ]  # fmt: skip
    assert not any(torch.equal(source().quantized(OUT)[0].float(), values.float()) for values, _ in others)
    assert torch.equal(source().tensor("lm_head.weight"), source().tensor("lm_head.weight"))
    # Pieces are an affair of memory: every one is drawn, the last short one too.
    monkeypatch.setattr(random_weights, "PIECE", 50_000)
    values, _ = source().quantized(OUT)
    assert values.float().var() == pytest.approx(112**2, rel=0.05)
    assert all(piece.float().var() > 100**2 for piece in values.view(-1).split(1000))


def test_unquantised_tensors():
    weights = source()
    assert weights.tensor("model.embed_tokens.weight").float().std() == pytest.approx(1, rel=0.05)
    assert weights.tensor("lm_head.weight").float().std() == pytest.approx(1 / 16, rel=0.05)
    gate = weights.tensor("model.layers.1.mlp.gate.weight")
    assert gate.shape == (16, 256) and gate.dtype == torch.bfloat16 and gate.float().std() < 0.1
    bias = weights.tensor("model.layers.1.mlp.gate.e_score_correction_bias", torch.float32)
    assert bias.dtype == torch.float32 and 0 < bias.abs().max() < 0.1
    norm = weights.tensor("model.layers.1.self_attn.kv_a_layernorm.weight")
    assert norm.shape == (512,) and norm.float().mean() == pytest.approx(1, abs=0.05)
    assert torch.equal(
        weights.tensor("model.norm.weight", torch.float32).bfloat16(), weights.tensor("model.norm.weight")
    )


def test_an_unknown_name():
    for ask in (source().tensor, source().quantized, source().linear):
        with pytest.raises(CheckpointError, match="model.layers.9"):
            ask("model.layers.9.self_attn.o_proj")


@torch.no_grad()
def test_a_model_of_them_keeps_its_size_through_all_layers():
    model = DeepSeek.load(RandomWeights(CONFIG.replace(num_hidden_layers=20), seed=SEED, dtype=torch.float32),
                          ParallelConfig(), 64)  # fmt: skip
    hidden = Session(model, length=64).feed(torch.randint(384, (40,)).tolist(), absorbed=True)
    assert hidden.isfinite().all() and hidden.std() == pytest.approx(1, rel=0.3)
    before_the_norm = torch.randn(40, 256)
    assert model.logits(before_the_norm).std() == pytest.approx(1, rel=0.2)


@pytest.mark.gpu
def test_on_a_gpu_with_no_copy_beside_it():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; none here")
    weights = RandomWeights(preset("deepseek-v3"), "cuda", SEED)
    weights.quantized("model.layers.3.mlp.experts.0.up_proj")  # what torch allocates once
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values, scales = weights.quantized("model.layers.3.self_attn.o_proj")
    beside = torch.cuda.max_memory_allocated() - before - values.numel() - scales.numel() * 4
    assert beside <= 3 * random_weights.PIECE
    out = torch.randn(256, 16384, device="cuda") @ dequantize_block(values, scales).T
    assert out.isfinite().all() and out.var().item() == pytest.approx(1, rel=0.05)
    assert same(weights.quantized("model.layers.3.self_attn.o_proj"), (values, scales))
