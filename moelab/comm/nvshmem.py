"""Ranks as processes over NVSHMEM: `Nvshmem`, what to pass as `AllToAll(group=…)`, and where its memory comes from.

    a2a = AllToAll(parallel, 256, 8, 7168, 128, "fp8", group=Nvshmem())

Each rank owns a *window* in NVSHMEM's symmetric heap. Where a peer's window can be mapped (NVLink, or the same GPU),
kernels store straight into it; where it cannot, they put to it over whatever transport NVSHMEM has. How the kernels say
that data has come is chosen once for all ranks: packets when everybody is mapped and tokens are few, flags when they
are many, NVSHMEM's signals as soon as somebody is not mapped.

**NVSHMEM is started once in a process, for one set of ranks, and stays**: its finalize waits for all ranks without a
limit. Every `AllToAll` has a window of its own, which `close` gives back to the heap.

**What ranks have to say to each other outside of an exchange** (that they are there, that a library is missing, that
memory is ready, that they are through) goes through the process group's store, where every wait has a limit: NVSHMEM's
own barriers have none. So a rank that cannot take part is told to all before anybody enters NVSHMEM; and where a peer
does not come to `close`, the window is left alone, with a warning, since giving it back needs everybody.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.comm import build
from moelab.comm.device_exchange import COMBINE, DISPATCH, FUSED, RECV, RETURNS, SEND, make_shape
from moelab.comm.errors import CommError, WireError
from moelab.comm.library import UID_BYTES, Call, Library, load
from moelab.comm.roll_call import meet
from moelab.comm.spec import ExchangeSpec
from moelab.comm.virtual import VirtualRank
from moelab.config import ConfigError, MoelabError
from moelab.ops.early_launch import launches_early

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Nvshmem:
    """Ask `AllToAll` for the kernels, over the ranks of `group`: a torch.distributed process group (None: the world),
    or `VirtualRanks(ep, library).rank(i)`.

    - `returns`: what an expert's rank sends home. "rows": each row; the sum is the same bit for bit as with every other
      backend. "f32": one sum for each token, in float32; other brackets, at most 1 ulp of the outputs apart, and the
      bytes of two rows. "bf16": that sum rounded to bfloat16, so rounded twice, within 8·2⁻⁸ of the sum of magnitudes;
      the bytes of one row, which is what the fastest other libraries send.
    - `num_blocks`: blocks of a launch, of which an SM holds a few: the knob that leaves SMs to others. 0: the library's
      choice, which may fill the GPU. Blocks that wait for a peer stay where they are, so halves that run on two streams
      at once must leave room for one another: give both at most half.
    - `send_blocks`: of a fused launch over flags, how many blocks only send while the others only receive; 0: each does
      both, one after the other.
    - `packets`: False takes flags for few tokens too. By packets, sixteen bytes of ones, which are NaN in every format,
      arrive with the sign of the last value turned; all else arrives as it was sent.
    - `puts_to`: ranks to which this rank puts by NVSHMEM although it could map them, and they to it, to try that path;
      one of the two has to ask.
    """

    group: dist.ProcessGroup | VirtualRank | None = None
    returns: str = "rows"
    num_blocks: int = 0
    send_blocks: int = 0
    packets: bool = True
    puts_to: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.returns not in RETURNS:
            raise ConfigError(f"returns is {self.returns!r}: legal are {', '.join(map(repr, RETURNS))}")
        for name in ("num_blocks", "send_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: give 0 for the library's choice, or a number of blocks"
                )


class NvshmemSite:
    """A rank's window in NVSHMEM's heap. Constructing and closing it are collective over `group`."""

    name = "nvshmem"

    def __init__(
        self, options: Nvshmem, group: dist.ProcessGroup, spec: ExchangeSpec, device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.send_blocks, self._blocks = options.send_blocks, options.num_blocks
        if any(not 0 <= peer < self.size or peer == self.rank for peer in options.puts_to):
            raise ConfigError(
                f"puts_to is {options.puts_to} on rank {self.rank}: legal are the other ranks of {self.size}"
            )
        self._roll = meet(group, spec, timeout_s)
        self._device, self._on_device = device, torch.cuda.device(device)
        deadline = time.monotonic() + timeout_s
        with self._on_device:
            self._library, one_host = self._meet(options, group, deadline)
            _, most_bytes, _ = make_shape(spec, self._library, options.returns, all_mapped=False)
            heap = _start(self, group, self._library, device, settings(one_host, 2 * most_bytes), deadline)
            mapped = [peer not in options.puts_to and heap.mapped[peer] for peer in range(self.size)]
            # What a notice looks like depends on how it comes, so two ranks put to each other or neither does.
            theirs = [json.loads(text) for text in self._roll.gather("mapped", json.dumps(mapped), deadline)]
            mapped = [ok and theirs[peer][self.rank] for peer, ok in enumerate(mapped)]
            self.shape, window_bytes, state_bytes = make_shape(
                spec, self._library, options.returns, all(map(all, theirs)), options.packets
            )
            self._check_blocks(spec)
            self.window = heap.allocate(window_bytes)
            failed = [r for r, at in enumerate(self._roll.gather("window", str(self.window), deadline)) if at == "0"]
            if failed:
                raise CommError(
                    f"no {window_bytes / 2**20:.0f} MiB for a window on ranks {failed}: take fewer max_tokens or "
                    "slots, or set NVSHMEM_SYMMETRIC_SIZE higher"
                )
            _as_tensor(self.window, window_bytes, device).zero_()
            self._state = torch.zeros(state_bytes, dtype=torch.uint8, device=device)
            # A peer that is put to has no address here; nor has one that NVSHMEM could not map.
            addresses = [heap.address(self.window, peer) if ok else 0 for peer, ok in enumerate(mapped)]
            self._windows = torch.tensor(addresses, dtype=torch.int64, device=device)
            self.windows, self.state = self._windows.data_ptr(), self._state.data_ptr()
            self._early = launches_early(self._state)
            torch.cuda.synchronize(device)  # zeros first, then whatever the peers write
        self._roll.gather("ready", "", deadline)

    def launch(self, number: int, call: Call, what: int, halves: int) -> None:
        index = self._device.index
        if torch.cuda.current_device() != index:
            with self._on_device:
                return self.launch(number, call, what, halves)
        # What torch.cuda.current_stream() asks, without making an object of the answer at every launch.
        stream = torch._C._cuda_getCurrentRawStream(index)
        self._library.launch(self.shape, call, what, halves, blocks=self._blocks, early=self._early, stream=stream)

    def agree(self, settings: str, deadline: float) -> None:
        self._roll.agree(settings, deadline)

    def abandon(self) -> None:
        """Nothing to do: the kernel that gave up has told the peers, or they run into their own limit."""

    def close(self, failed: bool, timeout_s: float) -> None:
        try:
            self._roll.gather("closed", "", time.monotonic() + timeout_s)
        except WireError as error:
            log.warning(
                "rank %d left its window of an exchange in place: rank %s did not come to close it (%s)",
                self.rank, error.peer, error.seen,
            )  # fmt: skip
            return
        with self._on_device:
            _heap.free(self.window)

    def _meet(self, options: Nvshmem, group: dist.ProcessGroup, deadline: float) -> tuple[Library, bool]:
        """Our library, and whether all ranks are on one host; once every rank has all that it needs."""
        library, reason = None, unavailable_nvshmem()
        ranks = dist.get_process_group_ranks(group)
        if reason is None and _heap is not None and _heap.ranks != ranks:
            reason = (
                f"NVSHMEM runs in this process for the ranks {_heap.ranks}, not {ranks}: it serves one set of ranks "
                "in a process; take that group, or start other processes"
            )
        if reason is None and torch.cuda.get_device_capability(self._device) != (9, 0):
            reason = (
                f"{self._device} is not of compute capability 9.0 (Hopper), for which the kernels are: use torch-nccl"
            )
        if reason is None:
            try:
                library = load()
            except MoelabError as error:
                reason = str(error)
        mine = {"reason": reason, "host": _host()}
        found = [json.loads(text) for text in self._roll.gather("options", json.dumps(mine), deadline)]
        for peer, theirs in enumerate(found):
            if theirs["reason"]:
                raise CommError(f"nvshmem cannot run on rank {peer}: {theirs['reason']}")
        self._roll.agree(json.dumps({"returns": options.returns, "packets": options.packets}), deadline)
        return library, len({theirs["host"] for theirs in found}) == 1

    def _check_blocks(self, spec: ExchangeSpec) -> None:
        """That launches which receive fit on the GPU as a whole. Asking also loads every kernel, now and not in the
        middle of a graph, or beside one that already waits."""
        for what in (DISPATCH, COMBINE):
            for halves in (SEND, RECV, FUSED):
                for quantize in {False, spec.payload == "fp8" and what == DISPATCH}:
                    most = self._library.most_blocks(self.shape, what, halves, quantize)
                    if halves != SEND and self._blocks > most:
                        raise ConfigError(f"num_blocks is {self._blocks}: at most {most} run at once on {self._device}")


class _Heap:
    """NVSHMEM, started in this process."""

    def __init__(self, ranks: list[int]) -> None:
        from nvshmem import bindings

        self.ranks, self._bindings = ranks, bindings
        probe = self.allocate(128)  # what is mapped of one allocation is mapped of all
        self.mapped = [self.address(probe, peer) != 0 for peer in range(len(ranks))]

    def allocate(self, size: int) -> int:
        """Collective. An address in the heap, or 0."""
        return self._bindings.malloc(size) or 0

    def free(self, address: int) -> None:
        """Collective, in the same order everywhere."""
        self._bindings.free(address)

    def address(self, ours: int, peer: int) -> int:
        """Where `peer`'s counterpart of our address is mapped here, or 0."""
        return self._bindings.ptr(ours, peer) or 0


_heap: _Heap | None = None  # of the process, because NVSHMEM is


def _start(
    site: NvshmemSite,
    group: dist.ProcessGroup,
    library: Library,
    device: torch.device,
    environment: dict[str, str],
    deadline: float,
) -> _Heap:
    """NVSHMEM for these ranks, started now if it is not yet. Collective.

    It is started twice, by one unique id: the host library, which nvshmem4py speaks to, and then the copy of the device
    half that our own library carries, for which the second start only fills in the state.
    """
    global _heap
    if _heap is not None:
        return _heap
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    import nvshmem.core
    from cuda.core import Device
    from nvshmem import bindings

    torch.cuda.synchronize(device)  # the device has a context, which is the current one
    uid = nvshmem.core.get_unique_id(empty=site.rank != 0)
    if site.rank == 0:
        site._roll.tell("uid", ctypes.string_at(uid.ptr, UID_BYTES))
    raw = site._roll.hear("uid", 0, deadline)
    ctypes.memmove(uid.ptr, raw, UID_BYTES)
    nvshmem.core.init(device=Device(device.index), uid=uid, rank=site.rank, nranks=site.size, initializer_method="uid")
    if bindings.init_status() < 2:  # a failed start is swallowed, and the next call would end the process
        raise CommError(
            f"NVSHMEM did not start on rank {site.rank}: NVSHMEM_DEBUG=INFO says why, moelab doctor what to do"
        )
    library.nvshmem_init(raw, site.rank, site.size)
    seen = torch.full((1,), -1, dtype=torch.int32, device=device)
    library.nvshmem_device_rank(seen.data_ptr(), torch.cuda.current_stream().cuda_stream)
    if seen.item() != site.rank:
        raise CommError(
            f"kernels take rank {site.rank} for {seen.item()}: two copies of NVSHMEM are loaded; see doctor"
        )
    _heap = _Heap(dist.get_process_group_ranks(group))
    return _heap


def settings(one_host: bool, heap_bytes: int) -> dict[str, str]:
    """NVSHMEM's environment variables, for what the user has not set: no multicast, no transport that is not needed,
    and NCCL's choice of interfaces, as torch hands it on. The size matters only where the heap cannot grow (no CUDA
    virtual memory management)."""
    found = {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_SYMMETRIC_SIZE": str(max(1 << 30, heap_bytes))}
    if one_host:
        found["NVSHMEM_REMOTE_TRANSPORT"] = "none"
    for ours, nccl in (
        ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NVSHMEM_HCA_LIST", "NCCL_IB_HCA"),
        ("NVSHMEM_IB_GID_INDEX", "NCCL_IB_GID_INDEX"),
    ):
        if nccl in os.environ:
            found[ours] = os.environ[nccl]
    return found


def _host() -> str:
    """Names this host: the same for processes that share memory, for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # two containers of a host share it, but not the name
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _as_tensor(address: int, size: int, device: torch.device) -> Tensor:
    """A view of device memory as bytes. Does not own it."""

    class Memory:
        __cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

    return torch.as_tensor(Memory(), device=device)


def unavailable_nvshmem() -> str | None:
    """Why the nvshmem backend cannot be used, or None. Starts nothing and builds nothing."""
    if not sys.platform.startswith("linux"):
        return "NVSHMEM runs on Linux: use torch-gloo here"
    if not dist.is_available():
        return "this torch was built without torch.distributed: install the official wheel"
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    for module, package in (("nvshmem", "nvshmem4py_cu13"), ("cuda.core", "cuda-core")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # the parent package
            found = None
        if found is None:
            return f"{package} is not installed: pip install {package}"
    return build.unavailable()
