"""How many multiprocessors (SMs) our kernels take: all of a device, or fewer, so that an exchange beside them has some.

    with at_most(112, device):
        engine = Engine(…)      # what is made, captured or launched in here takes 112

The budget holds in its block and in the thread that entered it, and nowhere else: nothing has to be set back. Whoever
launches reads it at the launch. Two things read it once and keep what they read: a captured graph its grids, and
`TritonDecode` the number of groups that its plans and buffers are made for. Later budgets do not reach them.

Who follows it: kernels that share their work among a fixed number of programs (grouped GEMM, BMM on Hopper, SiLU·mul,
our MLA) and DeepGEMM, which wants an even number and gets the next lower one, but at least 2. Our MLA takes at least
one program for each tile of query rows, SiLU·mul one for each expert, BMM one for each head. The linear kernel on
Hopper lets parts of a tile wait for one another only where all have a multiprocessor of the budget. Who does not: a
kernel whose grid follows from shapes alone (linear, norm, quantise, router, gather, rope), torch's own kernels, and
FlashInfer's MLA, whose plan counts the device's multiprocessors by itself and takes no number.

Results: rows that are handed out one by one come out the same, bit for bit, under any budget. Where the number of
programs decides how a sum is cut (grouped GEMM with a rest of tiles, MLA), float32 sums are added in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from moelab.config import ConfigError

_budget: ContextVar[int | None] = ContextVar("moelab multiprocessors", default=None)


@contextmanager
def at_most(count: int | None, device: torch.device | str) -> Iterator[None]:
    """Within: kernels of ours on `device` take `count` multiprocessors. None or 0: what held before. Blocks nest, the
    inner one counts. Raises ConfigError for a number that `device` has not; a CPU, where kernels are interpreted one
    program after another, takes any from 1 on."""
    if not count:
        yield
        return
    check(count, device)
    token = _budget.set(count)
    try:
        yield
    finally:
        _budget.reset(token)


def check(count: int, device: torch.device | str, name: str = "compute_sms") -> None:
    """Raise ConfigError, under this name, for a budget that `device` has not."""
    device = torch.device(device)
    most = all_of(device) if device.type == "cuda" else None
    if count < 1 or (most is not None and count > most):
        limit = f"1…{most}, what {device} has" if most else "1 or more"
        raise ConfigError(f"{name} is {count}: legal are {limit}; leave it out for all")


def budget() -> int | None:
    """What `at_most` holds here; None: all."""
    return _budget.get()


def all_of(device: torch.device) -> int:
    """Of a GPU, whatever the budget."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def count(device: torch.device) -> int:
    """That kernels on this GPU may take."""
    return min(all_of(device), _budget.get() or all_of(device))


def num_programs(device: torch.device, per_sm: int, interpreted: int) -> int:
    """Of a launch that shares its work among `per_sm` programs on each multiprocessor it may take. On a CPU, where they
    run one after another, `interpreted`, or what the budget allows if that is fewer."""
    if device.type == "cuda":
        return per_sm * count(device)
    return min(interpreted, per_sm * (_budget.get() or interpreted))
