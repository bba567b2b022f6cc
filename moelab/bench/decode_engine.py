"""Steps of the engine itself, from the host's side: what passes between the kernels of one step and of the next.

Requests stand in the engine as if it had served them for long: their pages hold `kv_len` rows, filled with anything,
and their next tokens are the likeliest ones, whatever they are. A step's wall time, less what its graphs take when they
are replayed without a pause, is the host's: laying out, planning attention, launching, judging drafts, waiting for the
device to say what it found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

from moelab.engine.batch import Piece
from moelab.engine.engine import Engine
from moelab.engine.sequence import Sampling, Sequence

STEPS, WARMUP = 20, 4


def engine_steps(engine: Engine, pieces: Many[Piece], kv_len: int, steps: int = STEPS) -> list[float]:
    """us of each of `steps` steps of the requests of these pieces, on their pages, near `kv_len` rows. Fewer where a
    request ends by itself, none where `kv_len` is too short for so many steps. Collective."""
    length = kv_len - (WARMUP + steps + 1) * engine.q_len
    if length < 2:
        return []
    engine.running = [
        Sequence(
            i, (piece.tokens * length)[:length], Sampling(kv_len), num_cached=length - 1, pages=piece.sequence.pages
        )
        for i, piece in enumerate(pieces)
    ]
    found, whole = [], len(pieces)
    for number in range(WARMUP + steps):
        start = time.perf_counter()
        engine.step()
        taken = (time.perf_counter() - start) * 1e6
        if number >= WARMUP and len(engine.running) == whole:
            found.append(taken)
    engine.running = []
    return found
