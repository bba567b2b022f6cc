"""What went wrong in a launch, and on which rank first.

Once one rank is dead the others fail too, over its absence, and torchrun then stops the rest. The news comes
in any order, so blame follows the kind of death. A rank that raised says when. A rank that is gone without a
word was killed, by something that has no reason to follow another rank's exception; it goes first, unless
SIGTERM killed it: that is how torchrun stops what is left.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field
from typing import Any

from moelab.config import MoelabError


class LaunchError(MoelabError):
    """A launch that could not begin, or whose torchrun ended by itself.

    The message is one line; `report` is the rest that there is to say, a traceback above all, or "".
    """

    def __init__(self, line: str, report: str = ""):
        super().__init__(line)
        self.report = report
        if report:
            self.add_note(report)


class RankFailure(LaunchError):
    """A rank failed."""

    def __init__(self, rank: int, ranks: int, line: str, report: str = ""):
        super().__init__(f"rank {rank} of {ranks} failed: {line}", report)
        self.rank, self.ranks = rank, ranks


@dataclass
class Evidence:
    """What is known of the ranks' ends. Times are time.time(), which all processes of a machine share."""

    done: set[int] = field(default_factory=set)
    errors: dict[int, dict[str, Any]] = field(default_factory=dict)  # as worker.py describes them
    silent: dict[int, float] = field(default_factory=dict)  # gone without done or error -> when that was seen
    exits: dict[int, int] | None = None  # exit code (-signal) as torchrun saw it; None: nothing heard yet

    def first(self) -> int:
        """The rank to blame. Needs an error, a silent death or an exit code."""
        when = {rank: error["time"] for rank, error in self.errors.items()}
        for rank, seen in self.silent.items():
            when[rank] = seen if self._exit(rank) in (None, -signal.SIGTERM) else 0.0
        for rank, code in (self.exits or {}).items():  # it died before it had a link, or after it was done
            when.setdefault(rank, math.inf if code == -signal.SIGTERM else 0.0)
        return min(when, key=when.__getitem__)

    def failure(self, ranks: int, printed: str) -> RankFailure:
        """The blamed rank's failure; `printed` is the end of what it has printed."""
        rank = self.first()
        error = self.errors.get(rank) or {"line": _death(self._exit(rank)), "traceback": None}
        parts = [error["traceback"], printed and f"It had printed:\n{printed}"]
        if rank in self.errors and not any(parts):
            return RankFailure(rank, ranks, error["line"])
        parts = [f"rank {rank} of {ranks} failed: {error['line']}", *parts, self._others(rank, ranks)]
        return RankFailure(rank, ranks, error["line"], "\n".join(part.rstrip() for part in parts if part))

    def _exit(self, rank: int) -> int | None:
        return (self.exits or {}).get(rank)

    def _others(self, first: int, ranks: int) -> str:
        after = sorted(self.errors.keys() - {first})
        stopped = [rank for rank in range(ranks) if rank not in (first, *after) and rank not in self.done]
        said = []
        if after:
            said.append(f"{_names(after)} failed after it: {self.errors[after[0]]['line']}")
        if stopped:
            said.append(f"{_names(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped")
        return "; ".join(said)


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _death(code: int | None) -> str:
    if code is None:
        return "it ended without returning or raising"
    hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    return f"it {ending(code)}{hint}"


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
