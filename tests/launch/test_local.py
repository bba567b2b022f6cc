"""Real ranks through torchrun: what they say arrives, and whatever ends them, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from moelab.launch import LaunchError, RankFailure, launch

RANKS = "tests.launch.on_ranks"


def test_events_arrive_whole_and_the_loop_ends(traces, capfd):
    job = {"big": 100_000, "nested": [1, {"two": None}]}
    with launch(f"{RANKS}:talk", job, 2) as run:
        heard = {0: [], 1: []}
        for rank, event in run:
            heard[rank].append(event)
        traces_at_end = traces.processes()
    assert traces_at_end == []
    for rank, (first, second, third) in heard.items():
        assert {**first, "pid": None} == {"rank": rank, "sum": 1.0, "job": job, "pid": None}
        assert second == {"big": "ä" * 100_000, "threads": 1, "address": "127.0.0.1"}
        assert third == {"last": True}
    out, err = capfd.readouterr()
    assert out == ""
    wanted = [f"[rank {r}] {line}" for r in (0, 1) for line in (f"printed by {r}", "written in C")]
    assert err.splitlines() == wanted
    traces.assert_none()


@pytest.mark.parametrize(
    ("how", "line", "trace"),
    [
        ("raise", "RuntimeError: this rank raised", 'raise RuntimeError("this rank raised")'),
        ("SIGKILL", "it was killed by SIGKILL", None),
        ("SIGSEGV", "it was killed by SIGSEGV", "in _end"),  # the Python stack, by faulthandler
    ],
)
def test_one_rank_ends_all(traces, how, line, trace):
    started, pids = time.monotonic(), set()
    with pytest.raises(RankFailure) as caught, launch(f"{RANKS}:fail", {"rank": 1, "how": how}, 3) as run:
        for _, event in run:
            pids |= set(event.values())
    assert time.monotonic() - started < 60
    assert len(pids) == 4 and not any(map(psutil.pid_exists, pids))
    traces.assert_none()
    failure = caught.value
    assert failure.rank == 1
    assert str(failure).startswith(f"rank 1 of 3 failed: {line}")
    assert failure.report.startswith(f"rank 1 of 3 failed: {line}")
    if trace:
        assert trace in failure.report
    others = failure.report.splitlines()[-1]  # stopped, or failed over the first one's absence
    assert re.search(r"ranks? 0\b|ranks 0, 2", others) and re.search(r"rank 2\b|ranks 0, 2", others)


def test_leaving_early_ends_the_ranks(traces):
    with launch(f"{RANKS}:wait", {}, 2) as run:
        events = iter(run)
        pids = {pid for _ in range(2) for pid in next(events)[1].values()}
        assert len(pids) == 3  # two ranks and torchrun
        assert all(map(psutil.pid_exists, pids))
        left = time.monotonic()
    assert time.monotonic() - left < 15
    assert not any(map(psutil.pid_exists, pids))
    traces.assert_none()


START_AND_WAIT = f"""
from moelab.launch import launch
with launch("{RANKS}:wait", {{}}, 2) as run:
    for rank, event in run:
        print(event["parent"], flush=True)
"""


@pytest.mark.parametrize("victim", ["launcher", "torchrun"])
def test_all_end_when_their_launcher_or_torchrun_is_killed(traces, victim):
    code = [sys.executable, "-c", START_AND_WAIT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(code, env=traces.environment, text=True, **pipes) as process:
        torchrun = int(process.stdout.readline())
        process.stdout.readline()
        os.kill(process.pid if victim == "launcher" else torchrun, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    if victim == "torchrun":
        assert process.returncode == 1
        assert "torchrun was killed by SIGKILL" in err
        traces.assert_none()
        return
    deadline = time.monotonic() + 30  # nobody is left to wait for them, or to remove the folder
    while traces.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert traces.processes() == []


@pytest.mark.parametrize(
    ("function", "ranks", "device", "match"),
    [
        ("no.function", 1, "cpu", "package.module:name"),
        ("a:b", 0, "cpu", "ranks is 0"),
        ("a:b", 1, "tpu", "device is 'tpu'"),
    ],
)
def test_what_cannot_start(monkeypatch, function, ranks, device, match):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(LaunchError, match=match):
        launch(function, {}, ranks, device)


def test_a_job_must_be_json():
    with pytest.raises(TypeError):
        launch("a:b", {"x": object()}, 1)


def test_a_folder_too_deep_for_a_socket(traces, monkeypatch):
    deep = traces.folder / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(LaunchError, match="TMPDIR"), launch("a:b", {}, 1):
        pass
    assert list(deep.iterdir()) == []
