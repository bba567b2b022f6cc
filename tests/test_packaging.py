"""What is installed: the lists of dependencies agree, make explains itself, and the wheel is enough.

The wheel is built from this tree and installed into an empty folder; the commands then run from another empty
folder, with the first one at the head of the path, so nothing of the clone can help.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moelab

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU_LOCK, GPU_LOCK = ROOT / "requirements" / "cpu.txt", ROOT / "requirements" / "gpu.txt"


def specs(lines: list[str]) -> dict[str, tuple[str, str]]:
    """{name: (version range, marker)}"""
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): (str(r.specifier), str(r.marker or "")) for r in found}


def pins(lock: Path) -> dict[str, Requirement]:
    """{name: requirement} of a lock; every line is `name==version` with at most a marker."""
    found = {}
    for line in lock.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)  # options, hosts and hashes are no requirements and fail here
            assert requirement.url is None
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{lock.name}: {line} is no pin"
            assert canonicalize_name(requirement.name) not in found, f"{lock.name}: {line} comes twice"
            found[canonicalize_name(requirement.name)] = requirement
    return found


def version(requirement: Requirement) -> str:
    return str(requirement.specifier).removeprefix("==")


def test_environment_agrees_with_pyproject():
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install -e '.[test]'")
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = [entry["pip"] for entry in conda if isinstance(entry, dict)]
    (python,) = [e.removeprefix("python=") for e in conda if isinstance(e, str) and e.startswith("python=")]
    assert f"{python}.0" in Requirement(f"python{PROJECT['requires-python']}").specifier
    options = [line for line in pip if line.startswith("-")]
    assert options == ["-c requirements/cpu.txt", "-e ."]
    listed = specs([line for line in pip if not line.startswith("-")])
    assert listed == specs(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"])


@pytest.mark.parametrize("lock", [CPU_LOCK, GPU_LOCK], ids=lambda p: p.stem)
def test_a_lock_holds_what_pyproject_asks_for(lock):
    locked, extras = pins(lock), PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + extras["test"] + (extras["gpu"] if lock == GPU_LOCK else [])
    for line in wanted:
        requirement = Requirement(line)
        pin = locked.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{lock.name} lacks {requirement.name}"
        assert version(pin) in requirement.specifier, f"{lock.name} has {pin}, pyproject.toml wants {line}"


def test_locks_keep_to_torch():
    cpu, gpu = pins(CPU_LOCK), pins(GPU_LOCK)
    assert (version(cpu["torch"]), version(gpu["torch"])) == ("2.13.0", "2.11.0")
    # On Linux torch requires exactly these; another version makes the lock impossible to install.
    assert (version(cpu["triton"]), version(gpu["triton"])) == ("3.7.1", "3.6.0")
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-"))], "torch brings its own"
    assert version(gpu["nvidia-nvshmem-cu13"]) == "3.4.5"


def test_the_cpu_lock_is_complete():
    """Nothing that a pinned package asks for, on this Python and system, is left open."""
    locked, missing = pins(CPU_LOCK), []
    for name in locked:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system, by its marker, or not installed here
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            needed = canonicalize_name(requirement.name)
            by_torch = name == "torch" and needed.startswith(("nvidia-", "cuda-"))
            if needed not in locked and not by_torch:
                missing.append(f"{needed} (for {name})")
    assert not missing


def test_citation_gives_the_version():
    line = f"version: {moelab.__version__}"
    assert line in (ROOT / "CITATION.cff").read_text().splitlines()


def make(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(["make", "-s", *args], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_make_says_what_it_can_do():
    done = make()
    assert done.returncode == 0, done.stderr
    for target in ("setup", "tour", "test", "lab", "lint", "clean"):
        assert re.search(rf"^  make {target} +\w", done.stdout, re.M), done.stdout


def test_make_setup_wants_a_suitable_python(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make("setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}", "LOCK=requirements/gpu.txt")
    assert done.returncode != 0
    assert "(3.12)" in done.stderr and str(old) in done.stderr and "PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("build", reason="build is not installed: pip install -e '.[test]'")
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[test]'")
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        cwd=out, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_wheel_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (points,) = [n for n in names if n.endswith(".dist-info/entry_points.txt")]
        assert "moelab = moelab.cli:main" in archive.read(points).decode()
    data = "moelab/data"
    wanted = {"moelab/py.typed", f"{data}/records/README.md", f"{data}/tinyseek/config.json"}
    for pattern in ("*.py", "data/published/*", "data/records/**/*.jsonl", "data/tinyseek/**/*"):
        wanted |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "moelab").rglob(pattern) if p.is_file()}
    for folder, kinds in (("notebooks", (".ipynb",)), ("kernels", (".md", ".cu", ".cuh", ".h"))):
        files = [p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.suffix in kinds]
        assert files, f"{folder} is empty"
        wanted |= {f"moelab/_share/{p.as_posix()}" for p in files if ".ipynb_checkpoints" not in p.parts}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert not sorted(wanted - names)  # missing from the wheel
    assert [n for n in names if n.startswith(f"{data}/tinyseek/") and n.endswith(".safetensors")]
    assert [n for n in names if n.startswith(f"{data}/tinyseek/heldout/")]
    assert [n for n in names if n.endswith(".dist-info/licenses/LICENSE")]
    assert not [n for n in names if not re.match(r"moelab(/|-[^/]*\.dist-info/)", n)]
    assert not [n for n in names if re.search(r"__pycache__|checkpoints/|\.egg-info|/tests/", n)]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs `python -m moelab ...` of the wheel, from an empty folder."""
    target, empty = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("empty")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, "--target", str(target), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env = {**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*args: str, limit: float = 240) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *args], cwd=empty, env=env, capture_output=True, text=True, timeout=limit
        )

    run.folder = empty
    where = run("-c", "import moelab, pathlib; print(pathlib.Path(moelab.__file__).resolve())").stdout.strip()
    assert Path(where).is_relative_to(target.resolve()), f"this is not the wheel's moelab: {where}"
    return run


def test_wheel_runs_doctor(installed):
    done = installed("-m", "moelab", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


def test_wheel_finds_its_share(installed):
    code = "from moelab.share import share_dir as s; print(s('notebooks'), s('kernels'), sep='\\n')"
    done = installed("-c", code)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert Path(line).is_dir() and not Path(line).is_relative_to(ROOT), line


def test_wheel_generates(installed):
    prompt = ["--model", "tinyseek", "--prompt", "def main(", "--max-tokens", "8"]
    done = installed("-m", "moelab", "generate", *prompt)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.timeout(600)
def test_wheel_runs_a_notebook(installed):
    done = installed("-m", "moelab", "run", "00_start_here", "--out", "out", limit=540)
    assert done.returncode == 0, done.stderr
    executed = list((installed.folder / "out").rglob("00_start_here*.ipynb"))
    assert executed, f"no executed notebook: {sorted((installed.folder / 'out').rglob('*'))}"
    cells = [c for c in json.loads(executed[0].read_text())["cells"] if c["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in cells)
