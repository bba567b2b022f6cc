"""The recipe's own tests: `python -m pytest experiments/tinyseek` (CPU, under a minute)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import checkpoint  # noqa: E402
import corpus  # noqa: E402
import evaluate  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from model import SMOKE, TINYSEEK, TinySeek, largest  # noqa: E402
from optim import orthogonalise  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from moelab.config import ModelConfig  # noqa: E402
from moelab.model.weights import tensor_shapes  # noqa: E402

torch.set_num_threads(1)  # small tensors gain nothing from threads, and on busy cores threads wait for each other
SHIPPED = evaluate.HELDOUT.parent


def random_model(c: ModelConfig, seed: int) -> TinySeek:
    """Norms and biases away from their initial values, so that no rule stays invisible."""
    torch.manual_seed(seed)
    model = TinySeek(c).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.uniform_(0.7, 1.3)
            elif name == "lm_head.weight":
                p.mul_(10)
        for gate in model.gates():
            gate.e_score_correction_bias.uniform_(-0.3, 0.3)
    return model


@pytest.mark.parametrize("c", [SMOKE, TINYSEEK], ids=["smoke", "tinyseek"])
def test_logits_agree_with_transformers(c, tmp_path):
    checkpoint.save(random_model(c, 1), tmp_path)
    ours, hf = checkpoint.load(tmp_path), checkpoint.load_transformers(tmp_path)
    tokens = torch.randint(0, 258, (2, 100))
    with torch.inference_mode():
        got = ours.head(ours.trunk(tokens)[0])
        want = hf(tokens, use_cache=False).logits
    assert want.std() > 0.3
    assert (got - want).abs().max() < 1e-4


def test_draft_agrees_with_transformers(tmp_path):
    """The MTP layer is a DeepSeek MoE layer between its own norms: run transformers' layer on the same input."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    checkpoint.save(random_model(SMOKE, 2), tmp_path)
    ours, hf = checkpoint.load(tmp_path), checkpoint.load_transformers(tmp_path)
    layer = DeepseekV3DecoderLayer(hf.config, SMOKE.num_hidden_layers - 1).eval()
    mine = ours.mtp.layer
    state = {n: p.data for n, p in mine.named_parameters() if not n.startswith(("mlp.gate_up", "mlp.down"))}
    state |= {
        "mlp.gate.e_score_correction_bias": mine.mlp.gate.e_score_correction_bias,
        "mlp.experts.gate_up_proj": mine.mlp.gate_up.weight.data.flatten(1, 2),
        "mlp.experts.down_proj": mine.mlp.down.weight.data,
    }
    layer.load_state_dict(state, strict=True)
    tokens = torch.randint(0, 258, (2, 50))
    position = torch.arange(49).unsqueeze(0)
    with torch.inference_mode():
        h = ours.trunk(tokens)[0][:, :-1]
        got = ours.draft(h, tokens[:, 1:])[0]
        z = torch.cat((ours.mtp.enorm(ours.embed_tokens.weight[tokens[:, 1:]]), ours.mtp.hnorm(h)), dim=-1)
        z = z @ ours.mtp.eh_proj.weight.T
        mask = torch.full((49, 49), -torch.inf).triu(1)[None, None]
        out = layer(z, attention_mask=mask, position_embeddings=hf.model.rotary_emb(z, position))
        out = out[0] if isinstance(out, tuple) else out
        want = ours.mtp.shared_head_norm(out)
    assert (got - want).abs().max() < 1e-4


def test_checkpoint_reloads_to_itself(tmp_path):
    """What is loaded, saved again, is the same file: FP8 of an FP8 value is that value."""
    checkpoint.save(random_model(SMOKE, 3), tmp_path / "a")
    checkpoint.save(checkpoint.load(tmp_path / "a"), tmp_path / "b")
    first, second = ((tmp_path / x / "model.safetensors").read_bytes() for x in "ab")
    assert first == second


def test_the_shipped_checkpoint_reloads_to_itself(tmp_path):
    checkpoint.save(checkpoint.load(SHIPPED), tmp_path)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes(), name
    again, shipped = (load_file(folder / "model.safetensors") for folder in (tmp_path, SHIPPED))
    assert again.keys() == shipped.keys()
    for name, want in shipped.items():
        if name.endswith("scale_inv"):  # a GPU divides by 448 by multiplying: one step of fp32 beside a CPU's division
            assert (again[name].view(torch.int32) - want.view(torch.int32)).abs().max() <= 1, name
        else:
            assert again[name].dtype == want.dtype and torch.equal(again[name].float(), want.float()), name


@pytest.mark.parametrize("c", [SMOKE, TINYSEEK], ids=["smoke", "tinyseek"])
def test_the_export_is_what_moelab_reads(c):
    assert ModelConfig.from_hf(checkpoint.hf_config(c)) == c
    tensors = checkpoint.state_dict(TinySeek(c))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == dict(tensor_shapes(c))


def test_checkpoint_is_small_and_named_like_the_hub(tmp_path):
    checkpoint.save(TinySeek(TINYSEEK), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size <= 16 * 1024 * 1024
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 2)
    assert tensors["model.layers.5.mlp.experts.15.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors["model.layers.5.eh_proj.weight"].shape == (256, 512)
    assert "model.layers.5.embed_tokens.weight" not in tensors


def test_training_sees_what_the_checkpoint_holds(tmp_path):
    model = random_model(SMOKE, 4)
    model.refresh_fp8()
    checkpoint.save(model, tmp_path)
    loaded = dict(checkpoint.load(tmp_path).named_modules())
    for name, module in model.named_modules():
        if getattr(module, "fp8", False):
            seen = module.get(torch.float32).detach()
            torch.testing.assert_close(seen, loaded[name].weight.detach(), rtol=1e-6, atol=1e-9)


def test_largest_breaks_ties_by_the_lower_index():
    x = torch.randint(0, 3, (200, 16)).float()
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(largest(x, 4), torch.zeros_like(x).scatter(-1, order, 1).bool())


def test_orthogonalise():
    s = torch.linalg.svdvals(orthogonalise(torch.randn(3, 64, 32), torch.float32))
    assert s.min() > 0.5 and s.max() < 1.5


def test_tokenizer_round_trips(tmp_path):
    from transformers import AutoTokenizer

    checkpoint.save(TinySeek(SMOKE), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n\treturn  'naïve — 数学 🙂 \\x00'\r\n\n  \x00\x7f\u2028<|bo s|>"
    ids = tokenizer(text).input_ids
    assert ids == [256, *text.encode()]
    assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("<|eos|>", add_special_tokens=False).input_ids == [257]
    assert [tokenizer.decode([b]) for b in range(128)] == [chr(b) for b in range(128)]


def test_windows_score_every_byte_once():
    files = {"a": bytes(range(200)), "b": b"", "c": b"x", "d": bytes(64), "e": bytes(65)}
    seen = []
    for tokens, first, last in evaluate.windows(files, 64, 32, 256, 257):
        assert len(tokens) == 65 and first >= 1
        assert tokens[0] == 256 or first >= 32  # a full window before it, or the start of the file
        seen += tokens[first:last]
    assert bytes(seen) == b"".join(files.values())


def test_shipped_heldout_files_are_the_pinned_ones():
    files = corpus.read_heldout(evaluate.HELDOUT)
    assert sum(map(len, files.values())) <= 256 * 1024
    assert (evaluate.HELDOUT / "LICENSE").read_text().count("PYTHON SOFTWARE FOUNDATION LICENSE") >= 1
