"""Ranks that stay: threads over `VirtualRanks`, or processes over torch.distributed, behind one interface.

| kind | ranks are | what moves the data |
|---|---|---|
| virtual | threads | a mailbox |
| emulated, emulated-flags | threads | the kernels' source on the CPU, by packets and by flags |
| gpu-virtual, gpu-virtual-flags | threads | the kernels, all ranks in one launch on one GPU: only fused forms wait |
| gloo, gloo-cuda, nccl | processes | torch.distributed, the second staged through the host |
| nvshmem, nvshmem-flags | processes, one or more on a GPU | the kernels, into mapped memory |
| nvshmem-half, nvshmem-puts | likewise | half of the peers, or all, by NVSHMEM puts |

A case is a module-level function of a `Rank` and picklable arguments. A pool runs it on some ranks and hands back
what each returned. Starting processes costs seconds, so one pool of each kind serves all tests; a case makes and
closes its own exchanges.
"""

from __future__ import annotations

import queue
import threading
import traceback
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moelab.comm import AllToAll, Nvshmem, VirtualRanks
from moelab.comm.library import Library
from moelab.config import ParallelConfig

PATIENCE_S = 60  # no single command of a test takes longer, unless something hangs


@dataclass
class Rank:
    """What a case is given."""

    index: int
    kind: str
    device: torch.device
    groups: dict[int, object]  # ep -> what AllToAll takes as group, where this rank is in it
    state: dict = field(default_factory=dict)  # from one case to the next

    @property
    def kernels(self) -> bool:
        return moves_by_kernels(self.kind)

    @property
    def closes_together(self) -> bool:
        """Whether closing an exchange waits for the others, so that a rank cannot do it while another still works."""
        return self.kind.startswith(("nccl", "nvshmem"))

    def exchange(self, dp: int, tp: int, *args, **options) -> AllToAll:
        options = {"timeout_s": 30, "device": self.device, "group": self.groups.get(dp * tp)} | options
        return AllToAll(ParallelConfig(dp, tp), *args, **options)


def moves_by_kernels(kind: str) -> bool:
    """Emulated or not."""
    return kind.startswith(("emulated", "gpu-virtual", "nvshmem"))


class RankError(AssertionError):
    """A case failed on a rank; the message holds its traceback."""


class Pool(ABC):
    """`size` ranks. Sub-groups of the first ep ranks serve every ep of `sizes`."""

    kind: str
    size: int
    sizes: tuple[int, ...]

    @property
    def kernels(self) -> bool:
        return moves_by_kernels(self.kind)

    @abstractmethod
    def submit(self, rank: int, case, *args) -> Future:
        """Run case(Rank, *args) on one rank, after what it was given before."""

    def up_to(self, ranks: int) -> int:
        """The largest group of at most `ranks` ranks, else the smallest there is."""
        return max((ep for ep in self.sizes if ep <= ranks), default=min(self.sizes))

    def run(self, case, *args, ranks: int | None = None) -> list:
        """On the first `ranks` ranks (default: all) at once; their results, or the first failure."""
        return self.gather([self.submit(rank, case, *args) for rank in range(ranks or self.size)])

    @staticmethod
    def gather(futures: list[Future]) -> list:
        errors, results = [], []
        for future in futures:
            try:
                results.append(future.result(PATIENCE_S))
            except Exception as error:
                errors.append(error)
        if errors:
            # One rank's failure makes the others fail: the first cause may be in any of them.
            raise RankError("\n".join(f"{type(error).__name__}: {error}" for error in errors))
        return results


class ThreadPool(Pool):
    """With a library, its kernels move the data: on a GPU all ranks in one launch, in the emulation each alone, unless
    `one_launch`."""

    def __init__(
        self,
        kind: str = "virtual",
        sizes: tuple[int, ...] = (1, 2, 4, 8),
        library: Library | None = None,
        one_launch: bool = False,
    ) -> None:
        self.kind, self.sizes, self.size = kind, sizes, max(sizes)
        device = torch.device("cuda", 0) if kind.startswith("gpu") else torch.device("cpu")
        worlds = {ep: VirtualRanks(ep, library, one_launch or device.type == "cuda") for ep in sizes}
        self._inbox = [queue.SimpleQueue() for _ in range(self.size)]
        for index, inbox in enumerate(self._inbox):
            groups = {ep: world.rank(index) for ep, world in worlds.items() if index < ep}
            if kind.endswith("flags"):
                groups = {ep: Nvshmem(group, packets=False) for ep, group in groups.items()}
            rank = Rank(index, kind, device, groups)
            threading.Thread(target=self._serve, args=(rank, inbox), daemon=True).start()

    @staticmethod
    def _serve(rank: Rank, inbox: queue.SimpleQueue) -> None:
        while (command := inbox.get()) is not None:
            case, args, future = command
            try:
                future.set_result(case(rank, *args))
            except BaseException:
                future.set_exception(RankError(f"rank {rank.index}:\n{traceback.format_exc()}"))

    def submit(self, rank: int, case, *args) -> Future:
        future = Future()
        self._inbox[rank].put((case, args, future))
        return future

    def stop(self) -> None:
        for inbox in self._inbox:
            inbox.put(None)


def _over_nvshmem(group: dist.ProcessGroup, index: int, kind: str) -> Nvshmem:
    size, reach = group.size(), {"nvshmem-half": group.size() // 2, "nvshmem-puts": group.size()}.get(kind, 0)
    puts_to = tuple(peer for peer in range(size) if peer != index and (peer - index) % size <= reach)
    return Nvshmem(group, packets=kind != "nvshmem-flags", puts_to=puts_to)


def _serve_process(index: int, size: int, sizes: tuple[int, ...], kind: str, store: str, pipe) -> None:
    torch.set_num_threads(1)  # the ranks outnumber the cores; threads within them only get in the way
    cuda = kind != "gloo"
    device = torch.device("cuda", index % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "nccl" else "gloo",
        init_method=f"file://{store}",
        rank=index,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    groups = {}
    for ep in sizes:
        group = dist.group.WORLD if ep == size else dist.new_group(list(range(ep)))
        if index < ep:
            groups[ep] = _over_nvshmem(group, index, kind) if kind.startswith("nvshmem") else group
    rank = Rank(index, kind, device, groups)
    while (command := pipe.recv()) is not None:
        case, args = command
        try:
            reply = True, case(rank, *args)
        except BaseException:
            reply = False, f"rank {index}:\n{traceback.format_exc()}"
        pipe.send(reply)
    dist.destroy_process_group()


class ProcessPool(Pool):
    def __init__(self, kind: str, size: int, sizes: tuple[int, ...], folder: str) -> None:
        self.kind, self.size, self.sizes = kind, size, sizes
        # A server that has imported torch once forks the ranks: one import instead of `size`. It never touches a GPU
        # itself, so its children may.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "moelab.engine.engine", "tests.comm.cases"])
        self._pipes, self._processes, self._waiting = [], [], []
        for index in range(size):
            ours, theirs = context.Pipe()
            args = (index, size, sizes, kind, f"{folder}/store", theirs)
            process = context.Process(target=_serve_process, args=args, daemon=True)
            process.start()
            theirs.close()
            waiting = queue.SimpleQueue()
            threading.Thread(target=self._listen, args=(index, ours, waiting), daemon=True).start()
            self._pipes.append(ours)
            self._processes.append(process)
            self._waiting.append(waiting)

    @staticmethod
    def _listen(index: int, pipe, waiting: queue.SimpleQueue) -> None:
        while (future := waiting.get()) is not None:
            try:
                ok, value = pipe.recv()
            except (EOFError, OSError):
                future.set_exception(RankError(f"rank {index} died"))
                continue
            if ok:
                future.set_result(value)
            else:
                future.set_exception(RankError(value))

    def submit(self, rank: int, case, *args) -> Future:
        future = Future()
        self._waiting[rank].put(future)
        self._pipes[rank].send((case, args))
        return future

    def stop(self) -> None:
        for pipe, waiting in zip(self._pipes, self._waiting, strict=True):
            waiting.put(None)
            try:
                pipe.send(None)
            except OSError:
                pass  # it died; the test that saw it has said so
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
