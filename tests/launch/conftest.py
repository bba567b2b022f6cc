"""A small checkpoint with a byte-level tokenizer, and a way to see processes that were left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
BOS, EOS = 256, 257


def save_byte_tokenizer(folder: Path) -> None:
    """Token id = byte, then <|bos|> and <|eos|>: the byte-level BPE scheme without a single merge."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()  # a printable stand-in for each byte; Latin-1 for itself
    itself = {c for c in letters if ord(c) < 256}
    others = [b for b in range(256) if chr(b) not in itself]
    vocab = {c: ord(c) if c in itself else others[ord(c) - 256] for c in letters}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|bos|>", "<|eos|>")]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint, tmp_path_factory):
    """The tiny checkpoint, whole: with a tokenizer, and the ids that go with it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    for file in tiny_checkpoint.iterdir():
        shutil.copy(file, folder)
    changed = json.loads((folder / "config.json").read_text()) | {"bos_token_id": BOS, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(changed))
    save_byte_tokenizer(folder)
    return folder


class Traces:
    """Processes that carry a mark in their environment, wherever they hang in the tree; and their folders."""

    def __init__(self, folder: Path):
        self.mark, self.folder = f"{uuid.uuid4()}", folder
        self.environment = {
            **os.environ,
            "MOELAB_TEST_MARK": self.mark,
            "TMPDIR": str(folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MOELAB_TEST_MARK") == self.mark and process.pid != os.getpid():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                pass
        return found

    def ranks(self) -> list[psutil.Process]:
        workers = [p for p in self.processes() if "moelab.launch.worker" in p.cmdline()]
        return [p for p in workers if "moelab.launch.agent" not in p.cmdline()]

    def assert_none(self, within_s: float = 0.0) -> None:
        deadline = time.monotonic() + within_s
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.processes() == []
        zombies = [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]
        assert zombies == []
        assert list(self.folder.glob("moelab-*")) == []


@pytest.fixture
def traces(tmp_path_factory, monkeypatch):
    """What is started during the test, in this process or with `traces.environment`, carries its mark."""
    found = Traces(Path(os.path.realpath(tmp_path_factory.mktemp("t"))))
    for name in ("MOELAB_TEST_MARK", "TMPDIR", "PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, found.environment[name])
    monkeypatch.setattr("tempfile.tempdir", None)  # so that TMPDIR is read again
    yield found
    for process in found.processes():
        process.kill()


@pytest.fixture
def scripted(monkeypatch):
    """Ranks that say what the test wants: fill the list with events."""
    events, jobs = [], []

    @contextlib.contextmanager
    def launch(function, job, ranks, device):
        jobs.append((function, json.loads(json.dumps(job)), ranks, device))
        yield ((0, event) for event in events)

    monkeypatch.setattr("moelab.launch.generate.launch", launch)
    return events, jobs
