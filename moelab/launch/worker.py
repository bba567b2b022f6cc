"""One rank: finds out who it is, joins the others, and calls the function that the launch names.

A function for ranks is any `function(context, job)` in an importable module. It finds the default process
group ready (NCCL where each rank has a GPU of its own, otherwise gloo), `job` as it was given to `launch`,
and in `context` its rank, its device and `emit`. When it raises, the launch ends on all ranks and shows its
traceback. What it prints goes to a file, and at the end of the run to standard error, marked with the rank.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab.config import MoelabError
from moelab.launch.link import Link

JOB = "job.json"  # names in a launch's folder
# How long a rank that has failed stays, so that the launch can end all ranks before they fail over its
# absence.
LINGER_S = 10.0


def log_file(folder: str | Path, rank: int) -> Path:
    """What a rank has printed, C libraries included."""
    return Path(folder) / f"rank{rank}.log"


@dataclass(frozen=True)
class Context:
    """Who a rank is. `emit` sends a dict, as JSON and of any size, to the process that started the run."""

    rank: int
    world_size: int
    local_rank: int
    device: str  # "cpu" or "cuda:1"
    emit: Callable[[dict[str, Any]], None]


def main(folder: str) -> int:
    rank = int(os.environ["RANK"])
    link = Link(folder, rank, os.getpid())
    link.when_gone(lambda: os.kill(os.getpid(), signal.SIGKILL))
    _redirect_output(log_file(folder, rank))
    try:
        _run(json.loads((Path(folder) / JOB).read_text(encoding="utf-8")), link)
    except BaseException as error:
        link.send({"error": _describe(error)})
        time.sleep(LINGER_S)
        return 1
    link.send({"done": True})
    return 0


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable()  # a crash in C leaves the Python stack there


def _run(request: dict[str, Any], link: Link) -> None:
    import torch.distributed as dist

    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device, backend, bound_to = _place(request["device"], local_rank)
    dist.init_process_group(backend, device_id=bound_to)
    module, _, name = request["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    function(
        Context(rank, world_size, local_rank, device, lambda event: link.send({"event": event})),
        request["job"],
    )
    dist.destroy_process_group()


def _place(kind: str, local_rank: int):
    """(device, backend, the device that NCCL is bound to)."""
    if kind == "cpu":
        return "cpu", "gloo", None
    import torch

    count = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    # NCCL refuses two ranks on one GPU.
    if int(os.environ["LOCAL_WORLD_SIZE"]) <= count:
        return str(device), "nccl", device
    return str(device), "gloo", None


def _describe(error: BaseException) -> dict[str, Any]:
    frames = error.__traceback__.tb_next or error.__traceback__  # without `main`
    # An exchange fails on one rank for what another did, so where it happened matters; other errors that are
    # meant for the user say all in their one line.
    of_exchange = any(kind.__module__ == "moelab.comm.errors" for kind in type(error).__mro__)
    plain = isinstance(error, MoelabError) and not of_exchange
    return {
        "time": time.time(),
        "line": str(error) if plain else traceback.format_exception_only(error)[-1].strip(),
        "traceback": None if plain else "".join(traceback.format_exception(type(error), error, frames)),
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
