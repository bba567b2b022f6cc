"""Functions that the launch tests run on ranks."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def talk(context, job):
    """Everything a rank can say when all goes well."""
    total = torch.tensor([float(context.rank)])
    dist.all_reduce(total)
    print("printed by", context.rank)
    os.write(2, b"written in C\n")
    context.emit({"rank": context.rank, "sum": total.item(), "job": job, "pid": os.getpid()})
    context.emit({"big": "ä" * job["big"], "threads": torch.get_num_threads(), "address": os.environ["MASTER_ADDR"]})
    context.emit({"last": True})


def fail(context, job):
    """One rank ends in the way `job` says, while the others wait for it in a collective."""
    context.emit({"pid": os.getpid(), "parent": os.getppid()})
    dist.barrier()
    if context.rank == job["rank"]:
        _end(job["how"])
    dist.barrier()  # never passes


def _end(how):
    if how == "raise":
        raise RuntimeError("this rank raised")
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)
    if how == "return":
        return
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)


def fail_all(context, job):
    """Every rank raises, the one that `job` names first."""
    dist.barrier()
    if context.rank != job["rank"]:
        time.sleep(0.2)
    raise ValueError(f"rank {context.rank} raised")


def wait(context, job):
    context.emit({"pid": os.getpid(), "parent": os.getppid()})
    time.sleep(600)
