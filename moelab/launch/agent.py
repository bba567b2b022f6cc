"""torchrun, with a link to the process that started it.

torchrun tells how its ranks ended only in prose. Run in this process, it raises the same as data: exit codes,
by which a rank that was killed, and could not say anything itself, is told from those that were stopped after
it.
"""

from __future__ import annotations

import os
import signal
import sys

from moelab.launch.link import AGENT, Link


def main(folder: str, ranks: str) -> int:
    link = Link(folder, AGENT, os.getpid())
    # torchrun stops its ranks on SIGTERM. Before it is imported, the same signal ends this process.
    link.when_gone(lambda: os.kill(os.getpid(), signal.SIGTERM))
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    where = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", ranks]
    try:
        torchrun([*where, "--module", "moelab.launch.worker", folder])
    except ChildFailedError as error:
        link.send({"exits": {rank: failure.exitcode for rank, failure in error.failures.items()}})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
