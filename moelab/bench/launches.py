"""How many launches a step makes: what a CUDA graph turns into one.

`num_stages` counts the stages that a step walks, one kernel's worth of work each; `launches` what a call really does.

On a GPU that is what `torch.profiler` sees in the device's queue: kernels, copies and fills, whoever launched them. The
CPU has no queue; there it is the operations that torch dispatches, without views and allocations, which would launch
nothing on a GPU either. The two are different counts: a kernel of ours is one launch and its reference many operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moelab.config import ModelConfig
from moelab.stages import DENSE_LAYER, SCHEDULES

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def num_stages(config: ModelConfig, overlap: str, tp: int = 1) -> int:
    """In all layers of a step; without TP nothing is reduced."""
    dense = config.num_hidden_layers - config.num_moe_layers
    walked = [*DENSE_LAYER * dense, *(launch.stage for launch in SCHEDULES[overlap](config.num_moe_layers))]
    return sum(tp > 1 or stage.name != "tp_reduce" for stage in walked)


def launches(call: Callable[[], object], device: torch.device, begin: Callable[[], object] = lambda: None) -> int:
    """Of one call, which has run before. `begin` comes first and is not counted: ranks that meet in the call wait for
    each other there, once the profiler, which takes its time, is up. 0 where a profiler is not let see the device."""
    if device.type == "cuda":
        return _on_device(call, device, begin)
    begin()
    with Counter() as counter:
        call()
    return counter.count


class Counter(TorchDispatchMode):
    """What torch dispatches while it is entered, by the CPU's rule above."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = [out.alias_info for out in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        self.count += not view and func.overloadpacket.__name__ not in ALLOCATIONS
        return func(*args, **(kwargs or {}))


def _on_device(call: Callable[[], object], device: torch.device, begin: Callable[[], object]) -> int:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        begin()
        call()
        torch.cuda.synchronize(device)
    return sum(event.device_type == DeviceType.CUDA for event in seen.events())
