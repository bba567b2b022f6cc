"""Loading: each rank reads only what it owns, and whatever is wrong with a checkpoint is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moelab.comm import VirtualRanks
from moelab.config import ConfigError, ModelConfig, ParallelConfig
from moelab.model import weights
from moelab.model.arithmetic import Plain
from moelab.model.deepseek import DeepSeek
from moelab.model.scratch import Scratch
from moelab.model.weights import Checkpoint, CheckpointError, tensor_shapes
from moelab.ops.fp8 import dequantize_block, quantize_block
from tests.conftest import SEED, make_oracle
from tests.helpers import Session, load_alone

# Real head sizes, so that FP8 blocks fall as in DeepSeek-V3: kv_a has 576 rows, five blocks with a half one.
BLOCKS = dict(
    vocab_size=512, hidden_size=256, intermediate_size=384, moe_intermediate_size=128, num_hidden_layers=3,
    q_lora_rank=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def fp8_pair(tmp_path_factory):
    """A quantised checkpoint, and transformers' model on its dequantised weights."""
    folder = tmp_path_factory.mktemp("fp8")
    oracle = make_oracle(SEED + 3, **BLOCKS)
    oracle.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, dequantized = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith("proj.weight") and "proj_with_mqa" not in name:
            continue
        quantized, scale = quantize_block(tensor)
        tensors[name], tensors[f"{name}_scale_inv"] = quantized, scale
        dequantized[name] = dequantize_block(quantized, scale, torch.float32)
    save_file(tensors, folder / "model.safetensors")
    plain = tmp_path_factory.mktemp("plain")
    oracle.save_pretrained(plain)
    save_file({**load_file(plain / "model.safetensors"), **dequantized}, plain / "model.safetensors", {"format": "pt"})
    return folder, type(oracle).from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()


def test_block_fp8_equals_transformers_on_the_dequantised_weights(fp8_pair):
    folder, oracle = fp8_pair
    tokens = torch.randint(512, (150,)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    model = load_alone(folder)
    ours = model.logits(Session(model).feed(tokens, absorbed=True))
    # Sums are twice to four times as long as in the tiny configuration, which is held to 2e-5: the worst of 76,800
    # logits came to 2.06e-5 on one CPU. A fault would show in the mean, so that is held close.
    torch.testing.assert_close(ours, expected, rtol=0, atol=4e-5 * max(1.0, expected.std().item()))
    assert (ours - expected).square().mean().sqrt() < 5e-6 * expected.std()


class CountingReader:
    """Stands before a safetensors file and counts the bytes that leave it."""

    def __init__(self, inner, log):
        self._inner, self._log = inner, log

    def keys(self):
        return self._inner.keys()

    def get_slice(self, name):
        view, log = self._inner.get_slice(name), self._log

        class Slice:
            get_shape, get_dtype = view.get_shape, view.get_dtype

            def __getitem__(self, part):
                tensor = view[part]
                log[name] = log.get(name, 0) + tensor.numel() * tensor.element_size()
                return tensor

        return Slice()


def owned_bytes(folder, parallel: ParallelConfig, rank: int) -> int:
    """What this rank's share of the files is, from names and shapes alone."""
    config, total = ModelConfig.from_hf(folder), 0
    mine = parallel.experts(rank, config.n_routed_experts)
    for name, tensor in load_file(folder / "model.safetensors").items():
        share = 1.0
        if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) not in mine:
            share = 0.0
        elif any(part in name for part in ("q_b_proj", "kv_b_proj", "o_proj")):
            share = 1 / parallel.tp
        total += share * tensor.numel() * tensor.element_size()
    return int(total)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_rank_reads_what_it_owns_and_no_more(fp8_pair, tmp_path, monkeypatch, dp, tp, kind):
    folder = fp8_pair[0]
    if kind == "bf16":
        make_oracle(1, **BLOCKS).bfloat16().save_pretrained(tmp_path)
        folder = tmp_path
    parallel, real_open = ParallelConfig(dp, tp), weights.safe_open
    for rank in (0, parallel.ep - 1):
        log: dict[str, int] = {}
        monkeypatch.setattr(weights, "safe_open", lambda *a, log=log, **k: CountingReader(real_open(*a, **k), log))
        load_share(folder, parallel, rank)
        assert owned_bytes(folder, parallel, rank) <= sum(log.values()) <= 1.05 * owned_bytes(folder, parallel, rank)


def load_share(folder, parallel, rank):
    """One rank's layers, without the other ranks."""
    from moelab.comm.tensor_parallel import TensorParallelGroup
    from moelab.model.layer import DecoderLayer

    checkpoint = Checkpoint(folder)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        checkpoint.tensor(name)
    for layer in range(checkpoint.config.num_hidden_layers):
        DecoderLayer.load(
            checkpoint, Plain(checkpoint.dtype), layer, parallel, rank, None, Scratch(), TensorParallelGroup()
        )


def broken(folder, tmp_path, change):
    """A copy of a checkpoint whose tensors `change` has edited."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


def test_a_missing_tensor_is_named_with_its_shape(tiny_checkpoint, tmp_path):
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    folder = broken(tiny_checkpoint, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert name in str(caught.value) and "[64, 128]" in str(caught.value)


def test_an_extra_tensor_is_named(tiny_checkpoint, tmp_path):
    name = "model.layers.0.self_attn.surprise.weight"
    folder = broken(tiny_checkpoint, tmp_path, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + r" \[3, 5\]"):
        Checkpoint(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(tiny_checkpoint, tmp_path):
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    folder = broken(tiny_checkpoint, tmp_path, lambda tensors: tensors.update({name: torch.zeros(39, 128)}))
    with pytest.raises(CheckpointError) as caught:
        load_alone(folder)
    assert name in str(caught.value) and "[39, 128]" in str(caught.value) and "[40, 128]" in str(caught.value)


def test_scales_counted_by_flooring_are_refused(fp8_pair, tmp_path):
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    folder = broken(fp8_pair[0], tmp_path, lambda tensors: tensors.update({name: tensors[name][:4].contiguous()}))
    with pytest.raises(CheckpointError) as caught:
        load_alone(folder)
    assert name in str(caught.value) and "[4, 2]" in str(caught.value) and "[5, 2]" in str(caught.value)


@pytest.mark.parametrize("keep", [0.5, 0.99, 0.0001])
def test_a_truncated_file_is_an_error(tiny_checkpoint, tmp_path, keep):
    shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        Checkpoint(file.parent)


def test_folders_without_weights_and_broken_indexes(tiny_checkpoint, tmp_path):
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="not an index"):
        Checkpoint(tmp_path)
    names = dict.fromkeys(load_file(tiny_checkpoint / "model.safetensors"), "shard-1.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="no such file"):
        load_alone(tmp_path)


def test_shards_with_an_index(oracle, tmp_path):
    oracle.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = torch.randint(320, (20,)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    model = load_alone(tmp_path)
    torch.testing.assert_close(model.logits(Session(model).feed(tokens, absorbed=True)), expected, rtol=0, atol=5e-5)


def test_fp8_weights_are_cut_at_whole_blocks(fp8_pair):
    checkpoint = Checkpoint(fp8_pair[0])
    with pytest.raises(ConfigError, match="multiples of 128"):
        checkpoint.linear("model.layers.0.self_attn.q_b_proj", rows=slice(0, 192))


def test_names_and_parameter_counts_of_deepseek_v3():
    shapes = dict(tensor_shapes(ModelConfig()))
    assert len(shapes) == 91_991 - 2  # the hub's, but for its second copies of embedding and head

    def count(part):
        return sum(torch.Size(s).numel() for n, s in shapes.items() if "scale_inv" not in n and part in n)

    assert count("model.layers.5.") == 11_507_286_272
    assert count("model.layers.61.") == 11_610_068_224
    assert count("") - count("model.layers.61.") == 671_026_419_200
    assert shapes["model.layers.61.eh_proj.weight"] == (7168, 14336)
    assert shapes["model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (5, 56)
    assert "model.layers.2.mlp.gate.weight" not in shapes and "model.layers.3.mlp.gate.weight" in shapes


def test_the_routers_bias_keeps_float32_whatever_the_model_runs_in(tmp_path):
    oracle = make_oracle(SEED + 4)
    bias = torch.linspace(6.82, 7.06, 16)
    oracle.model.layers[2].mlp.gate.e_score_correction_bias.copy_(bias)
    oracle.save_pretrained(tmp_path)
    model = load_alone(tmp_path, arithmetic=Plain(torch.bfloat16))
    assert torch.equal(model.moe_layers[1].feed_forward.gate_bias, bias)


def test_two_virtual_ranks_share_a_model(tiny_checkpoint, oracle):
    """Each loads half the experts; interleaved in one process they give what one rank gives."""
    import threading

    world, parallel = VirtualRanks(2), ParallelConfig(2, 1)
    prompts, results = [torch.randint(320, (n,)).tolist() for n in (30, 0)], {}

    def rank(r):
        model = DeepSeek.load(tiny_checkpoint, parallel, 64, rank=r, group=world.rank(r))
        results[r] = model.logits(Session(model).feed(prompts[r], absorbed=False))
        assert len(model.moe_layers[0].feed_forward.gate_up_w) == 8
        model.close()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    with torch.no_grad():
        expected = oracle(torch.tensor([prompts[0]])).logits[0]
    torch.testing.assert_close(results[0], expected, rtol=0, atol=5e-5)
    assert results[1].shape == (0, 320)
