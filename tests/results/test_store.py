from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from moelab.results import Record, Store, StoreError
from moelab.results import store as store_module

CLEAN, OTHER = "a" * 40, "b" * 40

WRITER = """
import sys
from moelab.results import Record, Store
record = Record.from_json(sys.stdin.readline()).to_dict()
store, name, count = Store(sys.argv[1], package=False), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
for i in range(count):
    store.append(Record(**record | {"params": {"writer": name, "i": i, "pad": "x" * (i % 3000)}}))
    print(i, flush=True)
"""


def writer(folder, name, count, record):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), name, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(record.to_json() + "\n")
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    return process


def test_append_then_read(tmp_path, make):
    store = Store(tmp_path / "new" / "records", package=False)
    path = store.append(make())
    assert path == tmp_path / "new" / "records" / "h200x2" / "alltoall.jsonl"
    assert store.append(make(gpu="cpu", gpu_count=0, driver="")).parent.name == "cpu"
    assert store.append(make(gpu="NVIDIA H100 80GB HBM3", gpu_count=8)).parent.name == "h100-80gb-hbm3x8"
    assert len(store.records()) == 3 and store.damage == []


def test_a_killed_writer_loses_at_most_its_last_line(tmp_path, make):
    """Kill a writer by SIGKILL at a random moment, again and again: what it said it wrote must be there."""
    said = {}
    for round_number in range(6):
        name = f"w{round_number}"
        process = writer(tmp_path, name, 100_000, make())
        assert process.stdout.readline() == "ready\n"
        time.sleep(random.uniform(0.01, 0.25))
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split("\n")[:-1]
        assert process.wait() == -signal.SIGKILL
        said[name] = int(lines[-1]) if lines else -1
    assert max(said.values()) > 0
    store = Store(tmp_path, package=False)
    store.append(make())
    entries = store.entries()
    found = [entry.record.params for entry in entries]
    # Linux may break a write off between two pages when its process is killed: such a line stands alone, behind
    # the last whole one of its writer and before the first of the next.
    writers = {entry.line: entry.record.params.get("writer") for entry in entries}
    assert len(store.damage) <= len(said)
    for torn in store.damage:
        before = writers.get(torn.line - 1)
        assert before is None or before != writers.get(torn.line + 1)
    for name, last in said.items():
        numbers = [p["i"] for p in found if p.get("writer") == name]
        assert numbers[: last + 1] == list(range(last + 1)) and len(numbers) <= last + 2


def test_two_writers_at_once_keep_every_line_whole(tmp_path, make):
    processes = [writer(tmp_path, name, 1500, make()) for name in "ab"]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    store = Store(tmp_path, package=False)
    found = [entry.record.params for entry in store.entries()]
    assert store.damage == [] and len(found) == 3000
    for name in "ab":
        assert [p["i"] for p in found if p["writer"] == name] == list(range(1500))


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_torn_last_line_is_healed_by_the_next_append(tmp_path, make, cut):
    store = Store(tmp_path, package=False)
    path = store.append(make(params={"i": 0}))
    store.append(make(params={"i": 1}))
    content = path.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(content[:cut] if cut < 0 else content[: last + cut])
    store.append(make(params={"i": 2}))
    numbers = [r.params["i"] for r in store.records()]
    if cut < 0:  # only the newline was lost: the record is whole, and stays
        assert numbers == [0, 1, 2] and store.damage == []
    else:
        assert numbers == [0, 2] and [(d.path, d.line) for d in store.damage] == [(path, 2)]
    assert path.read_bytes().endswith(b"}\n")


def test_damage_is_reported_once_by_file_and_number_and_reading_goes_on(tmp_path, make, caplog):
    store = Store(tmp_path, package=False)
    path = store.append(make(params={"i": 0}))
    with open(path, "ab") as file:
        file.write(b"{torn\n\n   \n\x00\xff\xfe\n" + make().to_json().replace('"n": 3', '"n": 0').encode() + b"\n")
    store.append(make(params={"i": 1}))
    with caplog.at_level(logging.WARNING):
        assert [r.params["i"] for r in store.records()] == [0, 1]
        store.records()
    assert [d.line for d in store.damage] == [2, 5, 6]  # blank lines are none
    assert "'n' is 0" in store.damage[2].reason
    assert len(caplog.records) == 3 and f"{path}:2: not JSON" in caplog.text


def test_the_newest_clean_commit_wins_and_dirty_only_without_clean(tmp_path, make):
    store = Store(tmp_path, package=False)
    for day, dirty, value in [(1, False, 1.0), (3, False, 3.0), (2, False, 2.0), (9, True, 9.0)]:
        store.append(make(samples=[value], time=f"2026-01-0{day}T00:00:00Z", dirty=dirty))
    store.append(make(samples=[5.0], params={"only": "dirty"}, dirty=True, time="2026-01-05T00:00:00Z"))
    store.append(make(samples=[4.0], params={"only": "dirty"}, dirty=True, time="2026-01-04T00:00:00Z"))
    assert {r.p50 for r in store.records()} == {3.0, 5.0}
    assert len(store.entries()) == 6
    store.append(make(samples=[3.5], time="2026-01-03T00:00:00Z", commit=OTHER))  # tie: later line
    assert {r.p50 for r in store.records()} == {3.5, 5.0}


def test_the_users_own_folder_precedes_the_package(tmp_path, make, monkeypatch):
    monkeypatch.setattr(store_module, "PACKAGE_RECORDS", tmp_path / "package")
    package, own = Store(tmp_path / "package", package=False), Store(tmp_path / "own")
    package.append(make(samples=[1.0], time="2026-06-01T00:00:00Z"))
    package.append(make(samples=[2.0], params={"k": 1}))
    assert [(e.record.p50, e.own) for e in own.winners()] == [(1.0, False), (2.0, False)]
    own.append(make(samples=[7.0], dirty=True))  # older and dirty, but measured here
    assert [(e.record.p50, e.own) for e in own.winners()] == [(7.0, True), (2.0, False)]


def test_records_are_selected_by_field_and_parameter(tmp_path, make):
    store = Store(tmp_path, package=False)
    for tokens in (1, 2, 128):
        for metric in ("dispatch", "combine"):
            store.append(make(params={"tokens": tokens}, metric=metric))
    assert len(store.records("alltoall")) == 6
    assert [r.params["tokens"] for r in store.records(metric="combine", tokens=2)] == [2]
    assert [r.params["tokens"] for r in store.records(metric="combine")] == [1, 2, 128]  # numbers by value
    assert store.records("alltoall", backend="torch") == [] == store.records(nothing=None)


def test_default_folder_is_records_where_the_command_runs(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    assert Store(package=False).records() == []
    Store().append(make())
    assert (tmp_path / "records" / "h200x2" / "alltoall.jsonl").is_file()


def test_frame_and_parquet_hold_every_field(tmp_path, make):
    store = Store(tmp_path, package=False)
    store.append(make(params={"tokens": 128, "mixed": 1, "big": 2**70, "n": 5}))
    store.append(make(params={"tokens": 64, "mixed": "auto", "flag": True}, seed=None))
    frame = store.to_frame()
    assert sorted(frame["params.tokens"]) == [64, 128] and set(frame["n"]) == {3}
    target = tmp_path / "all.parquet"
    assert store.to_parquet(target) == 2
    back = pd.read_parquet(target)
    assert set(back["params.mixed"]) == {"1", '"auto"'} and str(2**70) in set(back["params.big"])
    assert set(back["bench"]) == {"alltoall"} and {"versions.torch", "own", "path", "line"} <= set(back)
    with pytest.raises(StoreError, match="cannot write"):
        store.to_parquet(tmp_path / "no" / "such" / "folder.parquet")


def test_an_empty_store_has_an_empty_frame_with_columns(tmp_path):
    frame = Store(tmp_path, package=False).to_frame()
    assert len(frame) == 0 and {"bench", "p50", "own"} <= set(frame)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path, make):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--records"):
        Store(tmp_path / "file").append(make())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error(tmp_path, make):
    path = tmp_path / "h200x2" / "alltoall.jsonl"
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    with pytest.raises(StoreError, match="No space left"):
        Store(tmp_path).append(make())


def test_a_write_that_is_cut_short_leaves_no_torn_line(tmp_path, make, monkeypatch):
    store = Store(tmp_path, package=False)
    path = store.append(make())
    before, write = path.read_bytes(), os.write
    monkeypatch.setattr(store_module.os, "write", lambda fd, data: write(fd, data[:10]))
    with pytest.raises(StoreError, match="only 10 of"):
        store.append(make())
    assert path.read_bytes() == before


def test_every_shipped_record_is_whole_and_clean():
    entries = Store("/nonexistent").entries()
    store = Store("/nonexistent")
    assert [e.record for e in store.entries()] == [e.record for e in entries] and store.damage == []
    for entry in entries:
        assert not entry.record.dirty and entry.path.parent.name == store_module.machine(entry.record)
        assert entry.path.stem == entry.record.bench and isinstance(entry.record, Record)
