"""Arguments of the halves, checked before anything is sent: a wrong one must not leave the peers waiting for half of
it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moelab.comm.errors import InputError
from moelab.comm.layout import is_power_of_two
from moelab.comm.spec import ExchangeSpec

if TYPE_CHECKING:
    from moelab.comm.backend import Backend


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(name: str, t: Tensor, shape: tuple[int | str, ...], dtypes: tuple[torch.dtype, ...], device) -> None:
    """`shape` entries that are text are free."""
    if isinstance(t, Tensor) and t.dtype in dtypes and t.device == device:
        size = t.shape
        if size == shape or (shape[0] == "T" and size[1:] == shape[1:]):
            return  # what nearly always is so, and cheaply said
    if not isinstance(t, Tensor):
        raise InputError(f"{name} is a {type(t).__name__}: give a tensor")
    fits = t.dim() == len(shape) and all(isinstance(n, str) or n == m for n, m in zip(shape, t.shape, strict=True))
    if not fits:
        raise InputError(f"{name} has shape {list(t.shape)}: expected [{', '.join(map(str, shape))}]")
    if t.dtype not in dtypes:
        raise InputError(f"{name} is {_name(t.dtype)}: legal are {', '.join(map(_name, dtypes))}; convert it first")
    if t.device != device:
        raise InputError(
            f"{name} is on {t.device}: this AllToAll works on {device}; move it, or construct with device="
        )


def quantizes(spec: ExchangeSpec, x: Tensor, scales: Tensor | None) -> bool:
    """Whether dispatch_send is given values in bfloat16 that travel as FP8."""
    return spec.payload == "fp8" and scales is None and getattr(x, "dtype", None) is torch.bfloat16


def check_dispatch(
    spec: ExchangeSpec,
    backend: Backend,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    scales: Tensor | None,
    num_tokens: Tensor | None,
) -> None:
    """Raise `InputError` for arguments of dispatch_send; values of device tensors only where the backend may read
    them."""
    device = backend.device
    x_dtype = torch.bfloat16 if quantizes(spec, x, scales) else spec.payload_dtype
    _check("x", x, ("T", spec.hidden), (x_dtype,), device)
    tokens = x.shape[0]
    if tokens > spec.max_tokens:
        raise InputError(
            f"x has {tokens} tokens: max_tokens is {spec.max_tokens} for every rank; construct with a larger "
            "one (the batch times 1 + draft tokens)"
        )
    _check("topk_ids", topk_ids, (tokens, spec.top_k), (torch.int32, torch.int64), device)
    _check("topk_weights", topk_weights, (tokens, spec.top_k), (torch.float32,), device)
    if spec.payload == "fp8" and x_dtype is spec.payload_dtype:
        if scales is None:
            raise InputError(
                f"scales is None: an fp8 payload needs float32 [{tokens}, {spec.num_scales}]; or pass x in bfloat16, "
                "which is quantised as it is sent"
            )
        _check("scales", scales, (tokens, spec.num_scales), (torch.float32,), device)
    elif scales is not None:
        raise InputError(f"scales given with a {spec.payload} payload: leave it None, or construct with payload='fp8'")
    if num_tokens is not None:
        if not isinstance(num_tokens, Tensor) or num_tokens.numel() != 1 or num_tokens.dtype != torch.int32:
            raise InputError(f"num_tokens is {num_tokens!r}: give an int32 tensor with one element on {device}")
        if num_tokens.device != device:
            raise InputError(f"num_tokens is on {num_tokens.device}: this AllToAll works on {device}")
    if backend.reads_values:
        _check_values(spec, tokens, topk_ids, scales, num_tokens)


def _check_values(
    spec: ExchangeSpec, tokens: int, topk_ids: Tensor, scales: Tensor | None, num_tokens: Tensor | None
) -> None:
    if num_tokens is not None:
        n = int(num_tokens)
        if not 0 <= n <= tokens:
            raise InputError(f"num_tokens is {n}: legal are 0…{tokens}, the rows of x")
        tokens = n
    topk_ids = topk_ids[:tokens]  # what lies beyond num_tokens counts for nothing
    bad = (topk_ids < -1) | (topk_ids >= spec.num_experts)
    if bad.any():
        token, k = bad.nonzero()[0].tolist()
        raise InputError(
            f"topk_ids[{token}, {k}] is {int(topk_ids[token, k])}: legal are 0…{spec.num_experts - 1}, "
            "and -1 for nowhere"
        )
    if scales is not None and spec.scales == "ue8m0":
        bad = ~is_power_of_two(scales[:tokens])
        if bad.any():
            token, block = bad.nonzero()[0].tolist()
            raise InputError(
                f"scales[{token}, {block}] is {float(scales[token, block])!r}: UE8M0 holds only powers of "
                "two from 2^-126 to 2^127; quantise with such scales, or construct with scales='column_tma'"
            )


def check_y(spec: ExchangeSpec, backend: Backend, y: Tensor) -> None:
    """Raise `InputError` for the argument of combine_send."""
    _check("y", y, spec.rows_shape, (spec.output_dtype,), backend.device)


def check_out(backend: Backend, shape: torch.Size, out: Tensor) -> None:
    """Raise `InputError` for the argument of combine_recv."""
    _check("out", out, tuple(shape), (torch.float32, torch.bfloat16, torch.float16), backend.device)
