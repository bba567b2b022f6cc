"""How the processes of a launch talk: each has a Unix socket to the one that started them all.

A pipe shared by all ranks keeps lines whole only up to 4096 bytes, and says nothing when a rank dies. A
socket for each rank has neither trouble: messages are JSON lines of any length, whatever a library prints
cannot get among them, and the kernel closes it at the very moment of death, which is how either side learns
that the other is gone.
"""

from __future__ import annotations

import json
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOCKET = "hub"  # its name in a launch's folder
AGENT = -1  # stands for torchrun where a rank's number is expected


class Link:
    """The end that a rank (or torchrun) holds."""

    def __init__(self, folder: str | Path, rank: int, pid: int):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(Path(folder) / SOCKET))
        self._lock = threading.Lock()
        self.send({"rank": rank, "pid": pid})

    def send(self, message: dict[str, Any]) -> None:
        """Raises TypeError for what JSON has no word for."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._socket.sendall(line)

    def when_gone(self, act: Callable[[], None]) -> None:
        """Call `act` from a thread once the other end is closed, by its process's death too."""

        def wait() -> None:
            try:
                self._socket.recv(1)  # nothing is ever sent this way
            except OSError:
                pass
            act()

        threading.Thread(target=wait, daemon=True).start()


class Hub:
    """The end of the process that started the others: puts (rank, message) into `inbox`, from a thread.

    The last message of each is the hub's own: {"gone": when}.

    It reads on whatever the receiver does, so that a slow reader of a run's output never holds up a rank in
    the middle of an exchange.
    """

    def __init__(self, folder: Path):
        self.inbox: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.pids: dict[int, int] = {}  # of those whose link is open, hence alive
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(1024)
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop_writer.close()
        self._thread.join()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stop_reader, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._stop_reader:
                        for open_key in list(selector.get_map().values()):
                            open_key.fileobj.close()
                        return
                    if key.fileobj is self._listener:
                        selector.register(self._listener.accept()[0], selectors.EVENT_READ, _Peer())
                    elif not self._receive(key.fileobj, key.data):
                        selector.unregister(key.fileobj)
                        key.fileobj.close()

    def _receive(self, link: socket.socket, peer: _Peer) -> bool:
        """Pass on what has come; False once the link is closed."""
        try:
            data = link.recv(1 << 16)
        except ConnectionError:
            data = b""
        peer.chunks.append(data)
        lines = []
        if b"\n" in data:  # joined only then: a message of megabytes comes in many chunks
            *lines, rest = b"".join(peer.chunks).split(b"\n")
            peer.chunks = [rest]
        for line in lines:
            message = json.loads(line)
            if peer.rank is None:
                peer.rank = message["rank"]
                self.pids[peer.rank] = message["pid"]
            else:
                self.inbox.put((peer.rank, message))
        if not data and peer.rank is not None:
            del self.pids[peer.rank]
            self.inbox.put((peer.rank, {"gone": time.time()}))
        return bool(data)


class _Peer:
    """One open link: who it is, and the chunks that have come so far of its next line."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.chunks: list[bytes] = []
