from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moelab.results import provenance
from moelab.results.provenance import ProvenanceError, collect, parse_smi, source_state

SMI = """\
0, GPU-aa11, NVIDIA H200, 143771, 580.159
1, GPU-bb22, NVIDIA H200, 143771, 580.159
2, GPU-cc33, NVIDIA H100 80GB HBM3, [N/A], 580.159
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A stand-in nvidia-smi on PATH that prints `text`."""

    def install(text: str, status: int = 0) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {status}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


def test_smi_rows():
    first, _, last = parse_smi(SMI, None)
    assert (first.name, first.memory_bytes, first.driver) == ("NVIDIA H200", 143771 * 2**20, "580.159")
    assert last.memory_bytes == 0  # some cards do not say


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,9,1", [0]),
        ("GPU-bb22", [1]),
        (" 1 , 0 ", [1, 0]),
    ],
)
def test_cuda_visible_devices_cuts_the_list(visible, indices):
    assert [gpu.index for gpu in parse_smi(SMI, visible)] == indices


def test_collect_on_gpus(smi):
    smi(SMI)
    found = collect(gpu_count=2, commit="0" * 40)
    assert (found.gpu, found.gpu_count, found.driver, found.dirty) == ("NVIDIA H200", 2, "580.159", False)
    assert collect("cuda", commit="0" * 40).gpu == "NVIDIA H200 + NVIDIA H100 80GB HBM3"
    with pytest.raises(ProvenanceError, match="gpu_count is 4, but 3"):
        collect(gpu_count=4)
    assert collect("cpu").gpu == "cpu"


def test_collect_without_gpus(smi, caplog):
    smi("No devices were found\n", status=6)
    with caplog.at_level(logging.WARNING):
        found = collect()
    assert (found.gpu, found.gpu_count, found.driver) == ("cpu", 0, "")
    assert found.versions["python"] and found.versions["cpu"] and found.versions["moelab"]
    assert "nvidia-smi does not answer" in caplog.text
    with pytest.raises(ProvenanceError, match="no GPU"):
        collect("cuda")


def test_commit_from_outside(monkeypatch):
    monkeypatch.setenv("MOELAB_COMMIT", "abcdef0")
    monkeypatch.delenv("MOELAB_DIRTY", raising=False)
    assert source_state() == ("abcdef0", False)
    monkeypatch.setenv("MOELAB_DIRTY", "1")
    assert source_state() == ("abcdef0", True)
    assert source_state("1234567", dirty=False) == ("1234567", False)
    monkeypatch.setenv("MOELAB_DIRTY", "perhaps")
    with pytest.raises(ProvenanceError, match="MOELAB_DIRTY"):
        source_state()
    with pytest.raises(ProvenanceError, match="hex"):
        source_state("main")


def test_commit_from_git_and_never_from_a_repository_around_it(tmp_path, monkeypatch):
    """A fake clone: its own commit and dirty flag count; installed below somebody's repository, nothing
    counts."""
    for name in ("MOELAB_COMMIT", "MOELAB_DIRTY"):
        monkeypatch.delenv(name, raising=False)

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(tmp_path), *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def pretend(root: Path) -> None:
        module = root / "moelab" / "results" / "provenance.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text("")
        monkeypatch.setattr(provenance, "__file__", str(module))

    git("init", "-q")
    pretend(tmp_path)
    git("add", ".")
    git("commit", "-qm", "first")
    assert source_state() == (git("rev-parse", "HEAD"), False)
    (tmp_path / "README.md").write_text("prose\n")
    (tmp_path / "moelab" / "data").mkdir()
    (tmp_path / "moelab" / "data" / "x.jsonl").write_text("{}\n")
    assert source_state()[1] is False  # neither can change a number
    (tmp_path / "moelab" / "new.py").write_text("x = 1\n")
    assert source_state() == (git("rev-parse", "HEAD"), True)
    pretend(tmp_path / "venv" / "site-packages")
    assert source_state() == ("unknown", True)


def test_results_import_neither_torch_nor_pandas():
    code = "import sys, moelab.results.published; print({'torch', 'pandas', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
