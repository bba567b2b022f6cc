"""What is run (`ModelConfig`) and how it is spread over ranks (`ParallelConfig`). Knows nothing else.

A checkpoint's `config.json` says far more than a forward pass needs. `ModelConfig.from_hf` takes what has an effect,
passes over what is known to have none, and refuses the rest: an unread field would be a silently different model.
Both spellings of RoPE are read: the hub's and transformers 4's `rope_scaling` + `rope_theta`, and transformers 5's
`rope_parameters`, which holds theta as well and drops `scoring_func` and `topk_method`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from pathlib import Path


class MoelabError(Exception):
    """An error meant for the person at the keyboard: one line that names the value, the limit and the fix."""


class ConfigError(MoelabError, ValueError):
    """A configuration that cannot be run."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `factor` 1.0 is plain RoPE; otherwise YaRN (arXiv 2309.00071) with the hub's field names."""

    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0  # 0: the field is absent from the checkpoint
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V3-style model; fields as in the hub's `config.json`. Defaults are DeepSeek-V3's own values."""

    vocab_size: int = 129280
    hidden_size: int = 7168
    num_hidden_layers: int = 61
    intermediate_size: int = 18432  # of the dense MLP
    moe_intermediate_size: int = 2048
    first_k_dense_replace: int = 3
    num_nextn_predict_layers: int = 1

    num_attention_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    scoring_func: str = "sigmoid"

    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 163840
    rope: RopeConfig = RopeConfig(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    weight_block_size: tuple[int, int] | None = (128, 128)  # None: an unquantised checkpoint
    bos_token_id: int = 0
    eos_token_id: int = 1

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            _require(isinstance(value, int) and value > 0, f"{name} is {value!r}: give a positive integer")
        _require(
            0 <= self.first_k_dense_replace <= self.num_hidden_layers,
            f"first_k_dense_replace is {self.first_k_dense_replace}: legal are 0…{self.num_hidden_layers}, "
            "the number of hidden layers",
        )
        _require(
            self.num_nextn_predict_layers in (0, 1),
            f"num_nextn_predict_layers is {self.num_nextn_predict_layers}: legal are 0 and 1",
        )
        _require(self.n_shared_experts >= 0, f"n_shared_experts is {self.n_shared_experts}: legal are 0, 1, …")
        _require(
            self.scoring_func in ("sigmoid", "softmax"),
            f"scoring_func is {self.scoring_func!r}: legal are 'sigmoid', 'softmax'",
        )
        _require(
            self.qk_rope_head_dim % 2 == 0,
            f"qk_rope_head_dim is {self.qk_rope_head_dim}: it must be even, RoPE turns pairs",
        )
        self._check_routing()

    def _check_routing(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        _require(
            experts % groups == 0,
            f"n_group is {groups}: legal for {experts} experts are {_divisors(experts)}",
        )
        _require(
            self.topk_group <= groups, f"topk_group is {self.topk_group}: legal for n_group {groups} are 1…{groups}"
        )
        reachable = experts // groups * self.topk_group
        _require(
            self.num_experts_per_tok <= reachable,
            f"num_experts_per_tok is {self.num_experts_per_tok}: legal are 1…{reachable}, the experts in "
            f"{self.topk_group} of {groups} groups",
        )

    @property
    def qk_head_dim(self) -> int:
        """Query and key dimension of one head, 192 for DeepSeek-V3. (HF's `head_dim` is only its RoPE part.)"""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values in one token's cache row of one layer: the compressed KV and the shared RoPE key, 576."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def replace(self, **changes) -> ModelConfig:
        """A copy with some fields changed; an unknown field is an error that names its near misses."""
        _check_names(changes, [f.name for f in dataclasses.fields(self)], "ModelConfig")
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(cls, source: str | Path | dict) -> ModelConfig:
        """Read a Hugging Face `config.json`: a dict, the file, or the directory that holds it.

        Raises `ConfigError` for a field with an effect that is not implemented, naming what is accepted.
        """
        raw = source if isinstance(source, dict) else _read_json(Path(source))
        fields = {f.name for f in dataclasses.fields(cls)} - {"rope", "weight_block_size"}
        known = fields | _FIXED.keys() | _NO_EFFECT | _STRUCTURED
        _check_names({k: v for k, v in raw.items() if v is not None}, sorted(known), "config.json")
        for name, accepted in _FIXED.items():
            value = raw.get(name)
            _require(
                value is None or value in accepted,
                f"config.json: {name} is {value!r}: accepted are {', '.join(map(repr, accepted))}",
            )
        values = {name: raw[name] for name in fields if raw.get(name) is not None}
        for name in ("bos_token_id", "eos_token_id"):
            if isinstance(values.get(name), list):
                _require(
                    len(values[name]) == 1, f"config.json: {name} is {values[name]}: one id is accepted, not several"
                )
                values[name] = values[name][0]
        return cls(**values, rope=_read_rope(raw), weight_block_size=_read_quantization(raw))


_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers intermediate_size moe_intermediate_size num_attention_heads q_lora_rank "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts num_experts_per_tok n_group topk_group "
    "max_position_embeddings"
).split()

# Fields whose other values are not implemented.
_FIXED = {
    "model_type": ("deepseek_v3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
    "topk_method": ("noaux_tc",),
    "rope_interleave": (True,),
}
_STRUCTURED = {"rope_theta", "rope_scaling", "rope_parameters", "quantization_config"}
# Fields that change nothing in a forward pass. `head_dim` is HF's name for the RoPE part and must not be believed.
_NO_EFFECT = {
    "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "chunk_size_feed_forward", "dtype", "ep_size",
    "head_dim", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "num_key_value_heads",
    "num_local_experts", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "qk_head_dim", "return_dict", "seq_aux", "torch_dtype", "transformers_version",
    "unsloth_version", "use_cache", "_name_or_path",
}  # fmt: skip


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _check_names(given, legal: list[str], where: str) -> None:
    for name in given:
        if name not in legal:
            near = difflib.get_close_matches(name, legal, n=3)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise ConfigError(f"{where}: unknown field {name!r}{hint}; legal are {', '.join(legal)}")


def _read_json(path: Path) -> dict:
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; give a Hugging Face checkpoint's folder") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    _require(isinstance(raw, dict), f"{file}: holds a {type(raw).__name__}, not an object")
    return raw


def _read_rope(raw: dict) -> RopeConfig:
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or raw.get("rope_theta") or RopeConfig.theta)
    kinds = {rope.pop(key) for key in ("type", "rope_type") if key in rope}
    if kinds <= {"default"}:
        return RopeConfig(theta=theta)
    _require(kinds == {"yarn"}, f"config.json: rope type is {sorted(map(str, kinds))}: accepted are 'default', 'yarn'")
    _require("factor" in rope, "config.json: rope type yarn without a factor; the hub's DeepSeek-V3 has 40")
    legal = sorted(f.name for f in dataclasses.fields(RopeConfig) if f.name != "theta")
    if "attention_factor" in rope:
        _require(
            rope.pop("attention_factor") is None,
            "config.json: attention_factor is set: give mscale and mscale_all_dim instead",
        )
    if rope.pop("truncate", True) is not True:
        raise ConfigError("config.json: rope truncate is false: accepted is true")
    _check_names(rope, legal, "config.json rope")
    rope.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    _require(
        rope["original_max_position_embeddings"] is not None,
        "config.json: rope type yarn without original_max_position_embeddings",
    )
    return RopeConfig(theta=theta, **{name: value for name, value in rope.items() if value is not None})


def _read_quantization(raw: dict) -> tuple[int, int] | None:
    quant = raw.get("quantization_config")
    if quant is None:
        return None
    for name, accepted in (("quant_method", "fp8"), ("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        value = quant.get(name, accepted)
        _require(value == accepted, f"config.json quantization_config: {name} is {value!r}: accepted is {accepted!r}")
    block = tuple(quant.get("weight_block_size") or ())
    _require(
        block == (128, 128),
        f"config.json quantization_config: weight_block_size is {list(block)}: accepted is [128, 128]",
    )
    return block


@dataclass(frozen=True)
class ParallelConfig:
    """`dp` groups of `tp` ranks each: attention is cut by heads inside a group, experts are spread over all ranks.

    Rank r belongs to DP group r // tp and is its TP rank r % tp; expert e lives on rank e // (E / ep). A TP group
    stays inside one node, since it reduces after every attention.
    """

    dp: int = 1
    tp: int = 1
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "gpus_per_node"):
            value = getattr(self, name)
            _require(isinstance(value, int) and value > 0, f"{name} is {value!r}: give a positive integer")
        nodes = [{self.node(rank) for rank in self.group_ranks(group)} for group in range(self.dp)]
        _require(
            all(len(spanned) == 1 for spanned in nodes),
            f"tp is {self.tp}: a TP group would span nodes of {self.gpus_per_node} GPUs; "
            f"legal are {_divisors(self.gpus_per_node)}",
        )

    @property
    def ep(self) -> int:
        """Expert parallelism: the number of ranks, dp · tp."""
        return self.dp * self.tp

    def dp_group(self, rank: int) -> int:
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def node(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def group_ranks(self, group: int) -> range:
        """The ranks of one DP group."""
        return range(group * self.tp, (group + 1) * self.tp)

    def experts(self, rank: int, num_experts: int) -> range:
        """The experts that live on `rank`."""
        local = num_experts // self.ep
        return range(rank * local, (rank + 1) * local)

    def expert_rank(self, expert: int, num_experts: int) -> int:
        return expert // (num_experts // self.ep)

    def check(self, model: ModelConfig) -> None:
        """Raise `ConfigError` if `model` cannot be cut this way, naming the choices that can."""
        experts, heads = model.n_routed_experts, model.num_attention_heads
        _require(
            experts % self.ep == 0,
            f"ep = dp·tp is {self.ep}: {experts} experts divide only over {_divisors(experts)} ranks",
        )
        legal = [tp for tp in _divisors(heads) if tp == 1 or _heads_can_be_cut(model, tp)]
        _require(
            self.tp in legal,
            f"tp is {self.tp}: legal for {heads} heads are {legal} "
            "(an even number of heads on each rank, FP8 weights cut at whole 128-blocks)",
        )


def _heads_can_be_cut(model: ModelConfig, tp: int) -> bool:
    heads = model.num_attention_heads // tp
    if heads % 2:
        return False
    if model.weight_block_size is None:
        return True
    cuts = (model.qk_head_dim, model.qk_nope_head_dim + model.v_head_dim, model.v_head_dim)
    return all(heads * dim % 128 == 0 for dim in cuts)


# The hub's DeepSeek-V3 (deepseek-ai/DeepSeek-V3 config.json), and the small model that this package ships.
PRESETS = {
    "deepseek-v3": ModelConfig(),
    "tinyseek": ModelConfig(
        vocab_size=384, hidden_size=256, num_hidden_layers=5, intermediate_size=768, moe_intermediate_size=128,
        first_k_dense_replace=1, num_attention_heads=4, q_lora_rank=128, n_routed_experts=16, num_experts_per_tok=4,
        n_group=4, topk_group=2, max_position_embeddings=4096, bos_token_id=256, eos_token_id=257,
        rope=RopeConfig(factor=4.0, original_max_position_embeddings=1024, mscale=1.0, mscale_all_dim=1.0),
    ),
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """A named configuration: 'deepseek-v3' or 'tinyseek'."""
    _require(name in PRESETS, f"preset {name!r} is unknown: legal are {', '.join(map(repr, PRESETS))}")
    return PRESETS[name]
