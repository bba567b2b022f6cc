"""Building the kernels: `kernels/*.cu` into one shared library, once for one content.

A build's name is a hash of all that decides what comes out: the sources, the flags, nvcc, NVSHMEM. So nothing is ever
out of date: other contents are another build, in another folder. It is made in a folder beside its own and renamed,
hence there as a whole or not at all, and under a lock, hence once on a node however many ranks ask for it.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moelab.comm.errors import CommError
from moelab.comm.toolchain import Nvcc, Nvshmem, check, find_nvcc, find_nvshmem
from moelab.share import share_dir

COMMAND = "moelab kernels build"
LIBRARY = "libmoelab_kernels.so"
ARCH = "sm_90a"  # Hopper, with the instructions that only it has
LIMIT_S = 600.0  # of one compilation, and of the wait for another process's build

_GENCODE = "-gencode=arch=compute_90a,code=sm_90a"
# -rdc: NVSHMEM's device library is linked on the device. What is not marked for export stays inside.
_COMPILE = ("-std=c++17", "-O3", _GENCODE, "-rdc=true", "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden")
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
    nvshmem: str  # the version whose device half is in it
    facts: dict  # build.json: what went in, seconds, exports


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
            "compile": list(_COMPILE),
            "link": list(_LINK),
            "nvcc": self.nvcc.version,
            "nvshmem": self.nvshmem.version,
            "nvshmem_home": str(self.nvshmem.home),  # the library looks for its host half there, if torch has none
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


def build(what: Recipe) -> Built:
    """The build that `what` describes: at once if it is there; else compiled here, or by another process while this
    one waits. Raises `CommError` with the compiler's words, and leaves no build, if it fails."""
    if built := what.find():
        return built
    root, failure = cache_dir(), cache_dir() / f"{what.key}.log"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f"{what.key}.lock").open("a+")
    except OSError as error:
        raise CommError(f"cannot write to {root}: {error.strerror}; set MOELAB_CACHE to a folder that can") from None
    asked = time.time()
    with lock, _locked(lock):
        if built := what.find():
            return built
        if failure.exists() and failure.stat().st_mtime >= asked:  # it failed while we waited; so would we
            raise CommError(f"another process could not build the kernels; what the compiler said is in {failure}")
        for left in root.glob(f"{what.key}.tmp*"):  # by a process that was killed; nobody else has the lock
            shutil.rmtree(left, ignore_errors=True)
        log.warning("building the kernels with nvcc, once for these sources: a minute or so")
        temporary = Path(tempfile.mkdtemp(prefix=f"{what.key}.tmp", dir=root))
        try:
            _make(what, temporary, failure)
            temporary.chmod(0o755)  # mkdtemp lets nobody else in
            shutil.rmtree(what.folder, ignore_errors=True)  # a damaged one, else `find` had found it
            os.replace(temporary, what.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        failure.unlink(missing_ok=True)
    built = what.find()
    assert built is not None
    return built


def ensure() -> Built:
    """The library for these sources, wherever it comes from: built by this toolkit, or built now. Where there is no
    nvcc, as on many hosts that only run things, it is the newest build of these sources that lies in the cache."""
    try:
        find_nvcc()
    except CommError as missing:
        digest, candidates = _digest(_sources(None)), []
        for folder in cache_dir().glob("*/"):
            built = _read(folder)
            if built and (built.facts["sources"], built.facts["arch"]) == (digest, ARCH):
                candidates.append(built)
        if not candidates:
            raise CommError(f"the kernels are not built (nothing for these sources in {cache_dir()}), and {missing}; "
                            f"or run `{COMMAND}` where nvcc is, with the same MOELAB_CACHE") from None  # fmt: skip
        return max(candidates, key=lambda built: built.facts["time"])
    return build(recipe())


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
        return Built(folder / LIBRARY, facts["nvshmem"], facts) if (folder / LIBRARY).is_file() else None
    except (OSError, ValueError, KeyError):
        return None


@contextlib.contextmanager
def _locked(file) -> Iterator[None]:
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
                log.warning("%s builds the kernels; waiting for it, at most %.0f s", who, LIMIT_S)
                said = True
            time.sleep(0.1)
        except OSError as error:
            raise CommError(f"cannot lock {file.name}: {error.strerror}; set MOELAB_CACHE to a local folder") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    yield


def _make(what: Recipe, folder: Path, failure: Path) -> None:
    """Everything of a build into `folder`; on an error the log goes to `failure`."""
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
        run(nvcc, *_COMPILE, f"-I{home / 'include'}", "-c", unit, "-o", out, doing=f"compiling {unit.name}")
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
        "exports": exports(what.sources),
        "seconds": round(time.monotonic() - started, 1),
        "time": time.time(),
    }
    (folder / "build.log").write_text("\n".join(said), encoding="utf-8")
    (folder / "build.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
