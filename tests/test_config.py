"""Configurations: both spellings of RoPE, every refusal names what is legal, and how ranks own heads and experts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.config import PRESETS, ConfigError, ModelConfig, ParallelConfig, RopeConfig, preset

HUB = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {},
    "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def test_the_hubs_config_is_the_preset(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(HUB) == preset("deepseek-v3")


def test_transformers_5_spells_rope_differently_and_means_the_same():
    new = {k: v for k, v in HUB.items() if k not in ("rope_scaling", "rope_theta", "scoring_func", "topk_method")}
    new["rope_parameters"] = {**HUB["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
    new["head_dim"] = 64  # HF's name for the RoPE part
    config = ModelConfig.from_hf(new)
    assert config == preset("deepseek-v3")
    assert config.latent_dim == 576 and config.qk_head_dim == 192


def test_a_config_that_transformers_writes_is_read(oracle):
    config = ModelConfig.from_hf(oracle.config.to_dict())
    assert config.rope == RopeConfig(10000.0, 8.0, 128, 32, 1, 1.0, 1.0)
    assert config.weight_block_size is None and config.n_routed_experts == 16


def test_plain_rope():
    assert ModelConfig.from_hf({**HUB, "rope_scaling": None}).rope == RopeConfig()
    assert ModelConfig.from_hf({**HUB, "rope_scaling": {"type": "default"}, "rope_theta": 5e5}).rope.theta == 5e5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_sizes": 1}, "hidden_size"),
        ({"scoring_func": "tanh"}, "'sigmoid', 'softmax'"),
        ({"topk_method": "greedy"}, "'noaux_tc'"),
        ({"hidden_act": "gelu"}, "'silu'"),
        ({"tie_word_embeddings": True}, "False"),
        ({"n_group": 7}, "[1, 2, 4, 8, 16, 32, 64, 128, 256]"),
        ({"topk_group": 9}, "1…8"),
        ({"num_experts_per_tok": 129}, "1…128"),
        ({"hidden_size": 0}, "positive"),
        ({"hidden_size": "7168"}, "positive integer"),
        ({"first_k_dense_replace": 62}, "0…61"),
        ({"num_nextn_predict_layers": 2}, "0 and 1"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'yarn'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "gain": 1}}, "mscale"),
        ({"quantization_config": {"quant_method": "awq"}}, "'fp8'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "[128, 128]"),
        ({"eos_token_id": [1, 2]}, "one id"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_can(change, named):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf({**HUB, **change})
    assert named in str(caught.value) and next(iter(change)).split("_")[0] in str(caught.value)


def test_files_that_are_not_configs(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="list"):
        ModelConfig.from_hf(tmp_path)


def test_unknown_names():
    with pytest.raises(ConfigError, match="deepseek-v3"):
        preset("deepseek-v2")
    with pytest.raises(ConfigError, match="vocab_size"):
        preset("tinyseek").replace(vocab=1)


@given(st.integers(1, 16), st.integers(1, 8))
def test_every_expert_and_head_has_one_owner(dp, tp):
    if 8 % tp:
        with pytest.raises(ConfigError, match=r"\[1, 2, 4, 8\]") if dp * tp > 8 else pytest.MonkeyPatch.context():
            ParallelConfig(dp, tp)
        return
    parallel = ParallelConfig(dp, tp)
    ranks = range(parallel.ep)
    assert [r for g in range(dp) for r in parallel.group_ranks(g)] == list(ranks)
    assert all(r == parallel.dp_group(r) * tp + parallel.tp_rank(r) for r in ranks)
    experts = parallel.ep * 4
    owned = [e for r in ranks for e in parallel.experts(r, experts)]
    assert owned == list(range(experts))
    assert all(e in parallel.experts(parallel.expert_rank(e, experts), experts) for e in owned)


def test_illegal_cuts_list_the_legal_ones():
    v3, tiny = PRESETS["deepseek-v3"], PRESETS["tinyseek"]
    for dp, tp in ((16, 8), (128, 1), (1, 8), (64, 4)):
        ParallelConfig(dp, tp).check(v3)
    with pytest.raises(ConfigError, match="256 experts divide only over"):
        ParallelConfig(3, 1).check(v3)
    with pytest.raises(ConfigError, match=r"legal for 4 heads are \[1, 2\]"):
        ParallelConfig(1, 4).check(tiny)
    with pytest.raises(ConfigError, match=r"legal for 128 heads are \[1, 2, 4, 8, 16, 32, 64\]"):
        ParallelConfig(1, 128, gpus_per_node=128).check(v3)
    with pytest.raises(ConfigError, match=r"span nodes of 8 GPUs; legal are \[1, 2, 4, 8\]"):
        ParallelConfig(1, 16)
    with pytest.raises(ConfigError, match="dp is 0"):
        ParallelConfig(0, 1)
