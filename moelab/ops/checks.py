"""Arguments of ops, checked on the host: dtype, shape, strides, device. Nothing here reads a tensor's values."""

from __future__ import annotations

from torch import Tensor, dtype

from moelab.config import MoelabError


class OpError(MoelabError, ValueError):
    """An argument an op does not take; names it, its value and what is accepted."""


def require(ok: bool, name: str, value: object, accepted: str) -> None:
    if not ok:
        raise OpError(f"{name} is {value}: accepted: {accepted}")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | str, ...], dtypes: tuple[dtype, ...], like: Tensor | None = None
) -> None:
    """`shape`: a number is that size, text a free size under its name. `like`: whose device it must share.

    The last dimension must be contiguous; other strides are free."""
    require(isinstance(tensor, Tensor), name, f"a {type(tensor).__name__}", "a tensor")
    legal = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    require(tensor.dtype in dtypes, f"{name}'s dtype", str(tensor.dtype).removeprefix("torch."), legal)
    wanted = f"[{', '.join(map(str, shape))}]"
    fits = tensor.dim() == len(shape) and all(
        isinstance(w, str) or w == n for w, n in zip(shape, tensor.shape, strict=True)
    )
    require(fits, f"{name}'s shape", list(tensor.shape), wanted)
    contiguous = tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    require(contiguous, f"{name}'s strides", tensor.stride(), "a last stride of 1; call .contiguous()")
    if like is not None:
        require(tensor.device == like.device, f"{name}'s device", tensor.device, f"{like.device}, where the others are")
