"""Two ranks of NVSHMEM on this host, each a process: one puts bytes and a signal into the other's memory, and the other
looks at what has come once it sees the signal. Nothing smaller shows that initialisation, the symmetric heap and the
mapping of a peer's memory work together.

Only what also works with several ranks on a GPU and no MPS is used (NVSHMEM calls that limited; its team barriers and
waits on a stream end the process there): malloc, barrier_all, ptr, put-signal on a stream. The wait is a poll with a
limit, since NVSHMEM's own waits have none.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moelab.doctor.check import ChildFailed, ask

BYTES = 4096
WAIT_S = 15.0  # for the peer's signal, and for rank 0's unique id

# Both ranks are on this host, so no network is asked for; a heap of the size needed; multicast stays off.
_ENVIRONMENT = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_IB_ENABLE_IBGDA": "0",
    "NVSHMEM_SYMMETRIC_SIZE": "64M",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
}


def run(gpu_count: int, *, timeout_s: float = 40) -> list[dict[str, Any]]:
    """What each of the two ranks saw: {"gpu", "status", "shared", "init_s"}. With one GPU both are on it. Raises
    ChildFailed with the reason of the rank that failed first, or the time limit."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        calls = [f"rank({number}, {number % gpu_count}, {folder!r})" for number in range(2)]
        code = "import json; from moelab.doctor.put_signal import rank; print(json.dumps({}))"
        asked = [pool.submit(ask, code.format(call), timeout_s=timeout_s, env=_ENVIRONMENT) for call in calls]
        failures = [failure for future in asked if (failure := future.exception())]
    for failure in failures:
        if not isinstance(failure, ChildFailed):
            raise failure
    if failures:  # a rank whose peer died only says that it waited in vain
        raise next((f for f in failures if "no answer within" not in str(f) and "no signal" not in str(f)), failures[0])
    return [future.result() for future in asked]


def rank(number: int, gpu: int, folder: str) -> dict[str, Any]:
    """One rank; run it in a child, which a failed initialisation takes along. Collective over both."""
    import torch

    torch.cuda.set_device(gpu)
    torch.zeros(1, device="cuda")  # makes the context that NVSHMEM is to use

    import nvshmem.core as nvshmem
    from cuda.core import Device
    from nvshmem import bindings

    started = time.monotonic()
    device = Device(gpu)
    device.set_current()
    nvshmem.init(device=device, uid=_unique_id(number, Path(folder)), rank=number, nranks=2, initializer_method="uid")
    status = int(nvshmem.init_status())
    if status < 2:  # NVSHMEM reports success when only its bootstrap has worked, and ends the process later
        raise RuntimeError(f"initialisation ended with status {status}: NVSHMEM_DEBUG=INFO says why")
    init_s = time.monotonic() - started

    peer = 1 - number
    source, inbox = (nvshmem.tensor((BYTES,), dtype=torch.uint8) for _ in range(2))
    signal = nvshmem.buffer(8)
    flag = torch.from_dlpack(signal).view(torch.int64)
    inbox.zero_()
    flag.zero_()
    source.copy_(_pattern(number))
    torch.cuda.synchronize()
    bindings.barrier_all()

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, torch.cuda.current_stream().cuda_stream

    nvshmem.put_signal(inbox, source, signal, 7 + number, nvshmem.SignalOp.SIGNAL_SET, remote_pe=peer, stream=Stream())
    limit = time.monotonic() + WAIT_S
    while flag.item() != 7 + peer:
        if time.monotonic() > limit:
            raise RuntimeError(f"no signal from rank {peer} within {WAIT_S:.0f} s (the flag is {flag.item()})")
    wrong = int((inbox.cpu() != _pattern(peer)).sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {BYTES} bytes from rank {peer} were wrong when its signal had come")
    shared = bool(bindings.ptr(signal.handle, peer))

    bindings.barrier_all()
    for tensor in (source, inbox):
        nvshmem.free_tensor(tensor)
    nvshmem.free(signal)
    nvshmem.finalize()
    return {"gpu": gpu, "status": status, "shared": shared, "init_s": init_s}


def _pattern(number: int):
    import torch

    return ((torch.arange(BYTES) * 37 + 101 * (number + 1)) % 251).to(torch.uint8)


def _unique_id(number: int, folder: Path):
    """Rank 0 makes it, which opens a listening socket there, and leaves its 128 bytes in a file."""
    import ctypes

    import nvshmem.core as nvshmem

    uid, file = nvshmem.get_unique_id(empty=number != 0), folder / "uid"
    if number == 0:
        (folder / "uid.part").write_bytes(ctypes.string_at(uid.ptr, 128))
        os.replace(folder / "uid.part", file)
        return uid
    limit = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > limit:
            raise RuntimeError(f"no answer within {WAIT_S:.0f} s from rank 0 (its unique id)")
        time.sleep(0.01)
    ctypes.memmove(uid.ptr, file.read_bytes(), 128)
    return uid
