"""Parameter counts against DeepSeek's published ones, and against a real checkpoint's shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import moelab
from moelab.config import ModelConfig, ParallelConfig, preset
from moelab.perf import params

V3 = preset("deepseek-v3")


def test_published_counts():  # check 1; the table of the hub's checkpoint
    assert params.expert_params(V3) == 44_040_192
    assert params.attention_params(V3) == 187_105_280
    assert params.repeated_attention_params(V3) == 2112 * 7168
    assert params.total_params(V3) == 671_026_419_200
    assert params.total_params(V3, mtp=True) - params.total_params(V3) == 11_610_068_224


def test_touched():  # check 2, and the model card's 37 B active
    assert params.touched_params(V3, 16) == pytest.approx(57.06e9, abs=0.05e9)
    assert params.touched_params(V3, 8) == pytest.approx(36.63e9, abs=0.01e9)
    assert params.touched_params(V3, 8, embedding=True) == pytest.approx(37.55e9, abs=0.01e9)
    assert params.touched_params(V3, 256, embedding=True) == params.total_params(V3)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (8, 1), (2, 4), (32, 4), (128, 1)])
def test_shares_add_up(dp, tp):
    """Over all GPUs: experts once, heads once per DP group, the rest on every GPU."""
    parallel = ParallelConfig(dp, tp)
    copies = {"whole": dp * tp, "tp": dp, "ep": 1}
    for c in params.components(V3):
        assert c.per_gpu(parallel) * parallel.ep == pytest.approx(c.total * copies[c.cut])


def test_against_a_checkpoint(oracle):
    """transformers' module of the tiny model has as many parameters (and routing biases) as the table says."""
    config = ModelConfig.from_hf({**oracle.config.to_dict(), "model_type": "deepseek_v3"})
    counted = sum(p.numel() for p in oracle.parameters())
    counted += sum(b.numel() for n, b in oracle.named_buffers() if "e_score_correction_bias" in n)
    assert params.total_params(config) == counted


def test_against_tinyseek():
    """The packaged checkpoint's own header, scales aside, holds as many parameters, MTP layer included."""
    folder = Path(moelab.__file__).parent / "data" / "tinyseek"
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = {n: t["shape"] for n, t in header.items() if n != "__metadata__" and not n.endswith("_scale_inv")}
    config = ModelConfig.from_hf(folder)
    assert params.total_params(config, mtp=True) == sum(math.prod(shape) for shape in shapes.values())
    ours = {c.name: c.total for c in params.components(config) if not c.mtp}
    in_main = {n: s for n, s in shapes.items() if f"layers.{config.num_hidden_layers}." not in n}
    for name, part in (("routed_experts", ".mlp.experts."), ("shared_expert", "shared_experts"), ("o", "o_proj")):
        assert ours[name] == sum(math.prod(shape) for n, shape in in_main.items() if part in n)
