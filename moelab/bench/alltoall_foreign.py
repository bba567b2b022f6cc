"""DeepEP's low-latency kernels and pplx-kernels, where they can be imported. Written against DeepEP v1.2.1 and
pplx-kernels of mid-2025; neither can be installed where this was written, so these two have not been run.

Neither says in which order an expert's rows stand, so the timed outputs are not those of the rows that came: what is
checked, before the timing and after it, is a pair of its own, whose outputs are computed from the rows that it brought.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.bench.alltoall_case import ROUNDED_TWICE, Case, factor, same_counts
from moelab.bench.alltoall_setting import Copies
from moelab.bench.timer import BenchError

# e4m3 keeps three bits of mantissa: a value quantised anew is off by 2^-4 of itself at most, where it is not tiny.
QUANTISED_ANEW = 2.0**-4 + ROUNDED_TWICE


class Foreign(ABC):
    """`y` [L, dp·M, H]: outputs that are timed; any numbers, since `check` uses others."""

    depth = 1
    params: dict[str, int | str] = {}

    def __init__(self, case: Case) -> None:
        self.case = case
        self.y = torch.empty(case.padded_shape, dtype=torch.bfloat16, device=case.device).normal_()
        self.out = torch.empty(case.setting.tokens, case.setting.hidden, dtype=torch.bfloat16, device=case.device)

    @abstractmethod
    def dispatch(self, slot: int = 0) -> None: ...

    @abstractmethod
    def combine(self, slot: int = 0) -> None: ...

    @abstractmethod
    def received(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """rows [L, dp·M, H], scales [L, dp·M, S] or None, counts [L]."""

    def pair(self) -> None:
        self.dispatch()
        self.combine()

    def poison(self) -> None:
        self.out.fill_(torch.nan)

    def check(self) -> None:
        case, timed = self.case, self.y
        self.poison()
        self.dispatch()
        rows, scales, counts = self.received()
        same_counts(counts, case.counts())
        self.y = torch.zeros_like(timed)
        for local, count in enumerate(case.counts().tolist()):
            plain = rows[local, :count].float()
            if scales is not None:
                plain = plain * scales[local, :count].repeat_interleave(128, 1)[:, : plain.shape[1]]
            own = torch.tensor(case.first + local, device=case.device)
            self.y[local, :count] = (plain * factor(own)).bfloat16()
        self.combine()
        case.check_out(self.out, QUANTISED_ANEW)
        self.y = timed

    def sent_bytes(self, copies: Copies) -> tuple[int, int]:
        return copies.sent_bytes("expert", "rows")

    def close(self) -> None:
        return  # most have nothing to free


class DeepEP(Foreign):
    """bfloat16 in: it quantises inside dispatch, which is in its times."""

    name = "deep_ep"

    def __init__(self, case: Case) -> None:
        deep_ep = _import("deep_ep", "build DeepEP v1.2.1 from source")
        setting = case.setting
        if setting.tp != 1:
            raise BenchError(f"it knows no TP groups, this is TP {setting.tp}")
        super().__init__(case)
        self.x, self.ids = case.plain[case.group], case.ids.long()
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            setting.tokens, setting.hidden, setting.ep, setting.experts
        )
        self.buffer = deep_ep.Buffer(
            dist.group.WORLD, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=setting.local_experts,
            allow_nvlink_for_low_latency_mode=True,
        )  # fmt: skip

    def dispatch(self, slot: int = 0) -> None:
        setting = self.case.setting
        self.rows, self.counts, self.handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.ids, setting.tokens, setting.experts, use_fp8=setting.payload == "fp8"
        )

    def combine(self, slot: int = 0) -> None:
        self.buffer.low_latency_combine(self.y, self.ids, self.case.weights, self.handle, out=self.out)

    def received(self) -> tuple[Tensor, Tensor | None, Tensor]:
        rows, scales = self.rows if isinstance(self.rows, tuple) else (self.rows, None)
        return rows, scales, self.counts

    def close(self) -> None:
        if hasattr(self.buffer, "destroy"):
            self.buffer.destroy()


class Pplx(Foreign):
    """Its kernels for ranks that share NVLink."""

    name = "pplx"

    def __init__(self, case: Case) -> None:
        pplx = _import("pplx_kernels", "build pplx-kernels from source").AllToAll
        setting = case.setting
        if setting.dp < 2:
            raise BenchError(f"it needs two DP groups, dp is {setting.dp}")
        super().__init__(case)
        self.exchange = pplx.intranode(
            max_num_tokens=setting.tokens, num_experts=setting.experts, experts_per_token=setting.top_k,
            rank=case.rank, world_size=setting.ep, dp_size=setting.tp, hidden_dim=setting.hidden,
            hidden_dim_bytes=setting.hidden * case.x.element_size(), hidden_dim_scale_bytes=4 * setting.num_scales,
            group_name=dist.group.WORLD.group_name,
        )  # fmt: skip
        experts, room, _ = case.padded_shape
        self.rows = torch.empty(case.padded_shape, dtype=case.x.dtype, device=case.device)
        self.scales = None
        if setting.num_scales:
            self.scales = torch.empty(experts, room, setting.num_scales, device=case.device)
        self.counts = torch.empty(experts, dtype=torch.int32, device=case.device)
        self.ids = case.ids.to(torch.uint32)
        self.bound = torch.tensor([setting.tokens], dtype=torch.uint32, device=case.device)

    def dispatch(self, slot: int = 0) -> None:
        self.exchange.dispatch(self.counts, self.rows, self.scales, self.case.x, self.case.scales, self.ids, self.bound)

    def combine(self, slot: int = 0) -> None:
        self.exchange.combine(self.out, self.ids, self.case.weights, self.y, self.bound)

    def received(self) -> tuple[Tensor, Tensor | None, Tensor]:
        return self.rows, self.scales, self.counts

    def close(self) -> None:
        self.exchange.destroy()


def _import(name: str, how: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BenchError(f"cannot import {name} ({error}): {how}") from None
