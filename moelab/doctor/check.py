"""One finding, and the child process in which dangerous questions are asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, WARN, MISSING = "ok", "warn", "missing"


@dataclass(frozen=True)
class Check:
    """One line of the report. `fix` is empty where there is nothing to do."""

    section: str
    name: str
    status: str  # ok: works; warn: works, but look at it; missing: not there, which may be all right
    detail: str
    fix: str = ""


class ChildFailed(Exception):
    """The reason in one line."""


def ask(code: str, *, timeout_s: float = 120, env: dict[str, str] | None = None) -> Any:
    """Run Python `code` in a child of this interpreter, with this moelab importable and `env` added to the
    environment; what it prints last, on a line of its own, is read as JSON. Raises ChildFailed with the child's
    last line of error, its signal, or the time limit."""
    root = str(Path(__file__).resolve().parents[2])
    prelude = f"import sys; sys.path.append({root!r})\n"  # last: an installed package keeps its precedence
    try:
        done = subprocess.run(
            [sys.executable, "-c", prelude + code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, "PYTHONWARNINGS": "ignore", **(env or {})},
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"no answer within {timeout_s:.0f} s") from None
    errors = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        raise ChildFailed(f"the process died by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise ChildFailed(errors[-1] if errors else f"the process ended with status {done.returncode}")
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise ChildFailed("the process ended without an answer") from None
