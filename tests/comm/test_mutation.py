"""Tests that move data fail when the kernels do not wait: built with MOELAB_BREAK_WAIT, every wait returns at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.emulation import compile_emulation, missing
from tests.comm.hasty import GROUPS
from tests.conftest import SEED


@pytest.mark.parametrize("kind", ["emulated", "emulated-flags"])
def test_without_its_waits_every_exchange_is_wrong(kind):
    if why := missing():
        pytest.skip(why)
    compile_emulation("MOELAB_BREAK_WAIT")
    command = [sys.executable, "-m", "tests.comm.hasty", kind, str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).resolve().parents[2])
    said = done.stdout.splitlines()
    assert all(line.endswith(": True") for line in said), done.stdout
    if done.returncode >= 0:  # else a signal has ended it: noticed as well
        assert done.returncode == 0 and len(said) == 2 * len(GROUPS) + 1, done.stdout + done.stderr
