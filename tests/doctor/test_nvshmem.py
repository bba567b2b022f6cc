from __future__ import annotations

import os
import sys

import pytest

from moelab.doctor import nvshmem, put_signal
from moelab.doctor.check import MISSING, OK, WARN, ChildFailed

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/<pid>/maps")

HEADER = "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION {}\n" \
         "#define NVSHMEM_VENDOR_PATCH_VERSION {}\n"  # fmt: skip


def wheel(install, version="3.4.5", host=None):
    """Puts a wheel of NVSHMEM in place; returns its lib folder."""
    _, minor, patch = version.split(".")
    files = {
        "nvidia/nvshmem/include/non_abi/nvshmem_version.h": HEADER.format(minor, patch).encode(),
        "nvidia/nvshmem/lib/libnvshmem_device.a": b"!<arch>",
        "nvidia/nvshmem/lib/libnvshmem_device.bc": b"BC",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3": b"\x7fELF NVSHMEM v" + (host or version).encode() + b"\x00",
    }
    return install("nvidia-nvshmem-cu13", version, files=files) / "nvidia" / "nvshmem" / "lib"


def found(**changed):
    fields = ("home", "version", "reason", "library", "built_with", "not_built")
    return dict.fromkeys(fields) | {"build": "", "version": "3.4.5", "home": "/somewhere"} | changed


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("NVSHMEM_HOME", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
        monkeypatch.delenv(name, raising=False)


def test_pieces_of_one_version_are_well(install):
    wheel(install)
    install("torch", "2.11.0", requires=["nvidia-nvshmem-cu13==3.4.5"])
    check = nvshmem._versions(found())
    assert check.status == OK and not check.fix
    assert check.detail == (
        "headers and host library 3.4.5; device library and bitcode as in nvidia-nvshmem-cu13 3.4.5; "
        "torch asks for 3.4.5"
    )


def test_a_file_that_is_not_the_wheels_is_named(install):
    lib = wheel(install)
    (lib / "libnvshmem_device.bc").write_bytes(b"BD")
    assert nvshmem.altered_files("nvidia-nvshmem-cu13") == ["libnvshmem_device.bc"]
    (lib / "libnvshmem_device.a").unlink()
    install("torch", "2.11.0", requires=["nvidia-nvshmem-cu13==3.4.5"])
    check = nvshmem._versions(found())
    assert check.status == WARN
    assert "not as in nvidia-nvshmem-cu13 3.4.5: libnvshmem_device.a, libnvshmem_device.bc" in check.detail
    assert check.fix == "pip install --force-reinstall --no-deps nvidia-nvshmem-cu13==3.4.5"


def test_another_minor_version_than_torchs_is_a_warning(install):
    wheel(install, "3.7.2")
    install("torch", "2.11.0", requires=["nvidia-nvshmem-cu13==3.4.5"])
    check = nvshmem._versions(found(version="3.7.2"))
    assert check.status == WARN and "torch asks for 3.4.5" in check.detail and check.fix.endswith("cu13==3.4.5")


def test_a_folder_of_ones_own_is_said_to_be_one(install, monkeypatch):
    install("torch", "2.11.0")
    monkeypatch.setenv("NVSHMEM_HOME", "/elsewhere/nvshmem")
    check = nvshmem._versions(found(home="/elsewhere/nvshmem"))
    assert check.status == OK and "NVSHMEM_HOME=/elsewhere/nvshmem" in check.detail
    broken = nvshmem._versions(found(version=None, reason="has no lib/libnvshmem_host.so.3"))
    assert (broken.status, broken.detail) == (WARN, "has no lib/libnvshmem_host.so.3")


def test_headers_and_host_library_that_disagree_are_found_by_the_child(install):
    wheel(install, host="3.7.2")
    versions, kernels = nvshmem._built()
    assert versions.status == WARN and "3.4.5" in versions.detail and "3.7.2" in versions.detail
    assert kernels.status == MISSING and "cannot be here" in kernels.detail


def test_kernels_are_built_or_the_command_is_named(monkeypatch):
    monkeypatch.setattr(nvshmem, "ask", lambda code: found(library="/cache/lib.so", built_with="3.4.5"))
    check = nvshmem._built()[1]
    assert (check.status, check.detail) == (OK, "built with NVSHMEM 3.4.5: /cache/lib.so")
    answer = found(not_built="not built for these sources and tools", build="on a GPU host: moelab kernels build")
    monkeypatch.setattr(nvshmem, "ask", lambda code: answer)
    check = nvshmem._built()[1]
    assert check.status == MISSING and check.fix.endswith("moelab kernels build")


MAPS = """\
7f00-7f01 r-xp 00000000 08:01 11 /site/nvidia/nvshmem/lib/libnvshmem_host.so.3
7f01-7f02 rw-p 00001000 08:01 11 /site/nvidia/nvshmem/lib/libnvshmem_host.so.3
7f02-7f03 r-xp 00000000 08:01 12 /site/nvidia/nvshmem/lib/nvshmem_bootstrap_uid.so.3
7f03-7f04 r-xp 00000000 08:01 13 /elsewhere/nvshmem/lib/libnvshmem_host.so.3.7.2
7f04-7f05 rw-p 00000000 00:00 0
"""


def test_host_libraries_are_counted_once_each():
    assert nvshmem.host_libraries(MAPS) == [
        "/elsewhere/nvshmem/lib/libnvshmem_host.so.3.7.2",
        "/site/nvidia/nvshmem/lib/libnvshmem_host.so.3",
    ]
    assert nvshmem.host_libraries("") == []


MAP = "import mmap\nfile = open({!r}, 'rb')\nmapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
VERSION = "def get_version():\n    class V:\n        nvshmem4py_version = '0.3.1'\n    return V\n"


@linux
@pytest.mark.parametrize("same", [True, False])
def test_two_host_libraries_in_a_process_are_a_warning(install, same):
    ours = wheel(install) / "libnvshmem_host.so.3"
    other = ours if same else ours.parents[3] / "elsewhere" / "libnvshmem_host.so.3"
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(ours.read_bytes())
    install("torch", "2.11.0", module="torch", source=MAP.format(str(ours)))
    install("nvshmem4py-cu13", "0.3.1", module="nvshmem.core", source=MAP.format(str(other)) + VERSION)
    check = nvshmem._mapped()
    assert check.status == (OK if same else WARN), check
    assert str(ours) in check.detail and "nvshmem4py 0.3.1" in check.detail
    assert same or (str(other) in check.detail and "keep one" in check.fix)


@linux
def test_a_process_without_any_host_library_says_so(install):
    wheel(install)
    install("torch", "2.11.0", module="torch", source="")
    check = nvshmem._mapped()
    assert check.status == MISSING and check.detail.startswith("none in a process with torch and")


@pytest.mark.parametrize(
    ("script", "status"), [("echo 1234", OK), ("cat >/dev/null", MISSING), ("exit 1", MISSING), (None, MISSING)]
)
def test_mps_is_asked_whether_a_server_runs(tmp_path, monkeypatch, script, status):
    if script:
        control = tmp_path / "nvidia-cuda-mps-control"
        control.write_text(f"#!/bin/sh\n{script}\n")
        control.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert nvshmem._mps().status == status


# --- two ranks --------------------------------------------------------------------------------------------------------


def ranks(monkeypatch, *answers):
    """Let rank i answer with answers[i], or fail with it; returns the codes that were asked."""
    asked = {}

    def ask(code, *, timeout_s, env):
        number = int(code.split("rank(")[1].split(",")[0])
        asked[number] = (code, env)
        if isinstance(answers[number], ChildFailed):
            raise answers[number]
        return answers[number]

    monkeypatch.setattr(put_signal, "ask", ask)
    monkeypatch.setattr(nvshmem, "version_of", lambda *names: (names[0], "0.3.1"))
    return asked


def seen(gpu, shared=True, status=2):
    return {"gpu": gpu, "status": status, "shared": shared, "init_s": 1.5 + gpu}


def test_two_ranks_take_a_gpu_each_where_there_are_two(monkeypatch):
    asked = ranks(monkeypatch, seen(0), seen(1))
    check = nvshmem.put_signal_check(8)
    assert check.status == OK and "(GPU 0 and GPU 1)" in check.detail and "in 2.5 s" in check.detail
    assert "rank(0, 0," in asked[0][0] and "rank(1, 1," in asked[1][0]
    assert all(env["NVSHMEM_DISABLE_NVLS"] == "1" and env["NCCL_NVLS_ENABLE"] == "0" for _, env in asked.values())


def test_two_ranks_share_the_only_gpu(monkeypatch):
    asked = ranks(monkeypatch, seen(0, status=3), seen(0, status=3))
    check = nvshmem.put_signal_check(1)
    assert check.status == OK and "GPU 0 both" in check.detail and "limited" in check.detail
    assert "rank(1, 0," in asked[1][0]


def test_memory_that_is_not_mapped_is_a_warning(monkeypatch):
    ranks(monkeypatch, seen(0), seen(1, shared=False))
    check = nvshmem.put_signal_check(2)
    assert check.status == WARN and "memory is not mapped" in check.detail and check.fix


def test_the_rank_that_failed_is_quoted_and_not_the_one_that_waited_for_it(monkeypatch):
    why = ChildFailed("NvshmemError: out of memory")
    for waited in ("no answer within 60 s", "RuntimeError: no signal from rank 1 within 15 s (the flag is 0)"):
        ranks(monkeypatch, ChildFailed(waited), why)
        check = nvshmem.put_signal_check(2)
        assert check.status == WARN and "out of memory" in check.detail and "RUNBOOK" in check.fix
        ranks(monkeypatch, ChildFailed(waited), ChildFailed(waited))
        assert waited in nvshmem.put_signal_check(2).detail


def test_without_gpu_or_library_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(put_signal, "run", None)
    assert nvshmem.put_signal_check(0).detail == "not tried: no GPU"
    monkeypatch.setattr(nvshmem, "version_of", lambda *names: None)
    check = nvshmem.put_signal_check(1)
    assert (check.status, check.detail) == (MISSING, "not tried: nvshmem4py is not installed") and check.fix


def test_patterns_of_two_ranks_differ_everywhere():
    a, b = put_signal.pattern(0), put_signal.pattern(1)
    assert len(a) == put_signal.BYTES and not (a == b).any() and a.float().std() > 50


def test_the_unique_id_comes_whole_from_rank_0(tmp_path, monkeypatch):
    made = os.urandom(put_signal.UID_BYTES)
    assert put_signal._by_file(made, tmp_path) == put_signal._by_file(None, tmp_path) == made
    monkeypatch.setattr(put_signal, "WAIT_S", 0.05)
    with pytest.raises(RuntimeError, match="from rank 0"):
        put_signal._by_file(None, tmp_path / "elsewhere")
