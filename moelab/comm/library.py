"""The kernels' shared library, seen from Python: `kernels/exchange.h` in ctypes, and `load()`.

Nothing is added to the C functions but that a failure raises: pointers are integers (`tensor.data_ptr()`), a stream is
its handle (`torch.cuda.current_stream().cuda_stream`), and what they mean is said in the header. The two structures
are laid out here a second time; `load` compares their sizes with the library's.

NVSHMEM has a device half, linked into our library, and a host half, of which a process must have only one. torch for
CUDA brings one and loads it with `import torch`, so that goes first: the loader then hands the same one to us by its
name. The device half may be older than the host half, never newer.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch

from moelab.comm import build
from moelab.comm.errors import CommError
from moelab.comm.toolchain import find_nvshmem, serves

UID_BYTES = 128


class Dtype(IntEnum):
    BF16, FP8, F32, F16 = range(4)


class Layout(IntEnum):
    EXPERT_PADDED, CONTIGUOUS_128 = range(2)


class Scales(IntEnum):
    ROW, COLUMN, UE8M0 = range(3)


class Return(IntEnum):
    ROWS, F32, Y = range(3)


class Protocol(IntEnum):
    PACKETS, FLAGS, PUTS = range(3)


class What(IntEnum):
    DISPATCH, COMBINE = range(2)


class Halves(IntEnum):
    SEND, RECV, FUSED = 1, 2, 3


class Error(IntEnum):
    """Where the words of an error record stand (uint64 each)."""

    FAILED, HALF, PEER, EXPECTED, SEEN, BAD_IDS, BAD_COUNT = range(7)
    WORDS = 8


MOST_PACKETS, MOST_BLOCKS = 512, 1024


class Shape(ctypes.Structure):
    """`MoelabShape`: what all ranks agree on."""

    _fields_ = [
        (name, c_int32)
        for name in (
            "dp", "tp", "experts", "top_k", "hidden", "max_tokens", "payload", "layout", "scales", "returns", "slots",
            "protocol",
        )
    ]  # fmt: skip


class Call(ctypes.Structure):
    """`MoelabCall`: one exchange of one rank. What is not given is 0 or null."""

    _fields_ = [
        ("windows", c_void_p),
        ("window", c_void_p),
        ("state", c_void_p),
        ("host_error", c_void_p),
        ("rank", c_int32),
        ("slot", c_int32),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("ids", c_void_p),
        ("ids_stride", c_int64 * 2),
        ("weights", c_void_p),
        ("weights_stride", c_int64 * 2),
        ("scales", c_void_p),
        ("scales_stride", c_int64 * 2),
        ("num_tokens", c_void_p),
        ("tokens", c_int32),
        ("ids_bytes", c_int32),
        ("has_work", c_int32),
        ("quantize", c_int32),
        ("rows", c_void_p),
        ("row_scales", c_void_p),
        ("counts", c_void_p),
        ("starts", c_void_p),
        ("all_idle", c_void_p),
        ("y", c_void_p),
        ("out", c_void_p),
        ("out_dtype", c_int32),
        ("send_blocks", c_int32),
        ("timeout_ns", c_uint64),
    ]


class Sizes(NamedTuple):
    window_bytes: int
    state_bytes: int
    slot_bytes: int  # of a window's slot
    contiguous_rows: int  # rows of the contiguous layout


# name: (result, arguments), as in exchange.h.
SIGNATURES = {
    "moelab_a2a_sizes": (c_char_p, (c_void_p, c_void_p)),
    "moelab_a2a_struct_bytes": (None, (c_void_p,)),
    "moelab_a2a_most_blocks": (c_int, (c_void_p, c_int, c_int, c_int)),
    "moelab_a2a_launch": (c_int, (c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_void_p)),
    "moelab_a2a_launch_virtual": (c_int, (c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p)),
    "moelab_nvshmem_init": (c_int, (c_char_p, c_int, c_int)),
    "moelab_nvshmem_finalize": (None, ()),
    "moelab_nvshmem_device_rank": (c_int, (c_void_p, c_void_p)),
}


class Library:
    """The C functions of exchange.h. Each raises `CommError` where its function fails. `c` is the library itself, for
    what else is in it; `path`, its file."""

    def __init__(self, path: str | Path) -> None:
        """Raises `CommError` where the file cannot be loaded, lacks a function, or lays its structures out
        differently."""
        self.path = Path(path)
        try:
            _host_half()
            # RTLD_LOCAL: torch's libtorch_nvshmem.so has a device half too, and its symbols must not be taken for ours.
            self.c = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
            for name, (result, arguments) in SIGNATURES.items():
                function = getattr(self.c, name)
                function.restype, function.argtypes = result, arguments
        except OSError as error:
            cuda = torch.version.cuda or "the CPU alone"
            raise CommError(
                f"cannot load the kernels: {error}; they want a torch for CUDA 13, this one is for {cuda}"
            ) from None
        except AttributeError as error:
            raise CommError(f"the kernels lack a function: {error}; reinstall moelab, then {build.COMMAND}") from None
        self.c.cudaGetErrorString.restype, self.c.cudaGetErrorString.argtypes = c_char_p, (c_int,)
        found = (c_int64 * 2)()
        self.c.moelab_a2a_struct_bytes(found)
        wanted = [ctypes.sizeof(Shape), ctypes.sizeof(Call)]
        if list(found) != wanted:
            raise CommError(
                f"{path} has structures of {list(found)} bytes, this moelab of {wanted}: they are not of one version; "
                f"reinstall moelab, then {build.COMMAND}"
            )

    def sizes(self, shape: Shape) -> Sizes:
        """Raises `CommError` with the reason where the kernels do not serve the shape."""
        sizes = (c_int64 * 4)()
        why = self.c.moelab_a2a_sizes(byref(shape), sizes)
        if why is not None:
            raise CommError(why.decode())
        return Sizes(*sizes)

    def most_blocks(self, shape: Shape, what: int, halves: int, quantize: bool) -> int:
        """The most blocks of this launch that run at once on the current GPU."""
        blocks = self.c.moelab_a2a_most_blocks(byref(shape), what, halves, quantize)
        if blocks < 0:
            self._check(-blocks, "asking how many blocks fit")
        return blocks

    def launch(
        self, shape: Shape, call: Call, what: int, halves: int, *, blocks: int = 0, early: bool = False, stream: int
    ) -> None:
        """One half, or both, of one rank's exchange. blocks 0: the library chooses; early: launched before the kernel
        ahead in the stream has ended (programmatic dependent launch)."""
        status = self.c.moelab_a2a_launch(byref(shape), byref(call), what, halves, blocks, early, stream)
        self._check(status, f"launching {What(what).name.lower()} ({Halves(halves).name.lower()})" if status else "")

    def launch_virtual(
        self,
        shape: Shape,
        calls: int,
        what: int,
        halves: int,
        *,
        blocks: int,
        quantize: bool,
        out_dtype: int,
        stream: int,
    ) -> None:
        """All ranks in one launch; `calls` is device memory with a `Call` for each; `blocks` of each rank."""
        status = self.c.moelab_a2a_launch_virtual(
            byref(shape), calls, what, halves, blocks, quantize, out_dtype, stream
        )
        self._check(
            status,
            f"launching {What(what).name.lower()} ({Halves(halves).name.lower()}) of all ranks" if status else "",
        )

    def nvshmem_init(self, uid: bytes, rank: int, ranks: int) -> None:
        """Collective. `uid`: 128 bytes, the same on every rank. The device has been set before."""
        if len(uid) != UID_BYTES:
            raise CommError(f"uid has {len(uid)} bytes: an NVSHMEM unique id has {UID_BYTES}")
        status = self.c.moelab_nvshmem_init(uid, rank, ranks)
        if status:
            raise CommError(
                f"NVSHMEM did not start on rank {rank} of {ranks}: status {status}; NVSHMEM_DEBUG=INFO says more"
            )

    def nvshmem_finalize(self) -> None:
        """Collective."""
        self.c.moelab_nvshmem_finalize()

    def nvshmem_device_rank(self, rank: int, stream: int) -> None:
        """Writes this rank's number, as a kernel sees it, to the int32 at `rank` in device memory."""
        self._check(self.c.moelab_nvshmem_device_rank(rank, stream), "asking for the rank on the device")

    def nvshmem_version(self) -> str:
        """Of the host half that this process has loaded, "3.4.5"."""
        parts = [c_int(), c_int(), c_int()]
        self.c.nvshmemx_vendor_get_version_info(*map(byref, parts))
        return ".".join(str(part.value) for part in parts)

    def _check(self, status: int, doing: str) -> None:
        if status:
            text = self.c.cudaGetErrorString(status).decode()
            raise CommError(f"{doing}: {text} (CUDA error {status})")


def _host_half() -> None:
    """NVSHMEM's host library: torch's, which is loaded; where torch has none, the one that we were built with."""
    name = "libnvshmem_host.so.3"
    try:
        ctypes.CDLL(name)
    except OSError:
        ctypes.CDLL(str(find_nvshmem().home / "lib" / name))


@functools.cache
def load() -> Library:
    """The library, built if it is not yet and nvcc is here; raises `CommError` with what to do otherwise.

    Not collective. A job that finds nothing built builds on first use, since whoever has nvcc would only be told to
    type the command: one process of each node compiles and says so, its others wait for it.
    """
    built = build.ensure()
    library = Library(built.library)
    host, device = library.nvshmem_version(), built.nvshmem
    if not serves(host, device):
        raise CommError(
            f"the kernels are built with NVSHMEM {device}, but this process has loaded the host library of {host}, "
            f"which cannot serve them: unset NVSHMEM_HOME, or set it to one that is no newer than {host}, and build "
            f"anew: {build.COMMAND}"
        )
    return library
