"""Building and loading the kernels.

Most of it runs with scripts in the place of nvcc and nm, which count what they are asked. The end compiles the real
kernels, where nvcc is: no GPU is needed for that.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from moelab import cli
from moelab.comm import CommError, build, library, toolchain
from moelab.share import share_dir

ROOT = Path(__file__).resolve().parents[2]
POSIX = pytest.mark.skipif(os.name != "posix", reason="the stand-in for nvcc is a shell script")

# Compiling copies the source; linking joins the objects; nm finds the lines "EXPORT name". While the file WAIT is
# there, compiling goes on, for a minute at most.
NVCC = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V$(cat "$here/version")"; exit; fi
echo "$@" >> "$here/calls"
inputs= out= unit=
while [ $# -gt 0 ]; do
  case "$1" in -o) out=$2; shift ;; *.cu) unit=$1 ;; *.o) inputs="$inputs $1" ;; esac
  shift
done
if [ -z "$unit" ]; then cat $inputs > "$out"; exit; fi
tries=0
while [ -e "$here/WAIT" ] && [ $tries -lt 3000 ]; do sleep 0.02; tries=$((tries + 1)); done
if grep -q BROKEN "$unit" || [ -e "$here/FAIL" ]; then
  echo "note: 1 of many"; echo "$unit(3): error: identifier \\"x\\" is undefined"; exit 2
fi
cp "$unit" "$out"
"""
NM = """#!/bin/sh
for file; do :; done
sed -n 's/^EXPORT /0000 T /p' "$file"
"""
HEADER = "// as moelab_ghost() is not\nint moelab_first(int);\nvoid moelab_second(void);\n"


class Tools:
    """What a build finds: scripts, an NVSHMEM that is text, sources, a cache; all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.nvshmem = folder / "bin", folder / "site/nvidia/nvshmem"
        self.sources, self.cache = folder / "sources", folder / "cache"
        for path in (self.bin, self.sources, self.nvshmem / "include/non_abi", self.nvshmem / "lib"):
            path.mkdir(parents=True)
        for name, text in (("nvcc", NVCC), ("nm", NM)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        (self.bin / "version").write_text("13.0.88")
        self.set_nvshmem("3.4.5")
        (self.sources / "exchange.h").write_text(HEADER)
        (self.sources / "first.cu").write_text("EXPORT moelab_first\n")
        (self.sources / "second.cu").write_text("EXPORT moelab_second\n")

    def set_nvshmem(self, version: str, host: str | None = None) -> None:
        numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        text = "".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in numbers)
        (self.nvshmem / "include/non_abi/nvshmem_version.h").write_text(text)
        (self.nvshmem / "lib/libnvshmem_host.so.3").write_bytes(f"\0NVSHMEM v{host or version}\0".encode())
        (self.nvshmem / "lib/libnvshmem_device.a").write_bytes(b"!<arch>\n")

    @property
    def calls(self) -> list[str]:
        path = self.bin / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def left(self) -> set[str]:
        """What lies in the cache but locks."""
        return {path.name for path in (self.cache / "kernels").iterdir() if path.suffix != ".lock"}

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "MOELAB_CACHE": str(self.cache),
            "NVSHMEM_HOME": str(self.nvshmem),
        }


@pytest.fixture
def tools(tmp_path, monkeypatch):
    tools = Tools(tmp_path)
    for name in ("CUDA_HOME", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in tools.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(build, "share_dir", lambda name: tools.sources)
    return tools


pytestmark = POSIX


def test_a_build_is_made_once_and_says_what_went_in(tools):
    said: list[str] = []
    recipe = build.recipe()
    assert recipe.find() is None and not tools.cache.exists()
    built = build.build(recipe, said.append)
    assert len(said) == 1 and len(tools.calls) == 3  # two units and the link
    assert built.library == tools.cache / "kernels" / recipe.key / "libmoelab_kernels.so"
    assert sorted(built.library.read_text().split()) == ["EXPORT", "EXPORT", "moelab_first", "moelab_second"]
    facts = json.loads((built.library.parent / "build.json").read_text())
    assert facts == built.facts and facts["key"] == recipe.key
    assert (facts["nvcc"], facts["nvshmem"], facts["arch"]) == ("13.0.88", "3.4.5", "sm_90a")
    assert facts["exports"] == ["moelab_first", "moelab_second"]  # not the one in a comment
    assert "-rdc=true" in facts["compile"] and facts["seconds"] >= 0
    assert (built.library.parent / "build.log").read_text().count("$ ") == 4
    assert {path.name for path in built.library.parent.iterdir()} == {built.library.name, "build.json", "build.log"}

    again = build.build(build.recipe(), said.append)
    assert again == built and build.ensure() == built and len(said) == 1 and len(tools.calls) == 3
    assert tools.left() == {recipe.key}


def test_all_that_decides_the_outcome_is_in_the_key(tools, monkeypatch):
    def key() -> str:
        return build.recipe().key

    seen = {key()}

    def changed() -> None:
        assert key() not in seen
        seen.add(key())

    for name in ("first.cu", "exchange.h", "new.cuh"):
        with (tools.sources / name).open("a") as file:
            file.write("\n")
        changed()
    (tools.sources / "first.cu").rename(tools.sources / "firsts.cu")  # in the same place of the order
    changed()
    (tools.bin / "version").write_text("13.1.2")
    changed()
    tools.set_nvshmem("3.4.6")
    changed()
    monkeypatch.setattr(build, "_COMPILE", (*build._COMPILE, "-DX"))
    changed()
    monkeypatch.setattr(build, "_LINK", (*build._LINK, "-lx"))
    changed()
    monkeypatch.setattr(build, "ARCH", "sm_100a")
    changed()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    changed()

    same = key()
    shutil.copytree(tools.nvshmem, elsewhere := tools.nvshmem.with_name("elsewhere"))
    monkeypatch.setenv("NVSHMEM_HOME", str(elsewhere))
    shutil.copytree(tools.sources, copied := tools.sources.with_name("copied"))
    monkeypatch.setattr(build, "share_dir", lambda name: copied)
    (tools.sources / "README.md").write_text("prose")
    os.utime(tools.sources / "second.cu", (1, 1))
    assert key() == same


def until(condition, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def test_two_processes_compile_once(tools, tmp_path):
    (tools.bin / "WAIT").touch()
    code = (
        "import sys; from pathlib import Path; from moelab.comm import build\n"
        "recipe, say = build.recipe(Path(sys.argv[1])), lambda text: print(text, file=sys.stderr, flush=True)\n"
        "print(build.build(recipe, say).library)"
    )
    env = {**os.environ, **tools.environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outputs = [tmp_path / f"err{i}" for i in range(2)]
    children = []
    for path in outputs:
        with path.open("w") as file:
            command = [sys.executable, "-c", code, str(tools.sources)]
            children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=file, text=True))
    try:
        until(lambda: any("waiting for it" in path.read_text() for path in outputs))
        (waits,) = [i for i in range(2) if "waiting for it" in outputs[i].read_text()]
        assert f"process {children[1 - waits].pid} on " in outputs[waits].read_text()
        assert tools.left() and not any((tools.cache / "kernels").glob("*/build.json"))  # not there before it is whole
        (tools.bin / "WAIT").unlink()
        paths = {child.communicate(timeout=60)[0] for child in children}
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0]
    assert len(paths) == 1 and Path(paths.pop().strip()).is_file()
    assert len(tools.calls) == 3


def test_a_failed_build_leaves_only_what_the_compiler_said(tools):
    (tools.bin / "FAIL").touch()
    recipe = build.recipe()
    with pytest.raises(CommError, match=r'compiling \w+.cu failed with status 2: .*identifier "x" is undef') as failed:
        build.build(recipe)
    log = tools.cache / "kernels" / f"{recipe.key}.log"
    assert str(log) in str(failed.value) and "note: 1 of many" in log.read_text()
    assert "note" not in str(failed.value)
    assert tools.left() == {log.name} and recipe.find() is None
    (tools.bin / "FAIL").unlink()
    build.build(recipe)
    assert tools.left() == {recipe.key}  # the log went with the failure


def test_who_waited_for_a_build_that_failed_does_not_try_it_again(tools):
    (tools.sources / "second.cu").unlink()
    for name in ("WAIT", "FAIL"):
        (tools.bin / name).touch()
    recipe, said, errors = build.recipe(), [], []

    def ask() -> None:
        try:
            build.build(recipe, said.append)
        except CommError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: sum("waiting for it" in text for text in said) == 2)
    (tools.bin / "WAIT").unlink()
    for thread in threads:
        thread.join(60)
    assert len(tools.calls) == 1
    assert sorted("another process could not build" in text for text in errors) == [False, True, True]


def test_what_a_killed_builder_left_is_removed(tools):
    recipe = build.recipe()
    left = tools.cache / "kernels" / f"{recipe.key}.tmpdead"
    left.mkdir(parents=True)
    (left / "first.o").touch()
    other = tools.cache / "kernels" / "0123456789abcdef.tmpbusy"  # another build's
    other.mkdir()
    build.build(recipe)
    assert not left.exists() and other.exists()


@pytest.mark.parametrize("damage", ["libmoelab_kernels.so", "build.json"])
def test_a_damaged_build_is_made_anew(tools, damage):
    built = build.build(build.recipe())
    (built.library.parent / damage).unlink()
    assert build.find() is None
    assert build.build(build.recipe()).library.is_file() and build.find() is not None


def test_the_wait_for_another_builder_ends(tools, monkeypatch):
    monkeypatch.setattr(build, "LIMIT_S", 0.3)
    recipe = build.recipe()
    (tools.cache / "kernels").mkdir(parents=True)
    with (tools.cache / "kernels" / f"{recipe.key}.lock").open("w") as file:
        file.write("process 7 on elsewhere")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CommError, match=r"waited 0 s for process 7 on elsewhere.*end it"):
            build.build(recipe)
    assert not tools.calls


def test_a_compiler_that_does_not_end_is_an_error(tools, monkeypatch):
    monkeypatch.setattr(build, "LIMIT_S", 0.3)
    (tools.bin / "WAIT").touch()
    try:
        with pytest.raises(CommError, match="error: no end within 0 s"):
            build.build(build.recipe())
    finally:
        (tools.bin / "WAIT").unlink()


def test_a_function_that_is_declared_must_be_exported(tools):
    (tools.sources / "second.cu").write_text("moelab_second, but hidden\n")
    with pytest.raises(CommError, match="does not export moelab_second"):
        build.build(build.recipe())
    assert build.find() is None


def test_a_cache_that_cannot_be_written_is_named(tools, monkeypatch):
    tools.cache.parent.joinpath("taken").touch()
    monkeypatch.setenv("MOELAB_CACHE", str(tools.cache.parent / "taken"))
    with pytest.raises(CommError, match="cannot write to .*taken.*set MOELAB_CACHE"):
        build.build(build.recipe())


def no_nvcc(tools, monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "_USUAL", tools.bin / "none")
    monkeypatch.setenv("PATH", str(tools.sources))


def test_without_nvcc_what_is_built_is_found_and_the_rest_is_an_error(tools, monkeypatch):
    built = build.build(build.recipe())
    assert build.unavailable() is None
    no_nvcc(tools, monkeypatch)
    monkeypatch.delenv("NVSHMEM_HOME")
    assert build.find() == built == build.ensure() and build.unavailable() is None
    (tools.sources / "first.cu").write_text("EXPORT moelab_first \n")
    assert build.find() is None
    with pytest.raises(
        CommError, match="the kernels are not built: nvcc is missing.*moelab kernels build.*MOELAB_CACH"
    ):
        build.ensure()
    assert build.unavailable().startswith("nvcc is missing")


def test_no_sources_is_an_error(tools):
    for path in tools.sources.glob("*.cu"):
        path.unlink()
    with pytest.raises(CommError, match=r"no kernels \(\*\.cu\) in "):
        build.recipe()


def _no_cuda_home(tools, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tools.sources))


def _nvcc_breaks(tools, monkeypatch):
    (tools.bin / "nvcc").write_text("#!/bin/sh\necho cannot find cicc >&2; exit 1\n")


def _nvcc_cannot_run(tools, monkeypatch):
    (tools.bin / "nvcc").write_text("#!/no/such/interpreter\n")


def _no_nvshmem(tools, monkeypatch):
    monkeypatch.delenv("NVSHMEM_HOME")
    monkeypatch.setattr(toolchain, "_installed", lambda: None)


def _no_device_library(tools, monkeypatch):
    (tools.nvshmem / "lib/libnvshmem_device.a").unlink()


def _no_host_library(tools, monkeypatch):
    (tools.nvshmem / "lib/libnvshmem_host.so.3").unlink()
    monkeypatch.delenv("NVSHMEM_HOME")
    monkeypatch.setattr(toolchain, "_installed", lambda: tools.nvshmem)


def _strange_header(tools, monkeypatch):
    (tools.nvshmem / "include/non_abi/nvshmem_version.h").write_text("#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n")


def _two_halves(tools, monkeypatch):
    tools.set_nvshmem("3.5.0", host="3.4.5")


def _no_version(tools, monkeypatch):
    (tools.nvshmem / "lib/libnvshmem_host.so.3").write_bytes(b"")


def _old_toolkit(tools, monkeypatch):
    (tools.bin / "version").write_text("12.8.93")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def _other_wheel(tools, monkeypatch):
    (tools.nvshmem.parents[1] / "nvidia_nvshmem_cu12-3.4.5.dist-info").mkdir()


def _torch_has_an_older_one(tools, monkeypatch):
    bundled = Tools(tools.cache.parent / "torch").nvshmem
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolchain, "_installed", lambda: bundled)
    tools.set_nvshmem("3.5.0")


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (_no_cuda_home, "CUDA_HOME is .*sources, which has no bin/nvcc: set it to a CUDA 13 toolkit"),
        (no_nvcc, r"nvcc is missing \(looked on PATH and for .*\): install a CUDA 13 toolkit, or set CUDA_HOME"),
        (_nvcc_breaks, "nvcc --version does not say its version: cannot find cicc; set CUDA_HOME"),
        (_nvcc_cannot_run, "nvcc does not run: .*No such file"),
        (
            _no_nvshmem,
            r"NVSHMEM is missing \(no module nvidia.nvshmem\): pip install nvidia-nvshmem-cu13==3.4.5, or set",
        ),
        (_no_device_library, "NVSHMEM_HOME is .*, which has no lib/libnvshmem_device.a: set it to"),
        (_no_host_library, "NVSHMEM in .* has no lib/libnvshmem_host.so.3: pip install nvidia-nvshmem-cu13==3.4.5"),
        (_strange_header, "which has an include/non_abi/nvshmem_version.h that gives no version"),
        (_two_halves, "has headers of 3.5.0 but a libnvshmem_host.so.3 of 3.4.5"),
        (_no_version, "has headers of 3.4.5 but a libnvshmem_host.so.3 of no known version"),
        (_old_toolkit, r"nvcc 12.8.93 \(.*\), torch .* for CUDA 13.0 are of different CUDA major versions"),
        (_other_wheel, r"nvcc 13.0.88 \(.*\), nvidia_nvshmem_cu12-3.4.5 are of different CUDA major versions"),
        (
            _torch_has_an_older_one,
            "is NVSHMEM 3.5.0, but torch loads the libnvshmem_host.so.3 of 3.4.5.*unset NVSHMEM_",
        ),
    ],
)
def test_what_is_missing_or_disagrees_is_named(tools, monkeypatch, arrange, message):
    assert build.recipe()
    arrange(tools, monkeypatch)
    with pytest.raises(CommError, match=message):
        build.recipe()
    assert re.search(message, build.unavailable())


def test_cuda_home_goes_before_path(tools, monkeypatch):
    home = tools.cache.parent / "toolkit"
    shutil.copytree(tools.bin, home / "bin")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert toolchain.find_nvcc().path == home / "bin/nvcc"


def test_torchs_nvshmem_may_be_newer(tools, monkeypatch):
    _torch_has_an_older_one(tools, monkeypatch)
    tools.set_nvshmem("3.3.20")
    assert build.recipe().nvshmem.version == "3.3.20"
    serving = [("3.4.5", "3.4.5"), ("3.10.0", "3.9.9"), ("3.4.0", "3.4.5")]
    assert all(toolchain.serves(host, device) for host, device in serving)
    assert not any(toolchain.serves(*pair) for pair in [("3.4.5", "3.5.0"), ("4.0.0", "3.9.9"), ("3.9.9", "4.0.0")])


@pytest.fixture
def moelab(capsys):
    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err

    return call


def test_the_command_builds_and_tells(tools, moelab, monkeypatch):
    def told(*arguments: str) -> tuple[dict, str]:
        status, out, err = moelab("kernels", *arguments, "--json")
        assert status == 0, err
        return json.loads(out), err

    before, err = told("info")
    assert err == "" and not before["built"] and before["problem"] is None and not tools.calls
    assert before["sources"] == ["exchange.h", "first.cu", "second.cu"]
    status, out, err = moelab("kernels", "build")
    assert status == 0 and out == before["library"] + "\n" and err.startswith("building the kernels")
    facts, err = told("build")
    assert facts["library"] == before["library"] and err == "already built\n"

    after, _ = told("info")
    assert after["built"] and (after["key"], after["library"]) == (before["key"], before["library"])
    assert "moelab_a2a_launch" in after["exports_missing"]  # the stand-ins are not the kernels
    status, out, _ = moelab("kernels", "info")
    assert status == 0 and re.search(r"^built +yes$", out, re.M) and before["key"] in out

    no_nvcc(tools, monkeypatch)
    found, _ = told("info")
    assert found["problem"].startswith("nvcc is missing") and found["library"] == before["library"]
    status, out, err = moelab("kernels", "build")
    assert status == 1 and out == "" and err.startswith("error: nvcc is missing") and err.count("\n") == 1


# The header, and what Python makes of it.
HEADER_TEXT = re.sub(r"//.*", "", (share_dir("kernels") / "exchange.h").read_text(encoding="utf-8"))
C_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64}


@pytest.mark.parametrize(("name", "mirror"), [("MoelabShape", library.Shape), ("MoelabCall", library.Call)])
def test_the_structures_are_the_headers(name, mirror):
    (body,) = re.findall(rf"typedef struct \{{([^}}]*)\}} {name};", HEADER_TEXT)
    wanted = []
    for declaration in body.split(";"):
        if not (words := declaration.split()):
            continue
        base = (words[1] if words[0] == "const" else words[0]).rstrip("*")
        for declarator in declaration.strip().partition(f"{base}")[2].split(","):
            pointer, field = "*" in declarator, re.search(r"(\w+)(?:\[(\d+)\])?\s*$", declarator)
            kind = ctypes.c_void_p if pointer else C_TYPES[base]
            wanted.append((field[1], kind * int(field[2]) if field[2] else kind))
    assert [field[0] for field in mirror._fields_] == [name for name, _ in wanted]
    for (field, ours), (_, theirs) in zip(mirror._fields_, wanted, strict=True):
        assert ours is theirs or (ours._type_, ours._length_) == (theirs._type_, theirs._length_), field


def test_the_constants_are_the_headers():
    wanted = {}
    for body in re.findall(r"enum \{([^}]*)\}", HEADER_TEXT):
        value = -1
        for item in body.split(","):
            if item.strip():
                name, _, given = (x.strip() for x in item.partition("="))
                value = int(given) if given else value + 1
                wanted[name.removeprefix("MOELAB_")] = value
    ours = {"MOST_PACKETS": library.MOST_PACKETS, "MOST_BLOCKS": library.MOST_BLOCKS}
    prefixes = {library.Dtype: "", library.Layout: "", library.Scales: "SCALES_", library.Return: "RETURN_",
                library.Protocol: "", library.What: "", library.Halves: "", library.Error: "E_"}  # fmt: skip
    for enum, prefix in prefixes.items():
        ours |= {prefix + member.name: member.value for member in enum}
    assert ours == wanted


def test_the_functions_are_the_headers():
    declared = dict(re.findall(r"(moelab_\w+)\(([^)]*)\)", HEADER_TEXT))
    assert library.SIGNATURES.keys() == declared.keys()
    for name, (_, arguments) in library.SIGNATURES.items():
        assert len(arguments) == len([x for x in declared[name].split(",") if x.strip() != "void"]), name


def test_the_readme_names_every_file():
    folder = share_dir("kernels")
    table = (folder / "README.md").read_text(encoding="utf-8").partition("## Files")[2].partition("## Rules")[0]
    there = {path.name for path in folder.iterdir() if path.suffix in (".cu", ".cuh", ".h")}
    assert set(re.findall(r"`(\w+\.(?:cu|cuh|h))`", table)) == there


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The real library: the user's own build where a GPU is, which is to run it; a fresh one elsewhere."""
    if sys.platform != "linux":
        pytest.skip("the kernels are built on Linux only")
    try:
        toolchain.find_nvcc()
    except CommError as error:
        pytest.skip(f"the kernels are not compiled here: {error}")
    with pytest.MonkeyPatch.context() as patch:
        if "NVSHMEM_HOME" not in os.environ and toolchain._installed() is None:
            patch.setenv("NVSHMEM_HOME", str(download_nvshmem(tmp_path_factory.mktemp("nvshmem"))))
        if not torch.cuda.is_available():
            patch.setenv("MOELAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield build.ensure()


def download_nvshmem(folder: Path) -> Path:
    """60 MB from the package index, where torch brings none; a machine without a network has to skip."""
    if platform.machine() != "x86_64":
        pytest.skip(f"no NVSHMEM here, and its wheel is for x86_64, not {platform.machine()}")
    package = f"nvidia-nvshmem-cu13=={toolchain.PIN}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "1", "--timeout", "20"]
    done = subprocess.run([*pip, "--dest", str(folder), package], capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"the kernels are not compiled: cannot download {package}: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(
            folder, [x for x in names if "/include/" in x or x.endswith((".a", "host.so.3", "METADATA"))]
        )
    wheel.unlink()
    return folder / "nvidia/nvshmem"


@pytest.mark.timeout(600)  # with its fixture: 70 s of two free cores
def test_the_kernels_compile_and_export_what_python_calls(kernels):
    assert library.SIGNATURES.keys() <= set(kernels.facts["exports"])
    shown = subprocess.run(["nm", "-D", "--undefined-only", kernels.library], capture_output=True, text=True)
    undefined = [line.split()[-1] for line in shown.stdout.splitlines()]
    assert any(name.startswith("nvshmem") for name in undefined)  # of the host half
    assert not [x for x in undefined if x.startswith(("moelab", "cu")) and not x.startswith("cuda")]  # needs no libcuda
    shown = subprocess.run(["nm", "-D", "--defined-only", kernels.library], capture_output=True, text=True)
    assert "nvshmemi_" not in shown.stdout  # the device half stays ours


@pytest.fixture
def loaded(kernels):
    try:
        ctypes.CDLL("libcudart.so.13")
    except OSError as error:
        pytest.skip(f"the kernels cannot be loaded here: {error}")
    return library.Library(kernels.library)


def test_the_kernels_load_and_answer(loaded, kernels):
    assert loaded.nvshmem_version() == kernels.nvshmem or torch.version.cuda  # torch's own may be newer
    shape = dict(dp=2, tp=1, experts=16, top_k=4, hidden=256, max_tokens=8, slots=2)
    sizes = loaded.sizes(library.Shape(**shape))
    assert min(sizes) > 0 and sizes.window_bytes >= sizes.slot_bytes * 2
    with pytest.raises(CommError):
        loaded.sizes(library.Shape(**shape | {"experts": 15}))
    with pytest.raises(CommError, match="uid has 5 bytes"):
        loaded.nvshmem_init(b"short", 0, 1)


def test_a_cuda_error_is_in_words(loaded):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the call would not fail")
    shape = library.Shape(dp=2, tp=1, experts=16, top_k=4, hidden=256, max_tokens=8, slots=2)
    with pytest.raises(CommError, match=r"\(CUDA error \d+\)"):
        loaded.most_blocks(shape, library.What.DISPATCH, library.Halves.SEND, False)


def test_an_older_host_library_is_refused(loaded, kernels, monkeypatch):
    monkeypatch.setattr(build, "ensure", lambda: kernels)
    library.load.cache_clear()
    assert library.load().path == kernels.library
    library.load.cache_clear()
    monkeypatch.setattr(library.Library, "nvshmem_version", lambda self: "3.3.20")
    with pytest.raises(CommError, match="built with NVSHMEM 3.4.5, but this process has loaded .* 3.3.20"):
        library.load()


def test_what_is_not_the_library_is_an_error(loaded, tmp_path):
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(CommError, match="cannot load the kernels"):
        library.Library(tmp_path / "text.so")
    with pytest.raises(CommError, match="lack a function.*moelab_a2a"):
        library.Library("libcudart.so.13")
