"""Two ranks of NVSHMEM on this host, each a process: one puts bytes and a signal into the other's memory, and the other
looks at what has come once it sees the signal. Nothing smaller shows that initialisation, the symmetric heap and the
mapping of a peer's memory work together.

Only what also works with several ranks on a GPU and no MPS is used (NVSHMEM calls that limited; its team barriers and
waits on a stream end the process there): malloc, barrier_all, ptr, put-signal on a stream. The wait is a poll with a
limit, since NVSHMEM's own waits have none.

    torchrun --nnodes 2 … -m moelab.doctor.put_signal        # the same as a ring over all ranks of several nodes
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moelab.doctor.check import ChildFailed, ask

BYTES = 4096
UID_BYTES = 128
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
    """One of two ranks on this host; run it in a child, which a failed initialisation takes along."""
    return exchange(number, 2, gpu, lambda made: _by_file(made, Path(folder)))


def exchange(number: int, size: int, gpu: int, agree: Callable[[bytes | None], bytes]) -> dict[str, Any]:
    """Rank `number` of `size`, each of which puts to the next. `agree` is handed NVSHMEM's unique id by rank 0 and None
    by the others, and returns rank 0's. Collective; ends NVSHMEM. Raises RuntimeError with what did not come."""
    import torch

    torch.cuda.set_device(gpu)
    torch.zeros(1, device="cuda")  # makes the context that NVSHMEM is to use

    import nvshmem.core as nvshmem
    from cuda.core import Device
    from nvshmem import bindings

    started = time.monotonic()
    device = Device(gpu)
    device.set_current()
    uid = nvshmem.get_unique_id(empty=number != 0)  # rank 0's opens a listening socket
    agreed = agree(ctypes.string_at(uid.ptr, UID_BYTES) if number == 0 else None)
    ctypes.memmove(uid.ptr, agreed, UID_BYTES)
    nvshmem.init(device=device, uid=uid, rank=number, nranks=size, initializer_method="uid")
    status = int(nvshmem.init_status())
    if status < 2:  # NVSHMEM reports success when only its bootstrap has worked, and ends the process later
        raise RuntimeError(f"initialisation ended with status {status}: NVSHMEM_DEBUG=INFO says why")
    init_s = time.monotonic() - started

    to, by = (number + 1) % size, (number - 1) % size
    source, inbox = (nvshmem.tensor((BYTES,), dtype=torch.uint8) for _ in range(2))
    signal = nvshmem.buffer(8)
    flag = torch.from_dlpack(signal).view(torch.int64)
    inbox.zero_()
    flag.zero_()
    source.copy_(pattern(number))
    torch.cuda.synchronize()
    bindings.barrier_all()

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, torch.cuda.current_stream().cuda_stream

    nvshmem.put_signal(inbox, source, signal, 7 + number, nvshmem.SignalOp.SIGNAL_SET, remote_pe=to, stream=Stream())
    limit = time.monotonic() + WAIT_S
    while flag.item() != 7 + by:
        if time.monotonic() > limit:
            raise RuntimeError(f"no signal from rank {by} within {WAIT_S:.0f} s (the flag is {flag.item()})")
    wrong = int((inbox.cpu() != pattern(by)).sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {BYTES} bytes from rank {by} were wrong when its signal had come")
    shared = bool(bindings.ptr(signal.handle, to))
    plugins = sorted(set(re.findall(r"nvshmem_transport_(\w+)\.so", Path("/proc/self/maps").read_text())))

    bindings.barrier_all()
    del flag
    for tensor in (source, inbox):
        nvshmem.free_tensor(tensor)
    nvshmem.free(signal)
    nvshmem.finalize()
    return {"gpu": gpu, "status": status, "shared": shared, "init_s": init_s, "transports": plugins}


def pattern(number: int):
    import torch

    return ((torch.arange(BYTES) * 37 + 101 * (number + 1)) % 251).to(torch.uint8)


def _by_file(made: bytes | None, folder: Path) -> bytes:
    file = folder / "uid"
    if made is not None:
        (folder / "uid.part").write_bytes(made)
        os.replace(folder / "uid.part", file)
        return made
    limit = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > limit:
            raise RuntimeError(f"no answer within {WAIT_S:.0f} s from rank 0 (its unique id)")
        time.sleep(0.01)
    return file.read_bytes()


def main() -> None:
    """A rank of torchrun's, on as many nodes as it likes; each says what it saw."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    number, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))

    def agree(made: bytes | None) -> bytes:
        given = [made]
        dist.broadcast_object_list(given, src=0)
        return given[0]

    found = exchange(number, size, local % torch.cuda.device_count(), agree)
    how = "by memory that is mapped" if found["shared"] else f"over {'/'.join(found['transports']) or 'no transport'}"
    print(
        f"rank {number} on {socket.gethostname()}, GPU {found['gpu']}: {BYTES} bytes and a signal came from rank "
        f"{(number - 1) % size}; reaches rank {(number + 1) % size} {how}; initialised in {found['init_s']:.1f} s",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
