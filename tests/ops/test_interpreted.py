"""Every kernel test, once more in a process where Triton interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton; it is not installed")
def test_kernels_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "interpreted", "-p", "no:cacheprovider", str(HERE)],
        cwd=HERE.parents[1], env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr  # also if there was no such test: that is status 5
