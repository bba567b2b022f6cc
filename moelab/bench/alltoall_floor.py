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
from torch.multiprocessing import reductions

from moelab.bench.alltoall_timer import Ranks, empty_samples, pair_samples
from moelab.bench.timer import BenchError, Samples
from moelab.comm import library

BACKEND = "floor"
WINDOW_BYTES = 128  # of a flag
STORE_BYTES = 64 << 20
STORE_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 132)
WAIT_NS = 10_000_000_000
STORAGE_DEVICE = 6  # of the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor


@dataclass(frozen=True)
class Reading:
    metric: str
    unit: str
    params: dict[str, int]
    samples: Samples


def measure(rank: int, size: int, device: torch.device, ranks: Ranks) -> Iterator[Reading]:
    """Collective, over ranks of one node. Raises BenchError or Failed on all ranks."""
    functions = ranks.attempt(_functions)
    flags, flag_at = ranks.attempt(lambda: _shared(size * WINDOW_BYTES, device))
    targets, store_at = ranks.attempt(lambda: _shared(STORE_BYTES, device))
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
    ranks.align()  # nobody unmaps what a peer still writes to
    del flags, targets


def _functions() -> ctypes.CDLL:
    functions = ctypes.CDLL(str(library.load().path))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    functions.moelab_floor_flag.argtypes = (pointer, number, number, pointer, ctypes.c_uint64, pointer)
    functions.moelab_floor_empty.argtypes = (number, number, pointer)
    functions.moelab_floor_stores.argtypes = (pointer, ctypes.c_int64, number, pointer)
    return functions


def _shared(size: int, device: torch.device) -> tuple[list[Tensor], list[int]]:
    """Zeros on every rank, all of them mapped here by CUDA's IPC, and where they are. Collective."""
    mine = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    shared: list = [None] * dist.get_world_size()
    dist.all_gather_object(shared, reductions.reduce_tensor(mine))
    tensors = []
    for peer, (rebuild, arguments) in enumerate(shared):
        here = list(arguments)
        here[STORAGE_DEVICE] = device.index  # mapped on our GPU, not on the one where it lies
        tensors.append(mine if peer == dist.get_rank() else rebuild(*here))
    return tensors, [tensor.data_ptr() for tensor in tensors]


def _check(status: int) -> None:
    if status:
        raise BenchError(f"launching a kernel of the floor: CUDA error {status}")
