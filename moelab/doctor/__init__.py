"""What works on this machine, what does not, why, and what to do about it.

Each part is one `Check`. Nothing here fails: a part that is missing is a finding, with the reason as the
library gave it. Whatever imports a library for GPUs or asks the driver does so in a child with a time limit,
for NVSHMEM exits the process when its initialisation fails, and a broken driver may hang; this process never
imports torch.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from moelab.doctor.check import Check
from moelab.doctor.table import as_table

__all__ = ["Check", "as_dict", "as_table", "collect"]


def collect(records: str | Path | None = None) -> list[Check]:
    """Every check, in the report's order; takes as long as importing torch. `records`: as `--records`."""
    from concurrent.futures import ThreadPoolExecutor

    from moelab.doctor import gpus, libraries, machine, network, nvshmem

    with ThreadPoolExecutor(4) as pool:  # most of the time goes into waiting for children
        asked = [pool.submit(part.checks) for part in (gpus, libraries, nvshmem)]
        backends, nodes = pool.submit(libraries.backend_checks), pool.submit(lambda: list(network.checks()))
        gpu, library, shmem = (future.result() for future in asked)
        gpu_count = sum(c.name.startswith("GPU ") for c in gpu)
        found = [*machine.system_checks(), *gpu, *library, *backends.result(), *shmem]
    found.append(nvshmem.put_signal_check(gpu_count))  # alone, as it has a time limit
    return [*found, *machine.host_checks(gpu_count > 0), *nodes.result(), *machine.data_checks(records)]


def as_dict(checks: list[Check]) -> dict[str, Any]:
    """The report for machines: {"moelab": version, "summary": {status: count}, "checks": [...]}."""
    from moelab import __version__
    from moelab.doctor.table import count

    return {"moelab": __version__, "summary": count(checks), "checks": [asdict(c) for c in checks]}
