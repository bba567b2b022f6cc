"""Exchanges over emulated kernels that do not wait, in a process of their own: what they take for a place may be
anything, and so is where they then write.

    python -m tests.comm.hasty emulated|emulated-flags SEED

Says for each case whether it was noticed.
"""

from __future__ import annotations

import sys

import torch

from tests.comm import cases
from tests.comm.emulation import emulation
from tests.comm.scenario import Scenario
from tests.comm.test_stress import rounds_of
from tests.pool import Rank, RankError, ThreadPool

GROUPS = [(2, 1), (1, 2), (2, 2), (4, 1)]


def twice(rank: Rank, s: Scenario) -> None:
    with s.construct(rank, timeout_s=2) as a2a:
        for _ in range(2):
            cases.whole(rank, a2a, s)


def noticed(pool: ThreadPool, tries: int, case, *args, ranks: int) -> bool:
    """Whether one of some runs fails, or counts differences: a single one may be lucky."""
    try:
        return any(any(pool.run(case, *args, ranks=ranks)) for _ in range(tries))
    except RankError:
        return True


def main(kind: str, seed: int) -> None:
    torch.set_num_threads(1)
    pool = ThreadPool(kind, (2, 4), emulation("MOELAB_BREAK_WAIT"))
    for dp, tp in GROUPS:
        for payload in ("bf16", "fp8"):
            s = Scenario(dp=dp, tp=tp, tokens=(8, 7, 6, 8)[:dp], hidden=144, payload=payload, seed=seed)
            print(f"exchange dp={dp} tp={tp} {payload}:", noticed(pool, 5, twice, s, ranks=s.ep), flush=True)
    print("stress:", noticed(pool, 3, rounds_of, 2, 1, "rows", 5, 40, ranks=2), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
