"""The kernels' own source on the CPU: `emulation()`, a `Library` of what emulate/ makes of them.

It has the functions of exchange.h, so everything above the kernels uses it as it uses them on a GPU. It needs g++ for
x86-64 and CUDA's headers, no GPU. A build is named by all that goes into it, so that a session compiles once, if at
all.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

from moelab.comm import CommError, library
from moelab.comm.library import Library
from moelab.comm.toolchain import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
KERNELS, HERE = ROOT / "kernels", Path(__file__).resolve().parent / "emulate"
# No fused multiply-add, which the kernels do not use where it matters and the reference does not have.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden", "-w")


def missing() -> str | None:
    """Why there is no emulation here, or None."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return f"the emulation of the kernels is for x86-64 Linux, this is {platform.machine()} {platform.system()}"
    if shutil.which("g++") is None:
        return "the emulation of the kernels needs g++"
    try:
        find_nvcc()
    except CommError as error:
        return f"the emulation of the kernels needs CUDA's headers: {error}"
    return None


def _cuda_headers() -> list[str]:
    """-I flags, as nvcc says them: it may be a script somewhere else."""
    said = subprocess.run([find_nvcc().path, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    found = re.search(r'INCLUDES="([^"]*)"', said.stderr)
    return found[1].split() if found else []


def compile_emulation(*defines: str, kernels: Path = KERNELS) -> Path:
    """The library's file. `defines` go to the compiler as -D; `kernels` may be a changed copy."""
    sources = [*sorted(kernels.glob("*.cuh")), *sorted(kernels.glob("*.h")), HERE / "emulate.h", HERE / "emulate.cpp"]
    content = hashlib.sha256(repr((FLAGS, defines)).encode())
    for path in sources:
        content.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"moelab-emulation-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    found = folder / f"{content.hexdigest()[:16]}.so"
    if not found.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            out = Path(made, "lib.so")
            subprocess.run(
                ["g++", *FLAGS, *(f"-D{d}" for d in defines), f"-I{kernels}", f"-I{HERE}", *_cuda_headers(),
                 HERE / "emulate.cpp", "-lpthread", "-o", out],
                check=True,
            )  # fmt: skip
            os.replace(out, found)
    return found


@functools.cache
def emulation(*defines: str) -> Library:
    """Raises `CommError` with `missing()`."""
    if why := missing():
        raise CommError(why)
    with mock.patch.object(library, "_host_half", lambda: None):  # it has no NVSHMEM
        return Library(compile_emulation(*defines))
