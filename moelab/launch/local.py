"""N ranks on this machine, through torchrun.

    this process ── torchrun (agent.py) ── rank 0 … rank N−1 (worker.py)

Nothing runs in this process but a thread that listens, so a crash of a rank cannot take a notebook's kernel
along. Whatever ends the `with` block, no process is left behind it: the ranks are killed, torchrun collects
them, and leaving the block waits for both. If this process itself is killed, its sockets close, and the
others end by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moelab.launch.failure import Evidence, LaunchError, RankFailure, ending
from moelab.launch.link import AGENT, Hub
from moelab.launch.worker import JOB, log_file

AGENT_LOG = "torchrun.log"
SETTLE_S = 0.5  # after a rank's error: time for others that fail by themselves to say so
REPORT_S = 10.0  # after a rank's silent death: time for torchrun to see it
STOP_S = 10.0  # for torchrun to collect killed ranks; it looks ten times a second
TAIL_LINES = 40


def launch(function: str, job: dict[str, Any], ranks: int, device: str = "cpu") -> Launch:
    """Run `function(context, job)` on `ranks` processes: `with launch(…) as run: for rank, event in run: …`.

    `function` is "package.module:name" (see worker.py); `job` and events are what JSON can say. `device` is
    "cpu" or "cuda". The loop ends when all ranks have returned, and raises `RankFailure` with the first
    failing rank's traceback when one does not. Each rank gets its share of the cores, unless OMP_NUM_THREADS
    is set.
    """
    module, colon, name = function.partition(":")
    if not (module and colon and name):
        raise LaunchError(f"function is {function!r}: give 'package.module:name'")
    if ranks < 1:
        raise LaunchError(f"ranks is {ranks}: give 1 or more")
    if device not in ("cpu", "cuda"):
        raise LaunchError(f"device is {device!r}: legal are 'cpu', 'cuda'")
    return Launch(ranks, json.dumps({"function": function, "job": job, "device": device}))


def threads_per_rank(ranks: int) -> int:
    """OMP_NUM_THREADS if it is set, else this process's cores, divided; at least 1."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


class Launch:
    """A run of some ranks; made by `launch`. Starts on entering, ends on leaving."""

    def __init__(self, ranks: int, request: str):
        self.ranks = ranks
        self._request = request
        self._evidence = Evidence()
        self._agent: subprocess.Popen | None = None

    def __enter__(self) -> Launch:
        self._folder = Path(tempfile.mkdtemp(prefix="moelab-"))
        try:
            (self._folder / JOB).write_text(self._request, encoding="utf-8")
            try:
                self._hub = Hub(self._folder)
            except OSError as error:  # a socket's path has at most about 100 characters
                raise LaunchError(f"no socket in {self._folder} ({error}): set TMPDIR to a shorter path") from None
            with open(self._folder / AGENT_LOG, "wb") as log:
                self._agent = subprocess.Popen(
                    [sys.executable, "-m", "moelab.launch.agent", str(self._folder), str(self.ranks)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(self.ranks),
                    start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
                )  # fmt: skip
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(rank, event) as they come, until all ranks have returned and all processes are gone."""
        while True:
            rank, message = self._hub.inbox.get()
            if "event" in message:
                yield rank, message["event"]
            elif rank == AGENT and "gone" in message:
                code = self._agent.wait()
                if code or len(self._evidence.done) < self.ranks:
                    raise self._failure(REPORT_S, code)
                break
            elif self._note(rank, message):
                raise self._failure(SETTLE_S if "error" in message else REPORT_S)
        for rank in range(self.ranks):
            for line in self._printed(rank).splitlines():
                print(f"[rank {rank}] {line}", file=sys.stderr)

    def _note(self, rank: int, message: dict[str, Any]) -> bool:
        """Keep what a message says of a rank's end; whether it is a bad one."""
        evidence = self._evidence
        if "done" in message:
            evidence.done.add(rank)
            return False
        if "error" in message:
            evidence.errors[rank] = message["error"]
        elif "exits" in message:
            evidence.exits = {int(failed): code for failed, code in message["exits"].items()}
        elif "gone" in message:
            if rank in evidence.done or rank in evidence.errors:
                return False
            evidence.silent[rank] = message["gone"]
        return True

    def _failure(self, patience_s: float, agent_code: int | None = None) -> LaunchError:
        """Wait a little for more news of the same failure, then say what it was."""
        evidence, deadline = self._evidence, time.monotonic() + patience_s
        while agent_code is None and evidence.exits is None and len(evidence.errors) < self.ranks:
            try:
                rank, message = self._hub.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if rank == AGENT and "gone" in message:
                agent_code = self._agent.wait()
            elif "event" not in message:
                self._note(rank, message)
        if agent_code and evidence.exits is None and not evidence.errors:
            return LaunchError(f"torchrun {ending(agent_code)}", self._agent_printed())
        return evidence.failure(self.ranks, self._printed(evidence.first(), TAIL_LINES))

    def _printed(self, rank: int, lines: int | None = None) -> str:
        file = log_file(self._folder, rank)
        return _tail(file, lines) if file.exists() else self._agent_printed()  # it died before it had a file

    def _agent_printed(self) -> str:
        return _tail(self._folder / AGENT_LOG, TAIL_LINES)

    def close(self) -> None:
        """End what still runs and wait for it. May be called twice."""
        with _uninterrupted():
            if self._agent is not None:
                self._stop()
                self._hub.close()
            self._agent = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _stop(self) -> None:
        """Kill the ranks first: torchrun, their parent, then collects them and ends."""
        agent, pids = self._agent, self._hub.pids
        deadline = time.monotonic() + STOP_S
        if agent.poll() is None:
            agent.terminate()
        while (agent.poll() is None or pids) and time.monotonic() < deadline:
            for rank, pid in list(pids.items()):
                if rank != AGENT:
                    _kill_group(pid)
            time.sleep(0.02)
        if agent.poll() is None:
            _kill_group(agent.pid)
            agent.wait()


def _kill_group(pid: int) -> None:
    """Each rank, and torchrun, leads a session of its own, so this takes what it started along."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _uninterrupted():
    """A second Ctrl-C must not interrupt what the first one set off; it is over in seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _environment(ranks: int) -> dict[str, str]:
    """Ours, with the same import path, a share of the cores, and the loopback as the only network."""
    environment = dict(os.environ)
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # `-m` would put the current folder first, where a stray random.py lies in wait.
    environment["PYTHONSAFEPATH"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path if path not in standard)
    environment["OMP_NUM_THREADS"] = str(threads_per_rank(ranks))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = loopback
    return environment


def _tail(path: Path, lines: int | None = None) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    return text if lines is None else "\n".join(text.splitlines()[-lines:])


__all__ = ["Launch", "LaunchError", "RankFailure", "launch", "threads_per_rank"]
