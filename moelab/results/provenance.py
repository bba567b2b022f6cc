"""Where a number came from: GPU, driver, versions, commit, asked of nvidia-smi, package metadata and git.

Nothing is asked at import, and torch is never imported. `collect()` runs once per benchmark, and its result
goes into every record of that run.

The commit is taken, in this order, from the arguments, from MOELAB_COMMIT (with MOELAB_DIRTY, default 0) for
copies without a `.git`, such as a container image or a cluster's work folder, and from git. Git is believed
only if the repository is the one that holds this package: an environment inside somebody's own repository
would otherwise lend its commit. With none of the three the commit is "unknown", and the record counts as
dirty.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moelab.config import MoelabError
from moelab.results.record import UNKNOWN_COMMIT

LIBRARIES = (
    "moelab",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nvshmem-cu13",
    "nvidia-nvshmem-cu12",
    "nvshmem4py-cu13",
    "nvshmem4py-cu12",
    "flashinfer-python",
    "sgl-deep-gemm",
)
# What can change a number. Records, notebooks and prose cannot, so editing them does not make a measurement
# dirty.
SOURCES = ("moelab", "kernels", ":(exclude)moelab/data")

log = logging.getLogger(__name__)


class ProvenanceError(MoelabError):
    """The origin of a measurement cannot be established."""


@dataclass(frozen=True)
class Provenance:
    """The fields of a Record that say where; meanings as there."""

    gpu: str
    gpu_count: int
    driver: str
    versions: Mapping[str, str]
    commit: str
    dirty: bool


@dataclass(frozen=True)
class SmiGPU:
    """One row of nvidia-smi."""

    index: int
    name: str
    memory_bytes: int
    driver: str


def collect(
    device: str = "auto",
    *,
    gpu_count: int | None = None,
    commit: str | None = None,
    dirty: bool | None = None,
) -> Provenance:
    """`device`: "cuda", "cpu", or "auto" (cuda where nvidia-smi shows a GPU). `gpu_count`: GPUs that take
    part, by default all visible ones. Raises ProvenanceError when "cuda" is asked for and there is none, or
    fewer than that."""
    commit, dirty = source_state(commit, dirty)
    versions = library_versions()
    gpus = visible_gpus() if device in ("auto", "cuda") else []
    if device not in ("auto", "cuda", "cpu"):
        raise ProvenanceError(f"device is {device!r}; legal: auto, cuda, cpu")
    if device == "cpu" or (device == "auto" and not gpus):
        return Provenance("cpu", 0, "", versions, commit, dirty)
    if not gpus:
        raise ProvenanceError("device is cuda, but nvidia-smi shows no GPU: run on a GPU host, or with device cpu")
    count = len(gpus) if gpu_count is None else gpu_count
    if not 1 <= count <= len(gpus):
        raise ProvenanceError(f"gpu_count is {count}, but {len(gpus)} GPUs are visible: 1 to {len(gpus)} is legal")
    name = " + ".join(dict.fromkeys(gpu.name for gpu in gpus[:count]))  # mixed GPUs are not passed off as one kind
    return Provenance(name, count, gpus[0].driver, versions, commit, dirty)


def visible_gpus() -> list[SmiGPU]:
    """What nvidia-smi lists, cut down by CUDA_VISIBLE_DEVICES; [] without nvidia-smi or a working driver."""
    query = [
        "nvidia-smi",
        "--query-gpu=index,uuid,name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except FileNotFoundError:
        return []
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi does not answer (%s): taken as no GPU", error)
        return []
    return parse_smi(text, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_smi(text: str, visible: str | None) -> list[SmiGPU]:
    """Rows of the query above. `visible` as in CUDA_VISIBLE_DEVICES: indices or UUID prefixes, up to the
    first that names no GPU; that is CUDA's own rule."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 4]
    gpus = {
        uuid: SmiGPU(int(index), name, int(mib) * 2**20 if mib.isdigit() else 0, driver)
        for index, uuid, name, mib, driver in rows
    }
    if visible is None:
        return list(gpus.values())
    chosen = []
    for entry in (x.strip() for x in visible.split(",")):
        hits = [g for uuid, g in gpus.items() if entry and (entry == str(g.index) or uuid.startswith(entry))]
        if not hits:
            break
        chosen.append(hits[0])
    return chosen


def library_versions() -> dict[str, str]:
    """Versions from package metadata (nothing is imported), the interpreter's, and the processor's name."""
    found = {"python": platform.python_version(), "cpu": cpu_name()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "moelab" not in found:  # run from a clone by PYTHONPATH
        from moelab import __version__

        found["moelab"] = __version__
    return dict(sorted(found.items()))


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine() or "unknown"


def source_state(commit: str | None = None, dirty: bool | None = None) -> tuple[str, bool]:
    """(commit, dirty) in the order of the module's text. `dirty` alone overrides what git says."""
    if commit is None and (env := os.environ.get("MOELAB_COMMIT")):
        flag = os.environ.get("MOELAB_DIRTY", "0").lower()
        if flag not in ("0", "1", "false", "true"):
            raise ProvenanceError(f"MOELAB_DIRTY is {flag!r}; legal: 0, 1, false, true")
        commit, dirty = env, flag in ("1", "true") if dirty is None else dirty
    if commit is not None:
        if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
            raise ProvenanceError(f"commit is {commit!r}; legal: 7 to 40 lower-case hex digits (git rev-parse HEAD)")
        return commit, bool(dirty)
    found = _git_state()
    if found is None:
        log.info("commit unknown: no git repository holds this copy; set MOELAB_COMMIT to name it")
        return UNKNOWN_COMMIT, True
    return found[0], found[1] if dirty is None else dirty


def _git_state() -> tuple[str, bool] | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # a worktree has a file there
        return None
    # safe.directory: containers often run as another user than the clone's owner, and reading is harmless.
    git = ["git", "-c", "safe.directory=*", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=30, check=True)
        status = subprocess.run(
            [*git, "status", "--porcelain", "--", *SOURCES],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("git does not answer (%s): commit unknown", error)
        return None
    return head.stdout.strip(), bool(status.stdout.strip())
