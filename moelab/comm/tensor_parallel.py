"""The one reduction inside a DP group: partial attention outputs of its TP ranks, summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks that share one DP group's attention. `group` None is a group of one, which has nothing to sum."""

    group: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, dp: int, tp: int, rank: int) -> TensorParallelGroup:
        """Collective over the default group: every rank makes all `dp` groups and keeps its own."""
        if tp == 1:
            return cls()
        groups = [dist.new_group(list(range(g * tp, (g + 1) * tp))) for g in range(dp)]
        return cls(groups[rank // tp])

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
