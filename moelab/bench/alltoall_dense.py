"""Peers that move rows which somebody else has packed: collectives of NCCL and of NVSHMEM. All need TP 1.

    nccl-split          all_to_all_single with the exact sizes, which the host is taken to know; nothing is packed or
                        summed: the rows lie in the order in which they go. Less than the job, so a peer at its best
    nccl-split-packed   the same with what it leaves out: rows gathered before it, scattered to the experts' padded
                        layout after it, gathered from there on the way back and summed with their weights
    nccl-padded         all_to_all_single with a worst-case block for each pair of ranks, T·min(K, L) rows: what works
                        without knowing sizes. Nothing is packed or summed
    nvshmem-padded      the same blocks by NVSHMEM's own alltoall on a stream, as torch's symmetric memory calls it
    symm_mem-vdev2d     torch's all_to_all_vdev_2d there and its _offset form back: sizes on the device. It serves 16
                        experts a rank; with more, 16 bundles of neighbours stand for them, and what is inside a bundle
                        would still have to be sorted. Nothing is packed or summed

A row is the token's values and its scales behind them, as one run of bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.bench.alltoall_case import Case, WrongResult, rounded_once, same
from moelab.bench.alltoall_setting import Copies
from moelab.bench.timer import BenchError
from moelab.ops.reduce import reduce_topk


class Packed(ABC):
    """Rows in the order in which they are sent and in which they arrive; what each half of a peer moves.

    `rows` [n, B] uint8 to send, by expert, then token; `y` [m, H] bfloat16 to return, in the order of arrival;
    `to` and `come`: rows for and from each rank."""

    depth = 8  # a dispatch or a combine may be repeated over the same memory: it moves the same rows
    params: dict[str, int | str] = {}
    order: tuple[str, ...] = ("group", "expert", "token")

    def __init__(self, case: Case) -> None:
        setting = case.setting
        if setting.tp != 1:
            raise BenchError(f"it is compared at TP 1 only, this is TP {setting.tp}")
        self.case = case
        ids = case.ids.flatten().long()
        turn = ids.argsort(stable=True)
        self.mine = torch.stack([torch.full_like(ids, case.group), turn // setting.top_k, ids[turn]])
        self.arriving = case.sorted_pairs(*self.order)
        self.to = (ids // setting.local_experts).bincount(minlength=setting.ep).tolist()
        self.come = self.arriving[0].bincount(minlength=setting.ep).tolist()
        self.rows, self.y = case.images(self.mine), case.outputs(self.arriving)

    def pair(self) -> None:
        self.dispatch()
        self.combine()

    @abstractmethod
    def dispatch(self, slot: int = 0) -> None: ...

    @abstractmethod
    def combine(self, slot: int = 0) -> None: ...

    @abstractmethod
    def poison(self) -> None:
        """Spoil what dispatch and combine write."""

    @abstractmethod
    def landed(self) -> Tensor:
        """The rows that have come, in order, [m, B]."""

    @abstractmethod
    def returned(self) -> Tensor:
        """The outputs that have come back, in the order of `rows`, [n, H]."""

    def check(self) -> None:
        same(self.landed(), self.case.images(self.arriving), "a row")
        same(self.returned(), self.case.outputs(self.mine), "an output")

    def sent_bytes(self, copies: Copies) -> tuple[int, int]:
        return copies.sent_bytes("expert", "rows")

    def close(self) -> None:
        return  # most have nothing to free


class NcclSplit(Packed):
    name = "nccl-split"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.there = torch.zeros(len(self.y), self.rows.shape[1], dtype=torch.uint8, device=case.device)
        self.back = torch.zeros(len(self.rows), case.setting.hidden, dtype=torch.bfloat16, device=case.device)

    def dispatch(self, slot: int = 0) -> None:
        dist.all_to_all_single(self.there, self.rows, self.come, self.to)

    def combine(self, slot: int = 0) -> None:
        dist.all_to_all_single(self.back, self.y, self.to, self.come)

    def landed(self) -> Tensor:
        return self.there

    def returned(self) -> Tensor:
        return self.back

    def poison(self) -> None:
        self.there.zero_()
        self.back.zero_()


class NcclSplitPacked(NcclSplit):
    name = "nccl-split-packed"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        setting = case.setting
        own = torch.arange(setting.tokens, device=case.device)
        # Rows go and come as int32, which torch's indexing moves four bytes at a time.
        self.tokens = case.images(torch.stack([torch.full_like(own, case.group), own])).view(torch.int32)
        self.token_of = self.mine[1]
        place_of = torch.empty(setting.experts, setting.dp * setting.tokens, dtype=torch.int64, device=case.device)
        place_of[case.pairs[2], case.pairs[0] * setting.tokens + case.pairs[1]] = case.places()
        self.place = place_of[self.arriving[2], self.arriving[0] * setting.tokens + self.arriving[1]]
        experts, room, _ = case.padded_shape
        self.padded = torch.zeros(experts * room, self.rows.shape[1] // 4, dtype=torch.int32, device=case.device)
        self.y_padded = case.padded_outputs().view(experts * room, setting.hidden)
        ids = case.ids.flatten().long()
        self.out: Tensor | None = None
        self.row_of = ids.argsort(stable=True).argsort().to(torch.int32).view(setting.tokens, setting.top_k)

    def dispatch(self, slot: int = 0) -> None:
        torch.index_select(self.tokens, 0, self.token_of, out=self.rows.view(torch.int32))
        super().dispatch()
        self.padded.index_copy_(0, self.place, self.there.view(torch.int32))

    def combine(self, slot: int = 0) -> None:
        torch.index_select(self.y_padded, 0, self.place, out=self.y)
        super().combine()
        self.out = reduce_topk(self.back, self.row_of, self.case.weights)

    def landed(self) -> Tensor:
        return self.padded[self.place].view(torch.uint8)

    def check(self) -> None:
        super().check()
        self.case.check_out(self.out, rounded_once(self.case.setting.top_k))

    def poison(self) -> None:
        super().poison()
        self.padded.zero_()
        if self.out is not None:
            self.out.fill_(torch.nan)


class NcclPadded(Packed):
    name = "nccl-padded"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        setting = case.setting
        self.block = setting.tokens * min(setting.top_k, setting.local_experts)
        self.out_rows, self.in_rows = (self.empty(self.rows.shape[1], torch.uint8) for _ in range(2))
        self.out_y, self.in_y = (self.empty(setting.hidden, torch.bfloat16) for _ in range(2))
        self.fill(self.out_rows, self.rows, self.to)
        self.fill(self.out_y, self.y, self.come)

    def empty(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.case.setting.ep * self.block, width, dtype=dtype, device=self.case.device)

    def fill(self, blocks: Tensor, rows: Tensor, counts: list[int]) -> None:
        for rank, part in enumerate(rows.split(counts)):
            blocks[rank * self.block :][: len(part)] = part

    def taken(self, blocks: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([blocks[rank * self.block :][:count] for rank, count in enumerate(counts)])

    def dispatch(self, slot: int = 0) -> None:
        dist.all_to_all_single(self.in_rows, self.out_rows)

    def combine(self, slot: int = 0) -> None:
        dist.all_to_all_single(self.in_y, self.out_y)

    def landed(self) -> Tensor:
        return self.taken(self.in_rows, self.come)

    def returned(self) -> Tensor:
        return self.taken(self.in_y, self.to)

    def poison(self) -> None:
        self.in_rows.zero_()
        self.in_y.zero_()

    def sent_bytes(self, copies: Copies) -> tuple[int, int]:
        rows = (self.case.setting.ep - 1) * self.block
        return rows * self.rows.shape[1], rows * self.case.setting.output_bytes


class NvshmemPadded(NcclPadded):
    name = "nvshmem-padded"

    def empty(self, width: int, dtype: torch.dtype) -> Tensor:
        return symmetric((self.case.setting.ep * self.block, width), dtype, self.case.device)

    def dispatch(self, slot: int = 0) -> None:
        torch.ops.symm_mem.nvshmem_all_to_all(self.out_rows, self.in_rows, dist.group.WORLD.group_name)

    def combine(self, slot: int = 0) -> None:
        torch.ops.symm_mem.nvshmem_all_to_all(self.out_y, self.in_y, dist.group.WORLD.group_name)


class SymmMem(Packed):
    name = "symm_mem-vdev2d"
    order = ("bundle", "group", "expert", "token")

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        setting, device = case.setting, case.device
        bundles = setting.experts // case.bundle
        # The same on every rank: the most rows that can come, and one for each empty bundle.
        room = setting.dp * setting.tokens * min(setting.top_k, setting.local_experts) + bundles
        sent, width = setting.tokens * setting.top_k, self.rows.shape[1]
        self.params = {"bundle": case.bundle}
        self.send = symmetric((sent, width), torch.uint8, device)
        self.there = symmetric((room, width), torch.uint8, device)
        self.outputs = symmetric((room, setting.hidden), torch.bfloat16, device)
        self.back = symmetric((sent, setting.hidden), torch.bfloat16, device)
        self.splits = symmetric((bundles,), torch.int64, device)
        # Peers write to these while the call before may still be at work on its own, hence some for each in flight.
        self.arrived, self.home = (
            [symmetric((2, bundles), torch.int64, device) for _ in range(self.depth)] for _ in range(2)
        )
        self.send.copy_(self.rows)
        self.splits.copy_((self.mine[2] // case.bundle).bincount(minlength=bundles))
        dist.barrier()  # on the stream, behind the copies
        self.dispatch()  # only it knows where rows come to stand, and that is where outputs must be
        splits, offsets = self.arrived[0].tolist()
        stands = [torch.arange(at, at + count) for count, at in zip(splits, offsets, strict=True)]
        self.at = torch.cat(stands).to(device)
        if len(self.at) != len(self.y):
            raise WrongResult(f"{len(self.at)} rows came instead of {len(self.y)}")
        self.outputs[self.at] = self.y

    def dispatch(self, slot: int = 0) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self.send, self.there, self.splits, self.arrived[slot], dist.group.WORLD.group_name
        )

    def combine(self, slot: int = 0) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(
            self.outputs, self.back, self.arrived[slot], self.home[slot], dist.group.WORLD.group_name
        )

    def landed(self) -> Tensor:
        return self.there[self.at]

    def returned(self) -> Tensor:
        return self.back

    def poison(self) -> None:
        self.there.zero_()
        self.back.zero_()


def symmetric(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros that all ranks have; collective. Raises BenchError where torch has no NVSHMEM."""
    import torch.distributed._symmetric_memory as symm_mem

    if not symm_mem.is_nvshmem_available():
        raise BenchError("torch finds no NVSHMEM (libnvshmem_host.so.3): install nvidia-nvshmem-cu13")
    if symm_mem.get_backend(device) != "NVSHMEM":
        symm_mem.set_backend("NVSHMEM")
    tensor = symm_mem.empty(*shape, dtype=dtype, device=device)
    symm_mem.rendezvous(tensor, dist.group.WORLD)
    return tensor.zero_()
