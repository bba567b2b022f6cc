"""Interpreter, operating system, what ranks of one host need of it, and the data at hand."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from moelab.doctor.check import MISSING, OK, WARN, Check

# NVLink multicast stays off: a program that uses it can put GPUs that others share out of service.
MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_PIDFD_GETFD = 438  # on every Linux
_CAP_SYS_PTRACE = 19
PYTHONS = ((3, 11), (3, 14))


def system_checks() -> Iterator[Check]:
    from moelab.results.provenance import cpu_name, library_versions, source_state

    good = PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]
    yield Check(
        "System",
        "Python",
        OK if good else WARN,
        f"{platform.python_version()} at {sys.executable}",
        "" if good else "moelab is made for Python 3.11 to 3.13",
    )
    linux = sys.platform == "linux"
    yield Check(
        "System",
        "OS",
        OK if linux else WARN,
        platform.platform(),
        "" if linux else "GPU work needs Linux; the rest may work",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("System", "CPU", OK, f"{cores} core{'s' * (cores != 1)}, {cpu_name()}")
    yield Check("System", "memory", OK, _memory())
    commit, dirty = source_state()
    version = library_versions()["moelab"]
    if not dirty:
        yield Check("System", "moelab", OK, f"{version}, commit {commit[:12]}")
    elif commit == "unknown":
        yield Check(
            "System",
            "moelab",
            WARN,
            f"{version}, commit unknown (no git)",
            "records made now count as dirty; set MOELAB_COMMIT to the commit it was made from",
        )
    else:
        yield Check(
            "System",
            "moelab",
            WARN,
            f"{version}, commit {commit[:12]} with changes",
            "records made now count as dirty; commit first if they are to be kept",
        )


def host_checks(has_gpu: bool) -> Iterator[Check]:
    """What lies around the GPUs. Without one, nothing here is a warning."""
    wrong = [f"{name}={value}" for name, value in MULTICAST.items() if os.environ.get(name) != value]
    bad = WARN if has_gpu else MISSING
    yield Check(
        "Host",
        "multicast off",
        OK if not wrong else bad,
        "NVLink multicast is switched off in all three libraries"
        if not wrong
        else f"not set: {' '.join(wrong)}" + ("" if has_gpu else " (matters with GPUs only)"),
        f"export {' '.join(wrong)} where GPUs are shared" if wrong and has_gpu else "",
    )
    if os.path.isdir("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total
        small = size < 2**30 and has_gpu
        yield Check(
            "Host",
            "/dev/shm",
            WARN if small else OK,
            f"{size / 2**30:.1f} GiB",
            "NCCL wants 1 GiB or more: --shm-size in a container" if small else "",
        )
    yield _other_ranks_memory(bad)


def _other_ranks_memory(bad: str) -> Check:
    """A rank that maps a peer's memory takes the peer's file descriptor; torch does by pidfd_getfd (expandable
    segments, symmetric memory), which the kernel allows as it allows to trace the other process."""
    name = "pidfd_getfd"
    if sys.platform != "linux":
        return Check("Host", name, MISSING, "Linux only")
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        handle = os.pidfd_open(os.getpid())
        taken = libc.syscall(_PIDFD_GETFD, handle, handle, 0)
        refused = os.strerror(ctypes.get_errno()) if taken < 0 else ""
        for descriptor in (handle, taken):
            if descriptor >= 0:
                os.close(descriptor)
    except OSError as error:
        refused = str(error.strerror)
    if refused:
        fix = "in a container: --cap-add=SYS_PTRACE --security-opt seccomp=unconfined" if bad == WARN else ""
        return Check("Host", name, bad, f"refused even for this process: {refused}", fix)
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0  # a kernel without that restriction
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    may = scope == 0 or bool(effective and int(effective[1], 16) >> _CAP_SYS_PTRACE & 1 and scope < 3)
    detail = f"works; ptrace scope {scope}" + ("" if may else ": ranks may not take file descriptors of one another")
    fix = "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE; torch's symmetric memory wants it"
    return Check("Host", name, OK if may else bad, detail, fix if not may and bad == WARN else "")


def data_checks(records: str | Path | None) -> Iterator[Check]:
    """`records`: the folder of the user's own, as `--records`."""
    from moelab.config import MoelabError
    from moelab.results import Store, published
    from moelab.results.store import machine
    from moelab.share import share_dir

    try:
        stems = sorted(p.stem for p in share_dir("notebooks").glob("*.ipynb"))
    except MoelabError as error:
        yield Check("Data", "notebooks", WARN, str(error))
    else:
        yield Check("Data", "notebooks", OK if stems else MISSING, ", ".join(stems) or "none")
    folder = Path(__file__).resolve().parents[1] / "data" / "tinyseek"
    weights = sorted(folder.glob("*.safetensors"))
    if weights and (folder / "config.json").is_file():
        size = sum(p.stat().st_size for p in weights)
        yield Check("Data", "tinyseek", OK, f"{size / 1e6:.1f} MB of weights in {folder}")
    else:
        yield Check(
            "Data",
            "tinyseek",
            MISSING,
            f"no checkpoint in {folder}",
            "train it: experiments/tinyseek says how",
        )
    yield Check("Data", "published tables", OK, ", ".join(published.names()))
    store = Store(records)
    try:
        entries = store.winners()
    except MoelabError as error:
        yield Check("Data", "records", WARN, str(error))
        return
    places = sorted({machine(e.record) for e in entries})
    own = sum(e.own for e in entries)
    if not entries and not store.damage:
        yield Check("Data", "records", MISSING, f"none in {store.directory} or in the package")
        return
    detail = f"{len(entries)} ({own} own, in {store.directory})" + (f" from {', '.join(places)}" if places else "")
    if store.damage:
        yield Check(
            "Data",
            "records",
            WARN,
            f"{detail}; {len(store.damage)} damaged, first {store.damage[0]}",
            "a killed writer leaves one; delete the line",
        )
    else:
        yield Check("Data", "records", OK, detail)


def _memory() -> str:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(fields[x].split()[0]) / 2**20 for x in ("MemTotal", "MemAvailable"))
        return f"{total:.1f} GiB, {free:.1f} GiB available"
    except (OSError, KeyError, ValueError):
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
