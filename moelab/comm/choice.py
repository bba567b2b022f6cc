"""What to give `AllToAll` as its group where nobody has a wish."""

from __future__ import annotations

import torch

from moelab.comm import build
from moelab.comm.library import load
from moelab.comm.nvshmem import Nvshmem, unavailable_nvshmem
from moelab.comm.virtual import VirtualRank, VirtualRanks


def default_group(ep: int, device: torch.device | str) -> Nvshmem | VirtualRank | None:
    """For `ep` ranks, each on a `device` of this kind: on GPUs our kernels where they can run, with the fastest way to
    send results home, else torch.distributed's world (None). One rank alone needs no other process.

    The kernels are built if they are not yet, which takes minutes; `moelab kernels build` does it ahead.
    """
    on_gpu = torch.device(device).type == "cuda"
    if ep > 1:
        return Nvshmem(returns="bf16") if on_gpu and unavailable_nvshmem() is None else None
    return VirtualRanks(1, load() if on_gpu and build.unavailable() is None else None).rank(0)
