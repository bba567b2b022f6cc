"""tinyseek on disk: the Hugging Face layout of a DeepSeek-V3 checkpoint, with block-FP8 weights, and its byte
tokenizer.

Names and dtypes are the hub's: `.weight` in e4m3 with an fp32 `.weight_scale_inv` per 128 x 128 block
(ceil-divided: kv_a's 576 rows have 5), one tensor per expert and projection, the MTP layer as layer
`num_hidden_layers`; embedding, head, norms, gate and eh_proj in bf16, the routing bias in fp32. Unlike the
hub's, the MTP layer carries no copies of embedding and head.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from model import MoE, RMSNorm, TinySeek, Weight
from safetensors.torch import save_file
from torch import Tensor, nn

from moelab.config import ModelConfig
from moelab.model.weights import Checkpoint
from moelab.ops.fp8 import BLOCK, quantize_block

SPECIAL = {"<|bos|>": 256, "<|eos|>": 257}
# What config.json holds of a ModelConfig as it is, in the file's order.
FIELDS = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers first_k_dense_replace "
    "num_nextn_predict_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group routed_scaling_factor "
    "rms_norm_eps rope_theta max_position_embeddings bos_token_id eos_token_id"
).split()


def hf_config(c: ModelConfig) -> dict:
    """config.json in the hub's spelling: what `ModelConfig.from_hf` reads as `c`."""
    yarn = asdict(c.rope)
    values = {**asdict(c), "rope_theta": yarn.pop("theta")}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{name: values[name] for name in FIELDS},
        "num_key_value_heads": c.num_attention_heads,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": {"type": "yarn", **yarn},
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _tensors(model: TinySeek) -> list[tuple[str, nn.Module | Tensor]]:
    """(hub name without `.weight`, module or matrix) of everything but the routed experts; layer by layer."""
    out: list[tuple[str, nn.Module | Tensor]] = [
        ("model.embed_tokens", model.embed_tokens), ("model.norm", model.norm), ("lm_head", model.lm_head),
    ]  # fmt: skip
    depth = len(model.layers)
    mtp = model.mtp
    out += [(f"model.layers.{depth}.{name}", getattr(mtp, name)) for name in ("enorm", "hnorm", "eh_proj")]
    out += [(f"model.layers.{depth}.shared_head.norm", mtp.shared_head_norm)]
    for i, layer in enumerate([*model.layers, mtp.layer]):
        for name, module in layer.named_modules():
            if isinstance(module, (Weight, RMSNorm)) and name not in ("mlp.gate_up", "mlp.down"):
                out.append((f"model.layers.{i}.{name}", module))
    return out


def _experts(model: TinySeek) -> list[tuple[str, MoE]]:
    layers = [*model.layers, model.mtp.layer]
    return [(f"model.layers.{i}.mlp", x.mlp) for i, x in enumerate(layers) if isinstance(x.mlp, MoE)]


def _matrices(name: str, moe: MoE) -> list[tuple[str, Tensor]]:
    """The routed experts' matrices as views of the stacked parameters: (hub name without `.weight`, [out, in])."""
    out = []
    for e in range(moe.down.weight.shape[0]):
        gate, up = moe.gate_up.weight.data[e]
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": moe.down.weight.data[e]}
        out += [(f"{name}.experts.{e}.{part}", w) for part, w in parts.items()]
    return out


def state_dict(model: TinySeek) -> dict[str, Tensor]:
    """All tensors of the checkpoint under the hub's names, on the CPU."""
    out: dict[str, Tensor] = {}

    def put_fp8(name: str, w: Tensor) -> None:
        out[f"{name}.weight"], out[f"{name}.weight_scale_inv"] = quantize_block(w)

    for name, module in _tensors(model):
        if isinstance(module, Weight) and module.fp8:
            put_fp8(name, module.weight.data)
        else:
            out[f"{name}.weight"] = module.weight.data.bfloat16()
    for name, moe in _experts(model):
        out[f"{name}.gate.weight"] = moe.gate.weight.data.bfloat16()
        out[f"{name}.gate.e_score_correction_bias"] = moe.gate.e_score_correction_bias.float()
        for matrix, w in _matrices(name, moe):
            put_fp8(matrix, w)
    return {name: t.detach().cpu().contiguous() for name, t in sorted(out.items())}


def save(model: TinySeek, folder: Path) -> None:
    """Write config, generation config, weights and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state_dict(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600
    ids = {"bos_token_id": model.c.bos_token_id, "eos_token_id": model.c.eos_token_id}
    for name, content in (("config", hf_config(model.c)), ("generation_config", {**ids, "do_sample": False})):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    save_tokenizer(folder, model.c.max_position_embeddings)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> TinySeek:
    """The checkpoint as a training module on the CPU, weights dequantised to fp32; `dtype` is the compute dtype.

    Raises CheckpointError for a missing, an extra or a misshapen tensor.
    """
    stored = Checkpoint(folder)
    model = TinySeek(stored.config, dtype).eval()
    for name, module in _tensors(model):
        module.weight.data.copy_(stored.linear(name))
    for name, moe in _experts(model):
        moe.gate.weight.data.copy_(stored.linear(f"{name}.gate"))
        moe.gate.e_score_correction_bias.copy_(stored.tensor(f"{name}.gate.e_score_correction_bias"))
        for matrix, w in _matrices(name, moe):
            w.copy_(stored.linear(matrix))
    return model


def load_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' DeepseekV3ForCausalLM (eager attention) with the checkpoint's dequantised weights, on the CPU.

    The weights go through a state dict, since transformers' own FP8 path quantises activations and wants a GPU. The
    routed experts are stacked there: gate_up_proj [E, 2I, H] and down_proj [E, H, I]; the MTP layer it does not hold.
    """
    from transformers import AutoConfig, DeepseekV3ForCausalLM

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    config._attn_implementation = "eager"
    ours = load(folder)
    state = {f"{n}.weight": m.weight.data for n, m in _tensors(ours)}
    for name, moe in _experts(ours):
        state[f"{name}.gate.weight"] = moe.gate.weight.data
        state[f"{name}.gate.e_score_correction_bias"] = moe.gate.e_score_correction_bias
        state[f"{name}.experts.gate_up_proj"] = moe.gate_up.weight.data.flatten(1, 2)
        state[f"{name}.experts.down_proj"] = moe.down.weight.data
    mtp = f"model.layers.{ours.c.num_hidden_layers}."
    hf = DeepseekV3ForCausalLM(config).eval()
    hf.load_state_dict({name: t for name, t in state.items() if not name.startswith(mtp)}, strict=True)
    if dtype != torch.float32:  # gate weight and bias stay fp32, as from_pretrained keeps them
        for name, p in [*hf.named_parameters(), *hf.named_buffers()]:
            if ".gate." not in name and p.is_floating_point() and "inv_freq" not in name:
                p.data = p.data.to(dtype)
    return hf


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in the byte-level scheme of GPT-2's tokenizer: bytes that Latin-1 prints
    stand for themselves, the others for the code points from 256 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return {chr(b if b in printable else next(others)): b for b in range(256)}


def save_tokenizer(folder: Path, max_length: int) -> None:
    """A byte-level BPE without merges: token id = byte value, then <|bos|> 256 and <|eos|> 257; bos is put first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    bos = next(iter(SPECIAL.items()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
