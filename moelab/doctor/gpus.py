"""GPUs and the links between them, asked of the driver: nvidia-smi and libcuda, without torch and without a
context."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

from moelab.doctor.check import MISSING, OK, WARN, Check, ChildFailed, ask

SECTION = "GPU"
MIN_DRIVER = 580  # the first that runs CUDA 13
NEEDED_CAPABILITY = (9, 0)  # what the kernels are built for

# cuda.h: CUdevice_attribute and CUdevice_P2PAttribute
_SMS, _MAJOR, _MINOR = 16, 75, 76
_P2P_ACCESS, _P2P_ATOMIC = 2, 3


def checks() -> list[Check]:
    found: list[Check] = []
    try:
        gpus = ask("import json; from moelab.doctor.gpus import probe; print(json.dumps(probe()))", timeout_s=60)
    except ChildFailed as failure:
        reason = str(failure).removeprefix("OSError: ").removeprefix("RuntimeError: ")
        found.append(
            Check(
                SECTION,
                "GPUs",
                MISSING,
                f"none: {reason}",
                f"notebooks, records and tests need none; GPU work needs an NVIDIA driver from {MIN_DRIVER}",
            )
        )
        return found + [_toolkit()]
    for gpu in gpus["gpus"]:
        capability = tuple(gpu["capability"])
        good = capability == NEEDED_CAPABILITY
        found.append(
            Check(
                SECTION,
                f"GPU {gpu['index']}",
                OK if good else WARN,
                f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB, "
                f"capability {capability[0]}.{capability[1]}, {gpu['sms']} SMs",
                "" if good else "the CUDA kernels are built for capability 9.0 (Hopper): build them for yours",
            )
        )
    found.append(_driver())
    if len(gpus["gpus"]) > 1:
        found += _links(gpus["pairs"], _topology())
    return found + [_toolkit()]


def probe() -> dict[str, Any]:
    """{"gpus": [...], "pairs": [...]} from libcuda, CUDA_VISIBLE_DEVICES respected. Run it in a child. Raises
    OSError without libcuda, RuntimeError when the driver refuses."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")

    def integer(name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        call(name, ctypes.byref(value), *arguments)
        return value.value

    call("cuInit", 0)
    devices = [integer("cuDeviceGet", i) for i in range(integer("cuDeviceGetCount"))]
    if not devices:
        raise RuntimeError("the driver shows no GPU (CUDA_VISIBLE_DEVICES?)")
    gpus = []
    for index, device in enumerate(devices):
        name, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
        call("cuDeviceGetName", name, 256, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        capability = [integer("cuDeviceGetAttribute", which, device) for which in (_MAJOR, _MINOR)]
        sms = integer("cuDeviceGetAttribute", _SMS, device)
        gpus.append(
            {
                "index": index,
                "name": name.value.decode(),
                "memory_bytes": size.value,
                "capability": capability,
                "sms": sms,
            }
        )
    pairs = []
    for a, b in combinations(range(len(devices)), 2):
        both = [(devices[a], devices[b]), (devices[b], devices[a])]
        access, atomics = (
            all(integer("cuDeviceGetP2PAttribute", which, src, dst) for src, dst in both)
            for which in (_P2P_ACCESS, _P2P_ATOMIC)
        )
        pairs.append({"gpus": [a, b], "p2p": access, "atomics": atomics})
    return {"gpus": gpus, "pairs": pairs}


def _links(pairs: list[dict[str, Any]], topology: dict[tuple[int, int], str]) -> list[Check]:
    """Pairs that are alike share a line: eight GPUs make 28 pairs."""
    groups: dict[tuple[str, bool, bool], list[str]] = {}
    for pair in pairs:
        a, b = pair["gpus"]
        groups.setdefault((topology.get((a, b), "?"), pair["p2p"], pair["atomics"]), []).append(f"{a}–{b}")
    found = []
    for (link, p2p, atomics), members in groups.items():
        which = f"all {len(pairs)} pairs" if len(members) == len(pairs) > 1 else " ".join(members)
        good = p2p and atomics
        found.append(
            Check(
                SECTION,
                "links",
                OK if good else WARN,
                f"{which}: {'link not shown by nvidia-smi' if link == '?' else link}, "
                f"P2P {'yes' if p2p else 'no'}, native atomics {'yes' if atomics else 'no'}",
                "" if good else "the nvshmem backend needs NVLink between GPUs of one node; backend torch works",
            )
        )
    return found


def _topology() -> dict[tuple[int, int], str]:
    """{(0, 1): "NV18", ...}. nvidia-smi counts all GPUs and libcuda only visible ones, so with
    CUDA_VISIBLE_DEVICES the numbers may not agree, and nothing is said."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return {}
    text = _output(["nvidia-smi", "topo", "-m"]) or ""
    return parse_topology(text)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """{(0, 1): "NV18", ...} from the matrix; its first columns are the GPUs, in the order of the rows."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    is_gpu = re.compile(r"GPU\d+").fullmatch
    rows = [cells for cells in lines if len(cells) > 1 and is_gpu(cells[0]) and not is_gpu(cells[1])]
    return {
        (a, b): cells[1 + b] for a, cells in enumerate(rows) for b in range(len(rows)) if b != a and 1 + b < len(cells)
    }


def _driver() -> Check:
    version = (_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "").strip()
    if not version:
        return Check(
            SECTION,
            "driver",
            WARN,
            "nvidia-smi does not answer",
            "records need the driver's version: put nvidia-smi on PATH",
        )
    version = version.splitlines()[0].strip()
    new_enough = version.split(".")[0].isdecimal() and int(version.split(".")[0]) >= MIN_DRIVER
    return Check(
        SECTION,
        "driver",
        OK if new_enough else WARN,
        version,
        "" if new_enough else f"CUDA 13 libraries need {MIN_DRIVER} or later",
    )


def _toolkit() -> Check:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    release = re.search(r"release [\d.]+, V([\d.]+)", _output([nvcc, "--version"]) or "") if nvcc else None
    if release:
        able = "sm_90" in (_output([nvcc, "--list-gpu-code"]) or "").split()
        detail = f"nvcc {release[1]} at {nvcc}" + ("" if able else ", which does not know sm_90")
        fix = "" if able else "the kernels are built for Hopper (sm_90a): install a CUDA 13 toolkit"
        return Check(SECTION, "CUDA toolkit", OK if able else WARN, detail, fix)
    return Check(
        SECTION,
        "CUDA toolkit",
        MISSING,
        "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda",
        "needed only to build the kernels and for just-in-time GPU libraries",
    )


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
