"""The sockets between ranks and the process that started them, without ranks."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from pathlib import Path

import pytest

from moelab.launch.link import Hub, Link


@pytest.fixture
def hub():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders have long names
        hub = Hub(Path(folder))
        yield hub, folder
        hub.close()


def test_messages_of_any_size_stay_whole(hub):
    hub, folder = hub
    sizes = [1, 4095, 4096, 4097, 3_000_000, 2]
    links = [Link(folder, rank, os.getpid()) for rank in range(4)]

    def talk(link, rank):
        for size in sizes:
            link.send({"event": f"{rank}ä" * size})

    threads = [threading.Thread(target=talk, args=(link, rank)) for rank, link in enumerate(links)]
    for thread in threads:
        thread.start()
    seen = {rank: [] for rank in range(4)}
    for _ in range(4 * len(sizes)):
        rank, message = hub.inbox.get(timeout=30)
        assert message["event"] == f"{rank}ä" * (len(message["event"]) // 2)
        seen[rank].append(len(message["event"]) // 2)
    assert seen == dict.fromkeys(range(4), sizes)
    for thread in threads:
        thread.join()


def test_each_end_learns_that_the_other_is_gone(hub):
    hub, folder = hub
    first, second = Link(folder, 0, 111), Link(folder, 1, 222)
    second.send({"event": "late"})
    second._socket.close()
    assert hub.inbox.get(timeout=10) == (1, {"event": "late"})
    rank, message = hub.inbox.get(timeout=10)
    assert rank == 1 and abs(message["gone"] - time.time()) < 10
    assert hub.pids == {0: 111}
    gone = threading.Event()
    first.when_gone(gone.set)
    assert not gone.wait(0.2)
    hub.close()
    assert gone.wait(10)
    with pytest.raises(queue.Empty):
        hub.inbox.get(timeout=0.1)


def test_what_json_has_no_word_for_is_an_error_at_its_sender(hub):
    hub, folder = hub
    link = Link(folder, 0, os.getpid())
    with pytest.raises(TypeError):
        link.send({"event": object()})
    link.send({"event": 1})
    assert hub.inbox.get(timeout=10) == (0, {"event": 1})
