"""What the exchanges are held against, measured in the same run: kernels/floor.cu, and what two event nodes take.

flag         a block sends a flag to all other ranks and waits for theirs: t0 of the bound; us in a graph
empty        132 blocks of 512 threads that do nothing; us in a graph
event nodes  two in a row in a graph: what `half_samples` has in every sample, over its calls
stores       GB/s into the next rank's memory by so many blocks, all ranks at once
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.bench.alltoall_timer import Ranks, empty_samples, pair_samples
from moelab.bench.timer import BenchError, Samples
from moelab.comm import library

BACKEND = "floor"
WINDOW_BYTES = 128  # of a flag
STORE_BYTES = 64 << 20
STORE_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 132)
WAIT_NS = 10_000_000_000
CALLS = 32


@dataclass(frozen=True)
class Reading:
    metric: str
    unit: str
    params: dict[str, int]
    samples: Samples


def measure(rank: int, size: int, device: torch.device, ranks: Ranks, nvshmem: bool) -> Iterator[Reading]:
    """Collective. `nvshmem`: take the windows from torch's NVSHMEM, since it cannot change its mind later."""
    functions = ranks.attempt(_functions)
    flags, flag_at = ranks.attempt(lambda: _shared(size * WINDOW_BYTES, device, nvshmem))
    _, store_at = ranks.attempt(lambda: _shared(STORE_BYTES, device, nvshmem))
    windows = torch.tensor(flag_at, dtype=torch.int64, device=device)
    state = torch.zeros(2, dtype=torch.int64, device=device)
    ranks.align()

    def flag() -> None:
        _check(functions.moelab_floor_flag(
            windows.data_ptr(), rank, size, state.data_ptr(), WAIT_NS, torch.cuda.current_stream().cuda_stream
        ))  # fmt: skip

    def empty() -> None:
        _check(functions.moelab_floor_empty(132, 512, torch.cuda.current_stream().cuda_stream))

    for metric, call, params in (("flag", flag, {"ranks": size}), ("empty", empty, {"blocks": 132, "threads": 512})):
        samples = pair_samples(call, 10.0, ranks)
        if peer := ranks.first(f"no flag of rank {int(state[1]) - 1} came in time" if state[1] else None):
            raise BenchError(peer)
        yield Reading(metric, "us", params, samples)
    yield Reading("event nodes", "us", {}, empty_samples(ranks))

    target = store_at[(rank + 1) % size]
    for blocks in STORE_BLOCKS:

        def stores(blocks: int = blocks) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            _check(functions.moelab_floor_stores(target, STORE_BYTES, blocks, stream))

        samples = pair_samples(stores, STORE_BYTES / 300e3, ranks)
        rates = Samples([STORE_BYTES / us / 1e3 for us in samples.us], samples.warmup)
        yield Reading("stores", "GB/s", {"blocks": blocks, "bytes": STORE_BYTES}, rates)
    del flags


def _functions() -> ctypes.CDLL:
    functions = ctypes.CDLL(str(library.load().path))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    functions.moelab_floor_flag.argtypes = (pointer, number, number, pointer, ctypes.c_uint64, pointer)
    functions.moelab_floor_empty.argtypes = (number, number, pointer)
    functions.moelab_floor_stores.argtypes = (pointer, ctypes.c_int64, number, pointer)
    return functions


def _shared(size: int, device: torch.device, nvshmem: bool) -> tuple[Tensor, list[int]]:
    """Zeros that every rank has mapped, and where each rank's are. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    if nvshmem and symm_mem.get_backend(device) != "NVSHMEM":
        symm_mem.set_backend("NVSHMEM")
    tensor = symm_mem.empty(size, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    tensor.zero_()
    pointers = list(handle.buffer_ptrs)
    if not all(pointers):
        raise BenchError("a rank's memory is not mapped here: the floor is of ranks that share NVLink")
    return tensor, pointers


def _check(status: int) -> None:
    if status:
        raise BenchError(f"launching a kernel of the floor: CUDA error {status}")
