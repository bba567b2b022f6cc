"""The one reduction inside a DP group: partial attention outputs of its TP ranks, summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moelab.config import ConfigError, ParallelConfig


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks that share one DP group's attention. `group` None is a group of one, which has nothing to sum."""

    group: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, parallel: ParallelConfig, rank: int) -> TensorParallelGroup:
        """Collective over the ranks of `rank`'s DP group, for which torch.distributed must be running if tp > 1."""
        if parallel.tp == 1:
            return cls()
        if not dist.is_initialized():
            raise ConfigError(
                f"tp is {parallel.tp}, torch.distributed is not running: start the ranks by torchrun, or take tp 1"
            )
        ranks = list(parallel.group_ranks(parallel.dp_group(rank)))
        return cls(dist.new_group(ranks, use_local_synchronization=True))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the group: collective, same shape everywhere. Every rank gets the same bits."""
        if self.group is None or x.numel() == 0:
            return x
        if x.is_cuda and dist.get_backend(self.group) == "gloo":
            staged = x.cpu()
            dist.all_reduce(staged, group=self.group)
            return staged.to(x.device)
        dist.all_reduce(x, group=self.group)
        return x
