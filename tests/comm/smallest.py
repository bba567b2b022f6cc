"""A few exchanges of four virtual ranks on one GPU, to run under compute-sanitizer:

compute-sanitizer --tool memcheck  --kernel-regex kns=_by_ python -m tests.comm.smallest
compute-sanitizer --tool racecheck --kernel-regex kns=_by_ python -m tests.comm.smallest
"""

from __future__ import annotations

from moelab.comm.library import load
from tests.comm import cases
from tests.comm.scenario import Scenario
from tests.pool import ThreadPool


def main() -> None:
    for kind in ("gpu-virtual", "gpu-virtual-flags"):
        pool = ThreadPool(kind, (4,), load())
        for s in (
            Scenario(dp=2, tp=2, tokens=(7, 3), payload="fp8", hidden=144, scales="column_tma", repeats=True),
            Scenario(dp=4, tokens=(8, 0, 1, 5), layout="contiguous_128"),
        ):
            pool.run(cases.check_exchange, s)
        pool.stop()
    print("two protocols, two shapes: right")


if __name__ == "__main__":
    main()
