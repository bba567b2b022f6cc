"""Triton where it is installed, and which calls go to a kernel.

Importing an op needs no Triton: without it `jit` leaves a kernel a plain function that nobody calls, and the
plain-torch reference serves. With it a kernel takes CUDA tensors. CPU tensors it takes only under Triton's interpreter,
which is chosen by TRITON_INTERPRET=1 in the environment when the kernel's module is first imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this platform
    triton = tl = None

__all__ = ["jit", "runs_on", "tl", "triton"]


def jit(kernel: Callable) -> Any:
    """`triton.jit`, or the function as it is where there is no Triton."""
    return kernel if triton is None else triton.jit(kernel)


def runs_on(kernel: Any, tensor: Tensor) -> bool:
    """Whether `kernel` can take this tensor; the reference takes it otherwise."""
    if triton is None:
        return False
    return tensor.is_cuda or not isinstance(kernel, triton.JITFunction)  # the interpreter has its own class
