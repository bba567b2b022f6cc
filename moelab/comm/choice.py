"""What to give `AllToAll` as its group where nobody has a wish."""

from __future__ import annotations

import torch

from moelab.comm import build
from moelab.comm.library import load
from moelab.comm.nvshmem import Nvshmem, unavailable_nvshmem
from moelab.comm.virtual import VirtualRank, VirtualRanks
from moelab.config import ConfigError


def default_group(ep: int, device: torch.device | str, num_sms: int = 0) -> Nvshmem | VirtualRank | None:
    """For `ep` ranks, each on a `device` of this kind: on GPUs our kernels where they can run, with the fastest way to
    send results home, else torch.distributed's world (None). One rank alone needs no other process.

    `num_sms`: multiprocessors that a launch of the exchange takes at most, by having so many blocks; 0: the library's
    choice, which may fill the GPU. Ranks may differ in it: how many blocks a peer has is nowhere in what it sends.
    Raises ConfigError for a number below 0, and for any other than 0 where the exchange is not our kernels'.

    The kernels are built if they are not yet, which takes minutes; `moelab kernels build` does it ahead.
    """
    on_gpu = torch.device(device).type == "cuda"
    why = "ranks on a CPU have none" if not on_gpu else unavailable_nvshmem() if ep > 1 else build.unavailable()
    if num_sms and why is not None:
        raise ConfigError(f"num_sms is {num_sms}, which only our kernels on GPUs can keep to: {why}; or give 0")
    if ep > 1:
        return Nvshmem(returns="bf16", num_blocks=num_sms) if why is None else None
    alone = VirtualRanks(1, load() if why is None else None).rank(0)
    return Nvshmem(alone, num_blocks=num_sms) if num_sms else alone
