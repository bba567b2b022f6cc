"""NVSHMEM as the kernels use it: whether its pieces are of one version, which host library a process gets, whether the
kernels are built, and whether two ranks can reach each other.

Headers and device library go into our kernels, the bitcode into Triton's; the host library is loaded by torch and must
be the only one in the process, since each has a symmetric heap of its own. Device library and bitcode say nowhere
which version they are, but a wheel's RECORD has the hash of every file, which tells whether they are the wheel's.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moelab.doctor.check import MISSING, OK, WARN, Check, ChildFailed, ask
from moelab.doctor.libraries import GPU_EXTRA, torch_pin, version_of

SECTION = "NVSHMEM"
PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
STATUS = {2: "one rank a GPU", 3: "limited, as ranks share a GPU without MPS", 4: "ranks share a GPU under MPS"}

_CHILD = "import json; from moelab.doctor import nvshmem as n; print(json.dumps(n.{}()))"


def checks() -> list[Check]:
    """All but the test with two ranks, for which the GPUs must be known."""
    with ThreadPoolExecutor(2) as pool:
        built, mapped = pool.submit(_built), pool.submit(_mapped)
        return [*built.result()[:1], mapped.result(), *built.result()[1:], _mps()]


# --- versions, and the kernels made with them ---------------------------------------------------------------------


def _built() -> list[Check]:
    """[versions, kernels]"""
    try:
        found = ask(_CHILD.format("probe"))
    except ChildFailed as failure:
        return [Check(SECTION, "versions", WARN, f"cannot be asked: {failure}", "see torch above")]
    if found["library"]:
        kernels = Check(SECTION, "kernels", OK, f"built with NVSHMEM {found['built_with']}: {found['library']}")
    else:
        kernels = Check(SECTION, "kernels", MISSING, found["not_built"], found["build"])
    return [_versions(found), kernels]


def _versions(found: dict[str, Any]) -> Check:
    name, package = "versions", version_of(*PACKAGES)
    if found["version"] is None:
        return Check(SECTION, name, WARN if package or os.environ.get("NVSHMEM_HOME") else MISSING, found["reason"])
    facts, wrong = [f"headers and host library {found['version']}"], False
    if os.environ.get("NVSHMEM_HOME"):
        facts.append(f"in NVSHMEM_HOME={found['home']}; device library and bitcode say no version")
    elif package:
        altered = altered_files(package[0])
        wrong = bool(altered) or package[1] != found["version"]
        shown = " ".join(package)
        facts.append(
            f"not as in {shown}: {', '.join(altered)}" if altered else f"device library and bitcode as in {shown}"
        )
    pin = torch_pin()
    if pin:
        facts.append(f"torch asks for {pin[1]}")
        wrong |= found["version"].split(".")[:2] != pin[1].split(".")[:2]
    package, version = pin or package or (PACKAGES[0], found["version"])
    fix = f"pip install --force-reinstall --no-deps {package}=={version}" if wrong else ""
    return Check(SECTION, name, WARN if wrong else OK, "; ".join(facts), fix)


def probe() -> dict[str, Any]:
    """What moelab.comm finds of NVSHMEM, and whether it has built the kernels with it. Builds nothing."""
    from moelab.comm.build import COMMAND, find, unavailable
    from moelab.comm.toolchain import find_nvshmem
    from moelab.config import MoelabError

    found: dict[str, Any] = dict.fromkeys(("home", "version", "reason", "library", "built_with", "not_built"))
    found["build"] = ""
    try:
        nvshmem = find_nvshmem()
        found |= {"home": str(nvshmem.home), "version": nvshmem.version}
    except MoelabError as error:
        found["reason"] = str(error)
    if reason := unavailable():
        return found | {"not_built": f"not built, and cannot be here: {reason}"}
    if (built := find()) is None:
        return found | {"not_built": "not built for these sources and tools", "build": f"on a GPU host: {COMMAND}"}
    return found | {"library": str(built.library), "built_with": built.nvshmem}


def altered_files(package: str) -> list[str]:
    """Names of the package's libraries and version header that are gone, or not as its RECORD has them."""
    altered = []
    for file in importlib.metadata.files(package) or []:
        if not file.hash or not re.search(r"libnvshmem_(device|host)[\w.]*$|nvshmem_version\.h$", file.name):
            continue
        try:
            with open(file.locate(), "rb") as stream:
                digest = hashlib.file_digest(stream, file.hash.mode).digest()
        except OSError:
            digest = b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            altered.append(file.name)
    return altered


# --- the host library of a process --------------------------------------------------------------------------------


def _mapped() -> Check:
    name = "host library"
    if version_of(*PACKAGES) is None:
        return Check(SECTION, name, MISSING, "none to load: NVSHMEM is not installed")
    try:
        found = ask(_CHILD.format("probe_mapped"))
    except ChildFailed as failure:
        return Check(SECTION, name, WARN, f"cannot be asked: {failure}", "see torch and nvshmem4py above")
    paths, who = found["paths"], f"torch and {found['loader']}"
    if len(paths) == 1:
        return Check(SECTION, name, OK, f"one in a process with {who}: {paths[0]}")
    if not paths:
        return Check(SECTION, name, MISSING, f"none in a process with {who}", GPU_EXTRA)
    return Check(
        SECTION,
        name,
        WARN,
        f"{len(paths)} in one process with {who}: {', '.join(paths)}",
        "keep one: uninstall the other or take it from LD_LIBRARY_PATH, and import torch first",
    )


def probe_mapped() -> dict[str, Any]:
    """Which libnvshmem_host are in this process once torch, and nvshmem4py if it is there, have loaded theirs."""
    import torch  # noqa: F401  # first: its host library then serves nvshmem4py too

    loader = "no nvshmem4py"
    if version_of("nvshmem4py-cu13", "nvshmem4py-cu12"):
        import nvshmem.core as nvshmem

        loader = f"nvshmem4py {nvshmem.get_version().nvshmem4py_version}"  # asking for it loads the host library
    return {"paths": host_libraries(Path("/proc/self/maps").read_text()), "loader": loader}


def host_libraries(maps: str) -> list[str]:
    """The distinct files in the text of /proc/<pid>/maps, which shows a link as the file it points to."""
    return sorted({m[0] for line in maps.splitlines() if (m := re.search(r"/\S*libnvshmem_host\S*$", line))})


# --- several ranks on a GPU ---------------------------------------------------------------------------------------


def _mps() -> Check:
    """Asked as NVSHMEM asks: without a server it takes ranks that share a GPU for limited ones."""
    name, why = "MPS", "matters only when ranks share a GPU"
    if shutil.which("nvidia-cuda-mps-control") is None:
        return Check(SECTION, name, MISSING, f"no nvidia-cuda-mps-control on PATH ({why})")
    try:
        said = subprocess.run(
            ["nvidia-cuda-mps-control"], input="get_server_list\n", capture_output=True, text=True, timeout=10
        )
        servers = said.stdout.split() if said.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        servers = []
    if servers and all(server.isdecimal() for server in servers):
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        return Check(
            SECTION,
            name,
            OK,
            f"a server runs; CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {share or 'not set'}; a GPU's ranks may have "
            "100 in all",
        )
    return Check(
        SECTION,
        name,
        MISSING,
        f"no server runs: ranks that share a GPU get no NVSHMEM teams and collectives ({why})",
        "nvidia-cuda-mps-control -d",
    )


# --- two ranks ----------------------------------------------------------------------------------------------------


def put_signal_check(gpu_count: int) -> Check:
    from moelab.doctor import put_signal

    name = "put-signal"
    if not gpu_count:
        return Check(SECTION, name, MISSING, "not tried: no GPU")
    if version_of("nvshmem4py-cu13", "nvshmem4py-cu12") is None:
        return Check(SECTION, name, MISSING, "not tried: nvshmem4py is not installed", GPU_EXTRA)
    try:
        ranks = put_signal.run(gpu_count)
    except ChildFailed as failure:
        return Check(
            SECTION,
            name,
            WARN,
            f"two ranks on this host: {failure}",
            "NVSHMEM_DEBUG=INFO moelab doctor says more; kernels/RUNBOOK.md lists signs and causes",
        )
    where = " and ".join(f"GPU {rank['gpu']}" for rank in ranks) if ranks[0]["gpu"] != ranks[1]["gpu"] else "GPU 0 both"
    shared = all(rank["shared"] for rank in ranks)
    return Check(
        SECTION,
        name,
        OK if shared else WARN,
        f"two ranks ({where}): {put_signal.BYTES} bytes and a signal came each way; peers' memory is "
        f"{'' if shared else 'not '}mapped; {STATUS.get(ranks[0]['status'], 'unknown status')}; initialised in "
        f"{max(rank['init_s'] for rank in ranks):.1f} s",
        "" if shared else "on one node it should be: see links above, and NVSHMEM_DISABLE_P2P",
    )
