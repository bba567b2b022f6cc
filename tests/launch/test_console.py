"""The command itself, in a process of its own: streams, signals, pipes, exit statuses, and no process left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from moelab.cli import main

LONG = ["--max-tokens", "900"]  # some seconds of text, unless it is ended


@pytest.fixture
def start(traces, checkpoint):
    def start(*arguments: str, **options) -> subprocess.Popen:
        command = [sys.executable, "-m", "moelab", "generate", "--model", str(checkpoint), *arguments]
        return subprocess.Popen(
            command, env=traces.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )

    return start


def first_bytes(process: subprocess.Popen, timeout_s: float = 90.0) -> bytes:
    """What comes first on standard output, as soon as it comes."""
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert ready, "nothing came"
    return os.read(process.stdout.fileno(), 1 << 16)


def test_text_streams_and_stands_alone_on_standard_output(traces, start):
    prompts = ["--prompt", "def f", "--prompt", "x"]
    with start(*prompts, *prompts[:2], "--dp", "2", "--max-tokens", "60") as process:
        first = first_bytes(process)
        assert len(traces.ranks()) == 2
        rest, err = process.communicate(timeout=120)
    assert process.returncode == 0
    out = (first + rest).decode()
    assert len(first) < len(first + rest) / 2, "it came only at the end"
    # A random model's noise, but the third prompt is the first one again, so the text ends as it begins.
    assert any(out[:end] == out[-end:] for end in range(20, len(out) // 2) if out[end - 1] == "\n")
    lines = err.decode().splitlines()
    assert lines[0].startswith("2 ranks on cpu: dp 2 × tp 1, 8 of 16 experts per rank")
    assert lines[1].startswith("ready after")
    assert "tokens/s" in lines[2] and len(lines) == 3
    traces.assert_none()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_cleanly(traces, start, number, status):
    # As a shell starts what it puts in the background: with SIGINT ignored.
    ignored = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    with start("--prompt", "x", "--dp", "2", *LONG, preexec_fn=ignored) as process:
        first = first_bytes(process)
        assert len(traces.ranks()) == 2
        sent = time.monotonic()
        process.send_signal(number)
        process.send_signal(number)  # impatience changes nothing
        rest, err = process.communicate(timeout=60)
    assert time.monotonic() - sent < 20
    assert process.returncode == status
    assert first + rest
    assert b"Traceback" not in err
    traces.assert_none()


def test_a_signal_while_the_ranks_start(traces, start):
    with start("--prompt", "x", "--dp", "2", *LONG) as process:
        assert process.stderr.readline().startswith(b"2 ranks")
        deadline = time.monotonic() + 60
        while len(traces.processes()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b"" and b"Traceback" not in err
    traces.assert_none()


def test_nobody_reads_any_more(traces, start):
    with start("--prompt", "x", *LONG) as process:
        first_bytes(process)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in err and b"BrokenPipe" not in err
    traces.assert_none()


def test_a_killed_rank(traces, start):
    with start("--prompt", "x", "--prompt", "y", "--dp", "2", *LONG) as process:
        first_bytes(process)
        killed = traces.ranks()[0]
        rank = killed.environ()["RANK"]
        sent = time.monotonic()
        killed.kill()
        _, err = process.communicate(timeout=60)
    assert time.monotonic() - sent < 60
    assert process.returncode == 1
    lines = err.decode().splitlines()
    wanted = f"rank {rank} of 2 failed: it was killed by SIGKILL"
    progress = [line for line in lines[:2] if not line.startswith("rank")]
    assert lines[len(progress)].startswith(wanted)
    assert lines[-1].startswith(f"error: {wanted}")
    traces.assert_none()


def test_json_is_one_list_in_the_order_of_the_prompts(scripted, checkpoint, capsys):
    events, _ = scripted
    events.append({"ready": "at once"})
    for number, token in ((1, ord("b")), (0, ord("a")), (0, 257), (1, 0xC3)):
        last = token in (257, 0xC3)
        events.append({"prompt": number, "token": token, "last": last})
    prompts = ["--prompt", "x", "--prompt", "y"]
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--model", str(checkpoint), *prompts, "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0
    assert json.loads(out) == [
        {"prompt": "x", "text": "a", "tokens": [97, 257], "finish_reason": "stop"},
        {"prompt": "y", "text": "b\ufffd", "tokens": [98, 0xC3], "finish_reason": "length"},
    ]
    assert "at once" in err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--model", "."], 2, "--prompt"),
        (["--prompt", "x", "--device", "tpu"], 2, "tpu"),
        (["--prompt", "x", "--dp", "many"], 2, "--dp"),
        (["--prompt", "x", "--temprature", "1"], 2, "--temprature"),
        (["--prompt", "x", "--model", "no/such"], 1, "no such folder"),
    ],
)
def test_wrong_usage(capsys, monkeypatch, arguments, status, says):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments])
    out, err = capsys.readouterr()
    assert ended.value.code == status
    assert out == "" and err.count("\n") == 1
    assert says in err


def test_help_says_what_goes_where(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    out, _ = capsys.readouterr()
    assert ended.value.code == 0
    assert all(option in out for option in ("--prompt", "--max-tokens", "--dp", "--tp", "--device", "--json"))
