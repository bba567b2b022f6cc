"""What the kernels are compiled with: nvcc, and NVSHMEM's headers and libraries. Found, and checked against torch.

Four versions have to agree. nvcc, NVSHMEM and torch are of one CUDA major version, since a process has one CUDA
runtime. NVSHMEM's headers and device library go into our library; the host library is the one that torch loads, if it
is built for CUDA, and may be newer than the headers but not older, as NVSHMEM keeps its interface within a major
version and only adds to it.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from moelab.comm.errors import CommError

PIN = "3.4.5"  # what torch 2.11 for CUDA 13 brings; requirements/gpu.txt
_USUAL = Path("/usr/local/cuda/bin/nvcc")
_INSTALL = f"pip install nvidia-nvshmem-cu13=={PIN}"
_VERSION_HEADER = Path("include", "non_abi", "nvshmem_version.h")
_HOST = Path("lib", "libnvshmem_host.so.3")
_DEVICE = Path("lib", "libnvshmem_device.a")


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: str  # "13.0.88"


@dataclass(frozen=True)
class Nvshmem:
    """A folder with NVSHMEM's `include` and `lib`."""

    home: Path
    version: str  # of the headers, "3.4.5"


def find_nvcc() -> Nvcc:
    """The nvcc of CUDA_HOME if that is set, else of PATH, else of /usr/local/cuda. Raises `CommError` if there is
    none, or it does not run."""
    home = os.environ.get("CUDA_HOME")
    if home:
        path = Path(home, "bin", "nvcc")
        if not path.is_file():
            raise CommError(f"CUDA_HOME is {home}, which has no bin/nvcc: set it to a CUDA 13 toolkit, or unset it")
    else:
        found = shutil.which("nvcc") or (_USUAL if _USUAL.is_file() else None)
        if found is None:
            raise CommError(
                f"nvcc is missing (looked on PATH and for {_USUAL}): install a CUDA 13 toolkit, or set CUDA_HOME"
            )
        path = Path(found)
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommError(f"{path} does not run: {error}") from None
    version = re.search(r"\bV(\d+\.\d+\.\d+)", said.stdout)
    if said.returncode or version is None:
        said = " ".join((said.stderr or said.stdout).split())
        raise CommError(f"{path} --version does not say its version: {said or 'nothing'}; set CUDA_HOME to another")
    return Nvcc(path, version[1])


def find_nvshmem() -> Nvshmem:
    """NVSHMEM in NVSHMEM_HOME if that is set, else as torch or pip has installed it. Raises `CommError` if a file is
    missing or its own versions disagree."""
    named = os.environ.get("NVSHMEM_HOME")
    if named:
        home, fix = Path(named), f"set it to a folder with NVSHMEM's include and lib, or unset it and {_INSTALL}"
    else:
        home, fix = _installed(), f"{_INSTALL}, or set NVSHMEM_HOME"
        if home is None:
            raise CommError(f"NVSHMEM is missing (no module nvidia.nvshmem): {fix}")
    where = f"NVSHMEM_HOME is {home}, which" if named else f"NVSHMEM in {home}"
    for file in (_VERSION_HEADER, _DEVICE, _HOST):
        if not (home / file).is_file():
            raise CommError(f"{where} has no {file}: {fix}")
    header = (home / _VERSION_HEADER).read_text(encoding="utf-8", errors="replace")
    numbers = [re.search(rf"NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    if None in numbers:
        raise CommError(f"{where} has an {_VERSION_HEADER} that gives no version: {fix}")
    version = ".".join(number[1] for number in numbers)
    host = host_version(home)
    if host != version:
        raise CommError(f"{where} has headers of {version} but a {_HOST.name} of {host or 'no known version'}: {fix}")
    return Nvshmem(home, version)


def check(nvcc: Nvcc, nvshmem: Nvshmem) -> None:
    """Raises `CommError` if versions disagree that have to agree (see above)."""
    majors = {f"nvcc {nvcc.version} ({nvcc.path})": _major(nvcc.version)}
    packages = nvshmem.home.parent.parent.glob("nvidia_nvshmem_cu*.dist-info")  # a wheel's; else nothing says it
    majors |= {path.stem: m[1] for path in packages if (m := re.match(r"nvidia_nvshmem_cu(\d+)-", path.name))}
    if torch.version.cuda:
        majors[f"torch {torch.__version__} for CUDA {torch.version.cuda}"] = _major(torch.version.cuda)
    if len(set(majors.values())) > 1:
        raise CommError(
            f"{', '.join(majors)} are of different CUDA major versions: install a toolkit like torch's, or name it by "
            "CUDA_HOME"
        )
    bundled = _installed()
    if not torch.version.cuda or bundled is None or bundled == nvshmem.home:
        return
    loaded = host_version(bundled)
    if loaded and not serves(loaded, nvshmem.version):
        raise CommError(
            f"{nvshmem.home} is NVSHMEM {nvshmem.version}, but torch loads the {_HOST.name} of {loaded}, which cannot "
            f"serve it: unset NVSHMEM_HOME, or set it to one that is no newer than {loaded}"
        )


def serves(host: str, device: str) -> bool:
    """Whether NVSHMEM's host library of one version serves kernels built with the other."""
    (host_major, host_minor), (major, minor) = ([int(x) for x in v.split(".")[:2]] for v in (host, device))
    return host_major == major and host_minor >= minor


def host_version(home: Path) -> str | None:
    """The version that NVSHMEM's host library in `home` carries in its text; loading it would make it the one of this
    process. None where there is none."""
    try:
        with (home / _HOST).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            found = re.search(rb"NVSHMEM v(\d+\.\d+\.\d+)", text)
            return found[1].decode() if found else None
    except (OSError, ValueError):  # ValueError: an empty file
        return None


def _installed() -> Path | None:
    """The folder of the wheel, which has no module of its own: a namespace's."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # no `nvidia` at all
        return None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((folder for folder in folders if (folder / "include").is_dir()), None)


def _major(version: str) -> str:
    return version.split(".")[0]
