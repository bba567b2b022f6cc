"""Every reachable state of a `Model` (protocol.py), and the first fault with the steps that lead to it.

**How the search stays small without leaving anything out.** A store is appended to a list of the address, and it is
the *reader* who chooses how much of the list has landed. Issuing early only adds to that choice, so stores are issued
as soon as the block gets there; the order in which ranks choose their routing is of no consequence. What a block waits
for between two of its effects it takes in one step, when the last of it is there: to look later can only show more
faults. What is branched over is the order of these steps of all blocks, what each sees, and the routing. A landed line
whose number nobody will ask for any more is forgotten.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.comm.protocol import ALONE, Model, Wrong


@dataclass
class Fault:
    """What went wrong and the steps to it."""

    what: str
    trace: list[str]

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {i:3} {step}" for i, step in enumerate(self.trace, 1))])


def describe(model: Model, state: tuple, rank: int, block: int, step: tuple, after: tuple) -> str:
    exchange = model._launches[state[0][rank][0]][0]
    what = " ".join([step[0], *("(" + " ".join(map(str, line)) + ")" for line in step[1:])])
    if step[0] == "choose":
        what = f"chooses destinations {[sorted(d) for d in after[2][rank][exchange]]}"
    return f"rank {rank}, block {block}, exchange {exchange}: {what}"


def search(model: Model, most: int = 10_000_000) -> tuple[int, Fault | None]:
    """(number of states, the first fault or None). Breadth first: no trace to a fault is much shorter."""
    start, end = model.start(), len(model._launches)
    came_from: dict[tuple, tuple | None] = {start: None}
    todo = deque([start])

    def fault(what: str, state: tuple, steps: list) -> Fault:
        told = []
        while True:
            told += [describe(model, state, *one, after) for one, state, after in reversed(steps)]
            if came_from[state] is None:
                return Fault(what, told[::-1])
            steps, state = came_from[state]

    while todo:
        state = todo.popleft()
        alive = False
        for one in model.enabled(state):
            steps: list = []
            try:
                for after in model.take(state, *one):
                    alive, steps = True, [(one, state, after)]
                    # What only one step can follow is no state of its own.
                    while len(next_one := model.enabled(after)) == 1 and next_one[0][2][0] in ALONE:
                        before, (after,) = after, model.take(after, *next_one[0])
                        steps.append((next_one[0], before, after))
                    if after not in came_from:
                        came_from[after] = [(s, b, None if s[2][0] != "choose" else a) for s, b, a in steps], state
                        todo.append(after)
            except Wrong as wrong:
                return len(came_from), fault(str(wrong), state, steps)
        if not alive and any(at < end for at, _ in state[0]):
            return len(came_from), fault("nobody can go on, and not all are through", state, [])
        assert len(came_from) <= most, f"more than {most} states: choose a smaller model"
    return len(came_from), None
