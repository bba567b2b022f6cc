"""Who is blamed, from news in any order; no processes."""

from __future__ import annotations

import signal

import pytest

from moelab.launch.failure import Evidence


def error(time: float, line: str = "ValueError: x", traceback: str | None = "Traceback\n  x\n") -> dict:
    return {"time": time, "line": line, "traceback": traceback}


def test_the_first_to_raise():
    evidence = Evidence(errors={0: error(5.2), 2: error(5.1, "RuntimeError: mine"), 1: error(5.3)})
    failure = evidence.failure(4, "")
    assert failure.rank == 2
    assert str(failure) == "rank 2 of 4 failed: RuntimeError: mine"
    head, *_, last = failure.report.splitlines()
    assert head == "rank 2 of 4 failed: RuntimeError: mine"
    assert failure.report.splitlines()[1] == "Traceback"
    assert last == "ranks 0, 1 failed after it: ValueError: x; rank 3 was stopped"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_killed_rank_before_those_that_raise_over_its_absence(how):
    # Its death is seen late, when the others have already raised.
    evidence = Evidence(errors={0: error(5.0), 1: error(5.1)}, silent={2: 5.4}, exits={2: -how, 0: 1, 1: 1})
    failure = evidence.failure(3, "Fatal Python error")
    assert failure.rank == 2
    assert how.name in str(failure)
    assert "It had printed:\nFatal Python error" in failure.report


def test_ranks_that_torchrun_stopped_are_not_blamed():
    term = -signal.SIGTERM
    evidence = Evidence(silent={0: 5.0, 1: 5.1, 2: 5.1}, exits={0: term, 1: term, 2: -signal.SIGKILL})
    assert evidence.failure(3, "").rank == 2
    evidence = Evidence(errors={1: error(5.0)}, silent={0: 15.0, 2: 15.1}, exits={0: term, 1: 1, 2: term})
    assert evidence.failure(3, "").rank == 1


def test_a_rank_that_somebody_terminated():
    term = -signal.SIGTERM
    evidence = Evidence(silent={2: 5.0, 0: 5.2}, errors={1: error(5.1)}, exits={0: term, 1: 1, 2: term})
    failure = evidence.failure(3, "")
    assert failure.rank == 2
    assert "SIGTERM" in str(failure)


def test_a_rank_that_died_before_it_could_connect():
    evidence = Evidence(exits={0: -signal.SIGTERM, 1: 1})
    failure = evidence.failure(2, "No module named moelab")
    assert failure.rank == 1
    assert "exit code 1" in str(failure)
    assert "No module named moelab" in failure.report


def test_a_rank_that_leaves_with_status_0():
    assert "without returning or raising" in str(Evidence(silent={1: 5.0}).failure(2, ""))


def test_an_error_that_is_meant_for_the_user_is_one_line():
    failure = Evidence(errors={0: error(5.0, "config.json: bad", None)}).failure(2, "")
    assert str(failure) == "rank 0 of 2 failed: config.json: bad"
    assert failure.report == ""
