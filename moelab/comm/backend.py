"""`Backend`: what moves an exchange. `AllToAll` checks the arguments and the order of calls; a backend trusts it.

A backend implements the four halves as a whole, from tensors as the caller gives them to tensors as the caller gets
them. The torch and virtual backends share one implementation over a `Wire` (packed.py); kernels that write straight
into a peer's memory replace packing, moving and unpacking together.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.comm.dense import Dense, DenseWire
from moelab.comm.device_exchange import DeviceBackend
from moelab.comm.errors import CommError
from moelab.comm.nvshmem import Nvshmem, NvshmemSite, unavailable_nvshmem
from moelab.comm.packed import PackedBackend
from moelab.comm.spec import ExchangeSpec
from moelab.comm.stand_in import StandIn
from moelab.comm.torch_wire import GlooWire, NcclWire, unavailable_gloo, unavailable_nccl
from moelab.comm.virtual import VirtualRank, VirtualWire
from moelab.comm.virtual_kernels import VirtualSite
from moelab.config import ConfigError


class Exchange(Protocol):
    """What a backend remembers of one exchange in flight; made by `dispatch_send`, handed to the other halves."""

    all_idle: bool | None  # known once dispatch_recv is through; reading it may wait for a device
    idle: Tensor | bool | None  # the same, where it is known
    starts: Tensor | None  # [L] int32, first row of each expert when contiguous; known likewise


class Backend(Protocol):
    """The four halves, and the fused forms for when nothing runs in between. Each may raise `ExchangeTimeout`, after
    which only `abandon` and `close(failed=True)` are called."""

    name: str
    rank: int
    device: torch.device
    reads_values: bool  # whether the host may read ids, counts and scales, so that AllToAll checks their values
    sent_bytes: int

    def dispatch_send(
        self,
        number: int,
        slot: int,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        scales: Tensor | None,
        num_tokens: Tensor | None,
        has_work: bool,
    ) -> Exchange: ...

    def dispatch_recv(self, exchange: Exchange) -> tuple[Tensor, Tensor | None, Tensor]: ...

    def combine_send(self, exchange: Exchange, y: Tensor) -> None: ...

    def combine_recv(self, exchange: Exchange, out: Tensor) -> Tensor: ...

    def dispatch(self, *arguments) -> tuple[Exchange, tuple[Tensor, Tensor | None, Tensor]]:
        """With the arguments of dispatch_send."""

    def combine(self, exchange: Exchange, y: Tensor, out: Tensor) -> Tensor: ...

    def check(self, wait: bool) -> None:
        """Raise what a device has reported, `InputError` or `ExchangeTimeout`; with `wait`, once all of it has run."""

    def agree(self, settings: str) -> None:
        """Collective: raise `ConfigError` unless every rank gives the same settings, a JSON object; or `WireError`."""

    def abandon(self) -> None:
        """A half has failed: leave at once and wait for nobody, so that the peers learn of it. `close` follows."""

    def close(self, failed: bool) -> None: ...


def open_backend(
    group: dist.ProcessGroup | Dense | Nvshmem | VirtualRank | StandIn | None,
    spec: ExchangeSpec,
    device: torch.device | None,
    timeout_s: float,
) -> Backend:
    """The backend that `group` calls for. Collective. Raises `CommError` with the reason if it cannot run."""
    if isinstance(group, StandIn):
        return group.open(spec, device)
    ranks = group.group if isinstance(group, Dense | Nvshmem) else group
    if isinstance(ranks, VirtualRank):
        _check_size(ranks.world.size, spec)
        if isinstance(group, Dense) or (isinstance(group, Nvshmem) and ranks.world.library is None):
            raise ConfigError(
                f"{type(group).__name__} over virtual ranks: give {type(group).__name__} a process group, or make the "
                "ranks with kernels, VirtualRanks(ep, library)"
            )
        if ranks.world.library is None:
            return PackedBackend(spec, VirtualWire(ranks, spec), device or torch.device("cpu"), timeout_s)
        options = group if isinstance(group, Nvshmem) else Nvshmem()
        device = device or (_current_gpu() if torch.cuda.is_available() else torch.device("cpu"))
        return DeviceBackend(spec, VirtualSite(options, ranks, spec, device, timeout_s), device, timeout_s)
    if ranks is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise CommError(
                "group is None but torch.distributed is not initialised: "
                f"{unavailable_gloo() or 'call init_process_group first'}, or pass VirtualRanks(ep).rank(i)"
            )
        ranks = dist.group.WORLD
    if not isinstance(ranks, dist.ProcessGroup):
        raise ConfigError(
            f"group is a {type(ranks).__name__}: legal are a torch.distributed process group, None for the "
            "world, Nvshmem(), VirtualRanks(ep).rank(i) and StandIn()"
        )
    _check_size(ranks.size(), spec)
    if isinstance(group, Nvshmem):
        device = device or _current_gpu()
        if device.type != "cuda":
            raise ConfigError(f"device is {device}: nvshmem works on GPUs; take gloo on the CPU")
        return DeviceBackend(spec, NvshmemSite(group, ranks, spec, device, timeout_s), device, timeout_s)
    backends = str(dist.get_backend_config(ranks))
    if device is None:
        # A group made for both serves the CPU unless a device is asked for, as several ranks may share a GPU.
        on_gpu = "nccl" in backends and "gloo" not in backends
        device = _current_gpu() if on_gpu else torch.device("cpu")
    if isinstance(group, Dense):
        wire = DenseWire(ranks, group.padded, spec, device, timeout_s)
    elif device.type == "cuda" and "nccl" in backends:
        wire = NcclWire(ranks, spec, device, timeout_s)
    else:
        wire = GlooWire(ranks, spec, device, timeout_s)
    return PackedBackend(spec, wire, device, timeout_s)


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _check_size(size: int, spec: ExchangeSpec) -> None:
    if size != spec.parallel.ep:
        raise ConfigError(
            f"group has {size} ranks but ep = dp·tp is {spec.parallel.ep}: start that many ranks, or pass "
            "their sub-group"
        )


def available() -> dict[str, str]:
    """{backend: "ok", or why it cannot run and what to do}. Touches no group and starts nothing."""
    return {
        "torch-gloo": unavailable_gloo() or "ok",
        "torch-nccl": unavailable_nccl() or "ok",
        "virtual": "ok",
        "nvshmem": unavailable_nvshmem() or "ok",
    }
