from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from moelab import doctor
from moelab.doctor import gpus, libraries, machine
from moelab.doctor.check import MISSING, OK, WARN, Check, ChildFailed, ask

SECTIONS = {"System", "GPU", "Libraries", "Backends", "NVSHMEM", "Host", "Multi-node only", "Data"}
TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-15\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t0-15\t0\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def test_a_child_answers_or_says_why_not():
    assert ask("print('noise'); import json; print(json.dumps({'a': [1, None]}))") == {"a": [1, None]}
    for code, reason in [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died by SIGSEGV"),
        ("import os; os._exit(7)", "ended with status 7"),
        ("print('no json')", "without an answer"),
        ("pass", "without an answer"),
    ]:
        with pytest.raises(ChildFailed, match=reason):
            ask(code)
    with pytest.raises(ChildFailed, match="no answer within 1 s"):
        ask("import time; time.sleep(60)", timeout_s=1)


def test_topology_is_read():
    assert gpus.parse_topology(TOPOLOGY) == {
        (0, 1): "NV18", (0, 2): "SYS", (1, 0): "NV18", (1, 2): "PHB", (2, 0): "SYS", (2, 1): "PHB",
    }  # fmt: skip
    assert gpus.parse_topology("") == {}


def answer(monkeypatch, count, *, p2p=True, capability=(9, 0)):
    """Let the driver show `count` GPUs."""
    pairs = [[a, b] for a in range(count) for b in range(a + 1, count)]
    found = {
        "gpus": [
            {
                "index": i,
                "name": "NVIDIA H200",
                "memory_bytes": 150754820096,
                "capability": capability,
                "sms": 132,
            }
            for i in range(count)
        ],
        "pairs": [{"gpus": pair, "p2p": p2p, "atomics": p2p} for pair in pairs],
    }
    monkeypatch.setattr(gpus, "ask", lambda code, **kw: found)
    topology = {tuple(pair): "NV18" for pair in pairs}
    monkeypatch.setattr(gpus, "_topology", lambda: topology)
    monkeypatch.setattr(gpus, "_output", lambda command: "580.159\n580.159\n")


def test_gpus_and_links(monkeypatch):
    answer(monkeypatch, 2)
    found = {c.name: c for c in gpus.checks()}
    assert found["GPU 1"].detail == "NVIDIA H200, 140.4 GiB, capability 9.0, 132 SMs" and found["GPU 1"].status == OK
    assert found["links"].detail == "0–1: NV18, P2P yes, native atomics yes" and found["links"].status == OK
    assert (found["driver"].status, found["driver"].detail) == (OK, "580.159")


def test_alike_pairs_share_a_line_and_what_is_wrong_is_a_warning(monkeypatch):
    answer(monkeypatch, 8, p2p=False, capability=(8, 0))
    found = [c for c in gpus.checks() if c.name == "links"]
    assert len(found) == 1 and found[0].status == WARN and found[0].fix
    assert found[0].detail == "all 28 pairs: NV18, P2P no, native atomics no"
    assert {c.status for c in gpus.checks() if c.name.startswith("GPU ")} == {WARN}
    monkeypatch.setattr(gpus, "_output", lambda command: "535.10\n")
    assert gpus._driver().status == WARN
    monkeypatch.setattr(gpus, "_output", lambda command: None)
    assert "nvidia-smi does not answer" in gpus._driver().detail


def test_without_a_gpu_the_drivers_reason_is_shown(monkeypatch):
    def refuse(code, **options):
        raise ChildFailed("RuntimeError: cuInit: no CUDA-capable device is detected (100)")

    monkeypatch.setattr(gpus, "ask", refuse)
    first = gpus.checks()[0]
    assert (first.name, first.status) == ("GPUs", MISSING)
    assert first.detail == "none: cuInit: no CUDA-capable device is detected (100)"


def library(name):
    row = next(r for r in libraries._LIBRARIES if name in r[0])
    return libraries._library(*row)


def test_a_missing_library_names_the_fix():
    check = libraries._library(("no-such-distribution",), "no_such_module", "''", "pip install it")
    assert (check.status, check.detail, check.fix) == (MISSING, "not installed", "pip install it")


def test_a_library_whose_import_fails_shows_the_reason_as_it_is(install):
    install("flashinfer-python", "9.9", module="flashinfer", source="raise OSError('libfoo.so.1: no such file')")
    check = library("flashinfer-python")
    assert check.status == WARN and "9.9, import fails: OSError: libfoo.so.1: no such file" in check.detail


def test_a_library_that_kills_the_process_does_not_kill_the_doctor(install):
    install("flashinfer-python", "9.9", module="flashinfer", source="import os; os.abort()")
    assert "died by SIGABRT" in library("flashinfer-python").detail


def test_the_placeholder_of_deep_gemm_is_told_from_the_library(install):
    install("deep-gemm", "1.0.0")  # no module at all
    check = library("deep-gemm")
    assert check.status == WARN and "deep-gemm 1.0.0 is PyPI's placeholder, not the library" in check.detail
    assert "sgl-deep-gemm" in check.fix
    install("sgl-deep-gemm", "0.1.4", module="deep_gemm", source="def fp8_gemm_nt(): ...")
    check = library("deep-gemm")
    assert (check.name, check.status, check.detail) == ("deep_gemm", OK, "sgl-deep-gemm 0.1.4")


def test_a_placeholder_with_an_empty_module_is_one_too(install):
    install("deep-gemm", "1.0.0", module="deep_gemm", source="__version__ = '1.0.0'")
    assert "placeholder" in library("deep-gemm").detail


def test_nvshmem_other_than_torchs_pin_is_a_warning(install):
    install("torch", "2.11.0", requires=['nvidia-nvshmem-cu13==3.4.5; platform_system == "Linux"'])
    install("nvidia-nvshmem-cu13", "3.7.0")
    check = library("nvidia-nvshmem-cu13")
    assert check.status == WARN and check.detail == "3.7.0, but this torch is built with 3.4.5"
    assert check.fix == "pip install nvidia-nvshmem-cu13==3.4.5"


def test_backends_are_those_of_the_library():
    from moelab.comm import AllToAll

    found = {c.name: c for c in libraries.backend_checks()}
    assert set(found) == set(AllToAll.available()) and found["torch-gloo"].status == OK


def test_multicast_left_on_is_a_warning_only_with_gpus(monkeypatch):
    def status(has_gpu):
        return next(c for c in machine.host_checks(has_gpu) if c.name == "multicast off")

    for name in machine.MULTICAST:
        monkeypatch.delenv(name, raising=False)
    assert status(True).status == WARN and "NCCL_NVLS_ENABLE=0" in status(True).fix
    assert status(False).status == MISSING and not status(False).fix
    for name, value in machine.MULTICAST.items():
        monkeypatch.setenv(name, value)
    assert status(True).status == OK


def test_a_kernel_that_refuses_file_descriptors_of_other_ranks_is_a_warning_only_with_gpus(monkeypatch):
    def check(has_gpu):
        return next(c for c in machine.host_checks(has_gpu) if c.name == "pidfd_getfd")

    if sys.platform != "linux":
        assert check(True).status == MISSING
        return
    assert check(True).detail  # whatever this host allows, something is said

    def no_such_call(pid):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(machine.os, "pidfd_open", no_such_call)
    assert (check(True).status, check(False).status) == (WARN, MISSING)
    assert "refused even for this process: Function not implemented" in check(True).detail
    assert "SYS_PTRACE" in check(True).fix and not check(False).fix


def test_a_toolkit_that_does_not_know_hopper_is_a_warning(monkeypatch):
    def said(codes):
        return lambda command: codes if "--list-gpu-code" in command else "release 13.0, V13.0.88"

    monkeypatch.setattr(gpus.shutil, "which", lambda name, path=None: "/cuda/nvcc")
    monkeypatch.setattr(gpus, "_output", said("sm_75\nsm_80\nsm_90\n"))
    assert (gpus._toolkit().status, gpus._toolkit().detail) == (OK, "nvcc 13.0.88 at /cuda/nvcc")
    monkeypatch.setattr(gpus, "_output", said("sm_75\nsm_80\n"))
    assert gpus._toolkit().status == WARN and "sm_90" in gpus._toolkit().detail


def test_damaged_records_are_pointed_at(tmp_path):
    (tmp_path / "x.jsonl").write_text("{torn")
    check = next(c for c in machine.data_checks(tmp_path) if c.name == "records")
    assert check.status == WARN and f"{tmp_path / 'x.jsonl'}:1" in check.detail


def test_the_table_shows_every_finding_and_fix():
    from rich.console import Console

    checks = [
        Check("A", "one", OK, "[good]"),
        Check("A", "two", WARN, "bad", "mend it"),
        Check("B", "three", MISSING, "no"),
    ]
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(doctor.as_table(checks))
    text = console.export_text()
    for part in ("one", "[good]", "bad", "→ mend it", "three", "missing", "1 ok · 1 to look at · 1 missing"):
        assert part in text


def test_the_command_prints_json_and_never_imports_torch_itself(tmp_path):
    code = "import sys\nfrom moelab.cli import main\n"
    code += "try: main(['doctor', '--json'])\nexcept SystemExit as end: assert not end.code\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sum(report["summary"].values()) == len(report["checks"])
    assert SECTIONS == {c["section"] for c in report["checks"]}
    for check in report["checks"]:
        assert check["status"] in (OK, WARN, MISSING) and check["name"] and "\n" not in check["detail"] + check["fix"]


DRIVER = r"""
#include <stddef.h>
#include <string.h>
#ifndef STATUS
#define STATUS 0
#endif
int cuInit(unsigned flags) { return STATUS; }
int cuGetErrorString(int status, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA H200", size); return device < 10; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 143771ull << 20; return device < 10; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  *value = which == 75 ? 9 : which == 76 ? 0 : which == 16 ? 132 : -1; return device < 10; }
int cuDeviceGetP2PAttribute(int *value, int which, int src, int dst) {  /* towards 12 no atomics */
  *value = which == 2 ? 1 : which == 3 ? dst != 12 : -1; return src < 10 || dst < 10; }
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A libcuda.so.1 that answers as three H200 would, or refuses with a status."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in driver with")

    def build(status=0):
        (tmp_path / "driver.c").write_text(DRIVER)
        command = [compiler, "-shared", "-fPIC", f"-DSTATUS={status}", "driver.c", "-o", "libcuda.so.1"]
        subprocess.run(command, cwd=tmp_path, check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        return ask("import json; from moelab.doctor.gpus import probe; print(json.dumps(probe()))")

    return build


def test_the_driver_is_asked_for_gpus_and_both_directions_of_every_pair(driver):
    found = driver()
    assert found["gpus"][2] == {
        "index": 2,
        "name": "NVIDIA H200",
        "memory_bytes": 143771 * 2**20,
        "capability": [9, 0],
        "sms": 132,
    }
    assert {tuple(p["gpus"]): (p["p2p"], p["atomics"]) for p in found["pairs"]} == {
        (0, 1): (True, True),
        (0, 2): (True, False),
        (1, 2): (True, False),
    }


def test_a_driver_that_refuses_gives_its_reason(driver):
    with pytest.raises(ChildFailed, match=r"cuInit: no CUDA-capable device is detected \(100\)"):
        driver(status=100)
