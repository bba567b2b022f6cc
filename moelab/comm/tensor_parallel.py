"""The one reduction inside a DP group: partial attention outputs of its TP ranks, summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moelab.comm.dense import Dense
from moelab.comm.errors import CommError
from moelab.comm.nvshmem import Nvshmem
from moelab.config import ParallelConfig


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks that share one DP group's attention. `group` None is a group of one, which has nothing to sum."""

    group: dist.ProcessGroup | dist.ProcessGroupGloo | None = None
    on_host: bool = False  # gloo sums in host memory

    @classmethod
    def create(cls, parallel: ParallelConfig, rank: int, group: object) -> TensorParallelGroup:
        """Collective over `group`, what the exchange was given, which holds all `parallel.ep` ranks. If tp > 1 it is a
        torch.distributed group, or has one."""
        if parallel.tp == 1:
            return cls()
        if isinstance(group, Dense | Nvshmem):
            group = group.group or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise CommError(
                f"tp is {parallel.tp}, which needs ranks in torch.distributed: start them by torchrun, or take tp 1"
            )
        mine = parallel.dp_group(rank)
        if "nccl" in str(dist.get_backend_config(group)):
            groups = [dist.new_group(list(parallel.group_ranks(g))) for g in range(parallel.dp)]
            return cls(groups[mine])
        # Built on the group's own store, like the exchanges: `dist.new_group` is collective over the whole world.
        store = group.get_group_store()
        number = store.add(f"moelab/tensor_parallel/{rank}", 1)
        store = dist.PrefixStore(f"moelab/tensor_parallel/{number}/{mine}", store)
        return cls(dist.ProcessGroupGloo(store, parallel.tp_rank(rank), parallel.tp), on_host=True)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the group: collective, same shape everywhere. Every rank gets the same bits."""
        if self.group is None or x.numel() == 0:
            return x
        total = x.cpu() if self.on_host else x
        self.group.allreduce([total]).wait()
        return total.to(x.device)
