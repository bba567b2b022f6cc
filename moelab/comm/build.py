"""Building the kernels: `kernels/*.cu` into one shared library, once for one content.

A build's name is a hash of all that decides what comes out: the sources, the flags, nvcc, NVSHMEM. So nothing is ever
out of date: other contents are another build, in another folder. It is made in a folder beside its own and renamed,
hence there as a whole or not at all, and under a lock, hence once on a node however many ranks ask for it. It
depends on no path, so a cache may be filled on one host and used on others.

All device code is in one library, since each library with NVSHMEM's device half needs an initialisation of its own.
`-Bsymbolic` and `--exclude-libs` keep that half to ourselves: torch's libtorch_nvshmem.so has another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moelab.comm.errors import CommError
from moelab.comm.toolchain import Nvcc, Nvshmem, check, find_nvcc, find_nvshmem
from moelab.config import MoelabError
from moelab.share import share_dir

COMMAND = "moelab kernels build"
LIBRARY = "libmoelab_kernels.so"
ARCH = "sm_90a"  # Hopper, with the instructions that only it has
LIMIT_S = 600.0  # of one compilation, and of the wait for another process's build

_GENCODE = "-gencode=arch=compute_90a,code=sm_90a"
# What is not marked for export stays inside.
_COMPILE = ("-std=c++17", "-O3", _GENCODE, "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden")
# For units that call NVSHMEM, whose device library is linked on the device. For others not: a function that is called
# could then have more registers than the kernel that calls it, which is an error.
_RELOCATABLE = "-rdc=true"
# No unversioned libnvshmem_host.so is in the wheel. `-z defs`: what is missing fails here, not when it is loaded.
_LINK = (
    "-shared", _GENCODE, "-cudart", "shared", "-lnvshmem_device", "-Xlinker", "-l:libnvshmem_host.so.3",
    "-Xlinker", "--exclude-libs=libnvshmem_device.a", "-Xlinker", "-Bsymbolic", "-Xlinker", "-z", "-Xlinker", "defs",
)  # fmt: skip
_READ_BY_NVCC = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A library that is there."""

    library: Path
    facts: dict  # build.json: what went in; exports, seconds, time

    @property
    def nvshmem(self) -> str:
        """The version whose device half is in it."""
        return self.facts["nvshmem"]


@dataclass(frozen=True)
class Recipe:
    """What would be built, from what, and where it goes. `recipe()` makes one."""

    sources: tuple[Path, ...]
    nvcc: Nvcc
    nvshmem: Nvshmem

    @property
    def ingredients(self) -> dict:
        """All that decides what comes out."""
        return {
            "sources": _digest(self.sources),
            "arch": ARCH,
            "compile": [*_COMPILE, _RELOCATABLE],
            "link": list(_LINK),
            "nvcc": self.nvcc.version,
            "nvshmem": self.nvshmem.version,
            **{name: os.environ[name] for name in _READ_BY_NVCC if os.environ.get(name)},
        }

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.ingredients, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        return cache_dir() / self.key

    def find(self) -> Built | None:
        """The build, if it is there."""
        return _read(self.folder)


def cache_dir() -> Path:
    """$MOELAB_CACHE/kernels, or ~/.cache/moelab/kernels."""
    named = os.environ.get("MOELAB_CACHE")
    return (Path(named) if named else Path.home() / ".cache" / "moelab") / "kernels"


def recipe(sources: Path | None = None) -> Recipe:
    """Looks for the sources (moelab's own, unless a folder is given) and for the tools. Raises `CommError`, or the
    `MoelabError` of `share_dir`, where something is missing or versions disagree."""
    files = _sources(sources)
    nvcc, nvshmem = find_nvcc(), find_nvshmem()
    check(nvcc, nvshmem)
    return Recipe(files, nvcc, nvshmem)


def build(what: Recipe, say: Callable[[str], None] = log.warning) -> Built:
    """The build that `what` describes: at once if it is there; else compiled here, or by another process while this
    one waits, which it tells by `say`. Raises `CommError` with the compiler's words, and leaves no build, if it
    fails."""
    if built := what.find():
        return built
    root, failure = cache_dir(), cache_dir() / f"{what.key}.log"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f"{what.key}.lock").open("a+")
    except OSError as error:
        raise CommError(f"cannot write to {root}: {error.strerror}; set MOELAB_CACHE to a folder that can") from None
    asked = time.time()
    with lock, _locked(lock, say):
        if built := what.find():
            return built
        if failure.exists() and failure.stat().st_mtime >= asked:  # it failed while we waited; so would we
            raise CommError(f"another process could not build the kernels; what the compiler said is in {failure}")
        for left in root.glob(f"{what.key}.tmp*"):  # by a process that was killed; nobody else has the lock
            shutil.rmtree(left, ignore_errors=True)
        say("building the kernels, once for these sources: a minute or so")
        temporary = Path(tempfile.mkdtemp(prefix=f"{what.key}.tmp", dir=root))
        try:
            facts = _make(what, temporary, failure)
            temporary.chmod(0o755)  # mkdtemp lets nobody else in
            shutil.rmtree(what.folder, ignore_errors=True)  # a damaged one, else `find` had found it
            os.replace(temporary, what.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        failure.unlink(missing_ok=True)
    return Built(what.folder / LIBRARY, facts)


def find() -> Built | None:
    """The library for these sources, if it is built: by this toolkit and NVSHMEM; or, where there is no nvcc, as on
    many hosts that only run things, the newest of any. Raises `CommError` where versions disagree."""
    try:
        find_nvcc()
    except CommError:
        digest = _digest(_sources(None))
        found = [built for folder in cache_dir().glob("*/") if (built := _read(folder))]
        found = [x for x in found if (x.facts["sources"], x.facts["arch"]) == (digest, ARCH)]
        return max(found, key=lambda built: built.facts["time"], default=None)
    return recipe().find()


def ensure() -> Built:
    """The library for these sources, built now if it is not there. Raises `CommError` where it cannot be."""
    if built := find():
        return built
    try:
        return build(recipe())
    except CommError as error:
        raise CommError(
            f"the kernels are not built: {error}. `{COMMAND}` builds them, also elsewhere, into {cache_dir()} "
            "(MOELAB_CACHE names another folder)"
        ) from None


def unavailable() -> str | None:
    """Why the library is not to be had, and what to do; None if it is built or could be. Compiles nothing."""
    try:
        if find() is None:
            recipe()
    except MoelabError as error:
        return str(error)
    return None


def exports(sources: tuple[Path, ...]) -> list[str]:
    """The functions that the headers declare for export."""
    text = "".join(path.read_text(encoding="utf-8") for path in sources if path.suffix == ".h")
    return sorted(set(re.findall(r"\b(moelab_\w+)\s*\(", re.sub(r"//.*", "", text))))


def _sources(folder: Path | None) -> tuple[Path, ...]:
    folder = folder or share_dir("kernels")
    files = tuple(sorted(path for path in folder.iterdir() if path.suffix in (".cu", ".cuh", ".h")))
    if not any(path.suffix == ".cu" for path in files):
        raise CommError(f"no kernels (*.cu) in {folder}: reinstall moelab")
    return files


def _digest(files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _read(folder: Path) -> Built | None:
    """The build in a folder; None where there is none, or somebody damaged it."""
    try:
        facts = json.loads((folder / "build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Built(folder / LIBRARY, facts) if (folder / LIBRARY).is_file() else None


@contextlib.contextmanager
def _locked(file, say: Callable[[str], None]) -> Iterator[None]:
    """Holds `file` alone; says whom it waits for, and not beyond LIMIT_S. The system lets go of it when a process
    dies."""
    started, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "another process"
            if time.monotonic() - started > LIMIT_S:
                raise CommError(
                    f"waited {LIMIT_S:.0f} s for {who}, which builds the kernels: end it, or look why it takes so long "
                    f"(it holds {file.name})"
                ) from None
            if not said:
                say(f"{who} builds the kernels; waiting for it, at most {LIMIT_S:.0f} s")
                said = True
            time.sleep(0.1)
        except OSError as error:
            raise CommError(f"cannot lock {file.name}: {error.strerror}; set MOELAB_CACHE to a local folder") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    yield


def _make(what: Recipe, folder: Path, failure: Path) -> dict:
    """Everything of a build into `folder`, and its facts; on an error the log goes to `failure`."""
    started, said = time.monotonic(), []

    def run(*arguments: str | Path, doing: str) -> str:
        command = [str(x) for x in arguments]
        try:
            done = subprocess.run(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                timeout=LIMIT_S,
            )  # fmt: skip
            output, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired:
            output, status = f"error: no end within {LIMIT_S:.0f} s", 124
        except OSError as error:
            output, status = f"error: {error}", 127
        said.append(f"$ {' '.join(command)}\n{output}")
        if status:
            failure.write_text("\n".join(said), encoding="utf-8")
            lines = [line for line in output.splitlines() if line.strip()]
            telling = [line for line in lines if "error" in line.lower() or "undefined" in line][:5] or lines[-5:]
            raise CommError(f"{doing} failed with status {status}: {os.linesep.join(telling)} (all of it: {failure})")
        return output

    home, nvcc = what.nvshmem.home, what.nvcc.path
    units = [path for path in what.sources if path.suffix == ".cu"]

    def compiled(unit: Path) -> Path:
        out = folder / f"{unit.stem}.o"
        options = [*_COMPILE, *[_RELOCATABLE] * (b"#include <nvshmem.h>" in unit.read_bytes())]
        run(nvcc, *options, f"-I{home / 'include'}", "-c", unit, "-o", out, doing=f"compiling {unit.name}")
        return out

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compiled, units))
    library = folder / LIBRARY
    run(
        nvcc,
        *objects,
        f"-L{home / 'lib'}",
        *_LINK,
        "-Xlinker",
        f"-rpath={home / 'lib'}",
        "-o",
        library,
        doing="linking",
    )
    found = {line.split()[-1] for line in run("nm", "-D", "--defined-only", library, doing="nm").splitlines()}
    missing = [name for name in exports(what.sources) if name not in found]
    if missing:
        said.append(f"declared in the headers, but not exported: {', '.join(missing)}")
        failure.write_text("\n".join(said), encoding="utf-8")
        raise CommError(f"the library does not export {', '.join(missing)}, which the headers declare")
    for path in objects:
        path.unlink()
    facts = what.ingredients | {
        "key": what.key,
        "nvshmem_home": str(home),
        "exports": exports(what.sources),
        "seconds": round(time.monotonic() - started, 1),
        "time": time.time(),
    }
    (folder / "build.log").write_text("\n".join(said), encoding="utf-8")
    (folder / "build.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return facts
