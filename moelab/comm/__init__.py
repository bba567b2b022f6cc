"""Moving tokens between the ranks that hold them and the ranks that hold their experts.

`AllToAll` (alltoall.py, where the protocol is explained) is the one interface; `group` picks what moves the data:
torch.distributed over gloo or NCCL, our kernels over NVSHMEM (`Nvshmem`), or `VirtualRanks`, many ranks in one process.
"""

from __future__ import annotations

from moelab.comm.alltoall import AllToAll, Handle
from moelab.comm.errors import CommError, ExchangeTimeout, InputError
from moelab.comm.nvshmem import Nvshmem
from moelab.comm.virtual import VirtualRanks

__all__ = ["AllToAll", "CommError", "ExchangeTimeout", "Handle", "InputError", "Nvshmem", "VirtualRanks"]
