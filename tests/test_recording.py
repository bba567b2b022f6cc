"""`pytest --record DIR`: how a run of the suite ended, with where and at which commit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from moelab.results import Store

ROOT = Path(__file__).resolve().parents[1]
OTHER = """
import pytest

def test_fails():
    assert False

def test_is_left_out():
    pytest.skip("as it must")
"""


def test_outcomes_become_records(tmp_path):
    folder, here = tmp_path / "records", ROOT / "tests" / "bench"
    (tmp_path / "test_other.py").write_text(OTHER)
    selected = [str(here / "test_activation.py"), str(tmp_path / "test_other.py")]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    done = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), *selected, "--record", str(folder)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "MOELAB_TEST_SEED": "3"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    said = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout.splitlines()[-1])}
    assert said == {"passed": 1, "failed": 1, "skipped": 1}, done.stdout + done.stderr
    records = Store(folder, package=False).records("tests")
    assert {r.metric: r.p50 for r in records} == said | {"error": 0}
    assert {r.params["seed"] for r in records} == {3}
    assert all("tests/bench/test_activation.py" in r.params["paths"] for r in records)
