"""Reading a Hugging Face checkpoint: each rank maps the files and copies only what it owns.

Names and shapes are those of the hub's DeepSeek-V3. A quantised matrix `p.weight` in float8_e4m3fn comes with
`p.weight_scale_inv`, one float32 for each block of 128 × 128 (ceil-divided). What the configuration implies is checked
against the files before any weight is read: a tensor that is missing, that nobody asked for, or that has another shape
is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from moelab.config import ConfigError, ModelConfig, MoelabError
from moelab.ops.fp8 import BLOCK, dequantize_block, num_blocks
from moelab.ops.quantize import Quantized
from moelab.ops.quantize_blocks import quantize_blocks

ALL = slice(None)


class CheckpointError(MoelabError):
    """A checkpoint whose files do not hold what its configuration says."""


class Source(Protocol):
    """Where a model's weights come from, by the names of a checkpoint (`tensor_shapes`)."""

    config: ModelConfig
    device: torch.device | str

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole unquantised tensor."""

    def linear(self, name: str, rows: slice = ALL, cols: slice = ALL) -> torch.Tensor:
        """The weight [out, in] of a linear layer, or rows or columns of it, in the source's dtype."""

    def quantized(self, name: str, rows: slice = ALL, cols: slice = ALL) -> Quantized:
        """The same in FP8: values [out, in], float32 scales of their blocks [⌈out/128⌉, ⌈in/128⌉]. Slices lie on whole
        blocks."""


class Checkpoint:
    """The tensors of a checkpoint's folder, dequantised to `dtype` as they are read. A `Source`."""

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        self.folder = Path(folder)
        self.config = ModelConfig.from_hf(self.folder)
        self.dtype, self.device = dtype, device
        self._file_of = _tensor_files(self.folder)
        self._open: dict[str, safe_open] = {}
        if self.config.num_nextn_predict_layers and not self._has_mtp():
            # transformers saves no MTP layer: such a checkpoint is whole without it.
            self.config = self.config.replace(num_nextn_predict_layers=0)
        self.shapes = dict(tensor_shapes(self.config))
        self._check_names()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._read(name).to(self.device, dtype or self.dtype)

    def linear(self, name: str, rows: slice = ALL, cols: slice = ALL) -> torch.Tensor:
        """Dequantised if it is stored in FP8; slices of such a weight must lie on whole blocks of 128."""
        if not self._is_quantized(name):
            return self._read(f"{name}.weight", rows, cols).to(self.device, self.dtype)
        return dequantize_block(*self._read_pair(name, rows, cols), self.dtype)

    def quantized(self, name: str, rows: slice = ALL, cols: slice = ALL) -> Quantized:
        """As it is stored, or quantised now if it is stored in another dtype."""
        if self._is_quantized(name):
            return self._read_pair(name, rows, cols)
        for part in (rows, cols):
            _block_slice(name, part)  # raises
        return quantize_blocks(self._read(f"{name}.weight", rows, cols).to(self.device))

    def _is_quantized(self, name: str) -> bool:
        return f"{name}.weight_scale_inv" in self.shapes

    def _read_pair(self, name: str, rows: slice, cols: slice) -> Quantized:
        values = self._read(f"{name}.weight", rows, cols)
        scales = self._read(f"{name}.weight_scale_inv", *(_block_slice(name, part) for part in (rows, cols)))
        return values.to(self.device), scales.to(self.device)

    def _has_mtp(self) -> bool:
        prefix = f"model.layers.{self.config.num_hidden_layers}."
        return any(name.startswith(prefix) for name in self._file_of)

    def _check_names(self) -> None:
        missing = [name for name in self.shapes if name not in self._file_of]
        if missing:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} tensors are missing, the first is {missing[0]} "
                f"{list(self.shapes[missing[0]])}"
            )
        extra = sorted(self._file_of.keys() - self.shapes.keys() - _copies(self.config))
        if extra:
            raise CheckpointError(
                f"{self.folder}: {len(extra)} tensors that the configuration does not know, the first is "
                f"{extra[0]} {self._slice(extra[0]).get_shape()}"
            )

    def _slice(self, name: str):
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = _open(self.folder / file)
        return self._open[file].get_slice(name)

    def _read(self, name: str, rows: slice = ALL, cols: slice = ALL) -> torch.Tensor:
        view, expected = self._slice(name), list(self.shapes[name])
        if view.get_shape() != expected:
            raise CheckpointError(
                f"{self.folder / self._file_of[name]}: {name} has shape {view.get_shape()}, expected {expected}"
            )
        if len(expected) == 1:
            return view[:]
        return view[rows, cols]


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: named in the index, but there is no such file") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None


def _block_slice(name: str, part: slice) -> slice:
    if part == ALL:
        return part
    if part.start % BLOCK or part.stop % BLOCK:
        raise ConfigError(f"{name}: cut at {part.start}…{part.stop}; an FP8 weight is cut at multiples of {BLOCK}")
    return slice(part.start // BLOCK, part.stop // BLOCK)


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index, or from the one file where there is no index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"{index}: not an index of safetensors files ({error!r})") from None
    single = folder / "model.safetensors"
    if not single.exists():
        raise CheckpointError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    return dict.fromkeys(_open(single).keys(), single.name)


def _copies(config: ModelConfig) -> set[str]:
    """Tensors that may be there and are not read: the hub stores embedding and head a second time for MTP."""
    prefix = f"model.layers.{config.num_hidden_layers}"
    return {f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"}


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that a checkpoint of this configuration holds, with its shape."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        yield from _layer_shapes(config, layer)
    if config.num_nextn_predict_layers:
        prefix = f"model.layers.{config.num_hidden_layers}"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{prefix}.{name}.weight", (hidden,)
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)


def _layer_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    prefix, hidden, heads = f"model.layers.{layer}", config.hidden_size, config.num_attention_heads
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", (hidden,)
    attention = f"{prefix}.self_attn"
    yield f"{attention}.q_a_layernorm.weight", (config.q_lora_rank,)
    yield f"{attention}.kv_a_layernorm.weight", (config.kv_lora_rank,)
    yield from _linear(config, f"{attention}.q_a_proj", config.q_lora_rank, hidden)
    yield from _linear(config, f"{attention}.q_b_proj", heads * config.qk_head_dim, config.q_lora_rank)
    yield from _linear(config, f"{attention}.kv_a_proj_with_mqa", config.latent_dim, hidden)
    kv_dim = config.qk_nope_head_dim + config.v_head_dim
    yield from _linear(config, f"{attention}.kv_b_proj", heads * kv_dim, config.kv_lora_rank)
    yield from _linear(config, f"{attention}.o_proj", hidden, heads * config.v_head_dim)
    if not config.is_moe(layer):
        yield from _mlp(config, f"{prefix}.mlp", config.intermediate_size)
        return
    yield f"{prefix}.mlp.gate.weight", (config.n_routed_experts, hidden)
    if config.scoring_func == "sigmoid":
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        yield from _mlp(config, f"{prefix}.mlp.experts.{expert}", config.moe_intermediate_size)
    if config.n_shared_experts:
        width = config.moe_intermediate_size * config.n_shared_experts
        yield from _mlp(config, f"{prefix}.mlp.shared_experts", width)


def _mlp(config: ModelConfig, prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _linear(config, f"{prefix}.gate_proj", width, config.hidden_size)
    yield from _linear(config, f"{prefix}.up_proj", width, config.hidden_size)
    yield from _linear(config, f"{prefix}.down_proj", config.hidden_size, width)


def _linear(config: ModelConfig, prefix: str, rows: int, cols: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.weight", (rows, cols)
    if config.weight_block_size is not None:
        yield f"{prefix}.weight_scale_inv", (num_blocks(rows), num_blocks(cols))
