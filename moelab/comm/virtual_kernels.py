"""Virtual ranks over the kernels: all windows lie in this process's memory, on one GPU or, with a library that emulates
the kernels, on the CPU.

    world = VirtualRanks(8, library=load())       # eight ranks on one GPU, a thread for each
    a2a = AllToAll(ParallelConfig(dp=8), 256, 8, 7168, 128, group=world.rank(i))

Kernels that wait for one another must be on the GPU together, which two launches are never sure of. So the halves of
all ranks are one cooperative launch: each rank brings its call, the last to come launches all of them, and the others
wait until it has; every half is then a meeting, sends too. What does not fit on the GPU fails instead of hanging. All
ranks use one stream.

With `one_launch=False` every rank launches for itself, as processes do, and nobody meets. That is for the emulation,
where a launch is threads of the operating system and returns once it has run. A rank that is alone does so anywhere: it
has nobody to wait for, and its halves can be captured in a CUDA graph as those over NVSHMEM.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

import torch

from moelab.comm.device_exchange import make_shape
from moelab.comm.errors import CommError, WireError
from moelab.comm.library import Call, Library, Shape
from moelab.comm.nvshmem import Nvshmem
from moelab.comm.spec import ExchangeSpec
from moelab.comm.virtual import VirtualRank
from moelab.config import ConfigError

MOST_BLOCKS = 16  # of each rank: more would not test more


@dataclass
class Shared:
    """What the ranks of one exchange share: windows and states, and the calls that have come for a launch."""

    library: Library
    shape: Shape
    device: torch.device
    windows: torch.Tensor  # [R, bytes] uint8
    states: torch.Tensor
    table: torch.Tensor  # [R] int64, addresses of the windows
    waiting: dict[tuple[int, int, int], dict[int, Call]] = field(default_factory=dict)
    launched: dict[tuple[int, int, int], Exception | None] = field(default_factory=dict)


class VirtualSite:
    """One rank of `VirtualRanks` with a library."""

    name = "virtual"

    def __init__(
        self,
        options: Nvshmem,
        group: VirtualRank,
        spec: ExchangeSpec,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.rank, self._size = group.index, group.world.size
        self._one_launch = group.world.one_launch and self._size > 1
        self.send_blocks, self._blocks, self._timeout_s = options.send_blocks, options.num_blocks, timeout_s
        if device.type == "cuda" and not self._one_launch and self._size > 1:
            raise ConfigError("one_launch is False on a GPU: kernels that wait for one another have to be one launch")
        if options.puts_to:
            raise ConfigError(f"puts_to is {options.puts_to} over virtual ranks: puts need processes")
        self._channel = group.world.join(self.rank, spec)
        self._channel.agree(
            self.rank, json.dumps({"returns": options.returns, "packets": options.packets, "device": str(device)})
        )
        with self._channel.changed:
            if self._channel.shared is None:
                self._channel.shared = _share(group.world.library, spec, options, device)
            self._shared: Shared = self._channel.shared
        self.windows = self._shared.table.data_ptr()
        self.window = self._shared.windows[self.rank].data_ptr()
        self.state = self._shared.states[self.rank].data_ptr()

    def agree(self, settings: str, deadline: float) -> None:
        self._channel.agree(self.rank, settings)

    def launch(self, number: int, call: Call, what: int, halves: int) -> None:
        shared = self._shared
        self._channel.check()
        if not self._one_launch:
            shared.library.launch(
                shared.shape, call, what, halves, blocks=self._blocks, stream=_current_stream(shared.device)
            )
            return
        key, channel, start = (number, what, halves), self._channel, time.monotonic()
        with channel.changed:
            came = shared.waiting.setdefault(key, {})
            came[self.rank] = call
            if len(came) == self._size:
                try:
                    self._launch_all([came[rank] for rank in range(self._size)], what, halves)
                except Exception as error:
                    shared.launched[key] = error
                    raise
                else:
                    shared.launched[key] = None
                finally:
                    channel.changed.notify_all()
                    self._leave(key)
                return

            def missing() -> list[int]:
                return [rank for rank in range(self._size) if rank not in came]

            channel.changed.wait_for(
                lambda: key in shared.launched or channel.difference or any(rank in channel.left for rank in missing()),
                self._timeout_s,
            )
            if key not in shared.launched:
                gone = missing()
                del came[self.rank]  # whoever comes late must not launch for us
                channel.check()
                how = next((channel.left[r] for r in gone if r in channel.left), None)
                seen = how or f"nothing within {time.monotonic() - start:.1f} s"
                raise WireError(gone[0] if len(gone) == 1 else tuple(gone), seen)
            error = shared.launched[key]
            self._leave(key)
        if error is not None:
            raise CommError(f"another rank's launch for all ranks failed: {error}") from error

    def abandon(self) -> None:
        self._channel.leave(self.rank, "the peer failed and left")

    def close(self, failed: bool, timeout_s: float) -> None:
        """The memory goes with the last rank that has it."""
        self._channel.leave(self.rank, "the peer failed and left" if failed else "the peer closed its exchange")

    def _leave(self, key: tuple[int, int, int]) -> None:
        """The last one to learn of a launch forgets it."""
        came = self._shared.waiting[key]
        del came[self.rank]
        if not came:
            del self._shared.waiting[key], self._shared.launched[key]

    def _launch_all(self, calls: list[Call], what: int, halves: int) -> None:
        shared, first = self._shared, calls[0]
        if len({(call.quantize, call.out_dtype, call.send_blocks) for call in calls}) > 1:
            raise CommError("virtual ranks quantise, and take outputs of one dtype, all together or not at all")
        fit = shared.library.most_blocks(shared.shape, what, halves, bool(first.quantize)) // self._size
        blocks = min(self._blocks or MOST_BLOCKS, fit)
        if blocks < 1:
            raise CommError(f"{self._size} virtual ranks do not fit on the GPU together: take fewer")
        raw = bytearray(b"".join(map(bytes, calls)))
        table = torch.frombuffer(raw, dtype=torch.uint8).to(shared.device, copy=True)
        shared.library.launch_virtual(
            shared.shape, table.data_ptr(), what, halves, blocks=blocks, quantize=bool(first.quantize),
            out_dtype=first.out_dtype, stream=_current_stream(shared.device),
        )  # fmt: skip


def _share(library: Library, spec: ExchangeSpec, options: Nvshmem, device: torch.device) -> Shared:
    shape, window_bytes, state_bytes = make_shape(spec, library, options.returns, True, options.packets)
    size = spec.parallel.ep
    with torch.inference_mode(False):
        windows = torch.zeros(size, -(-window_bytes // 128) * 128, dtype=torch.uint8, device=device)
        states = torch.zeros(size, -(-state_bytes // 128) * 128, dtype=torch.uint8, device=device)
        table = torch.tensor([row.data_ptr() for row in windows], dtype=torch.int64, device=device)
    return Shared(library, shape, device, windows, states, table)


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
