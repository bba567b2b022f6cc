"""Optional libraries and communication backends: which are there, which work, and why the others do not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor

from moelab.doctor.check import MISSING, OK, WARN, Check, ChildFailed, ask

SECTION = "Libraries"
GPU_EXTRA = "on a GPU host: pip install 'moelab[gpu]'"

_IMPORT = "import json, {module} as m; print(json.dumps({answer}))"
_TORCH = (
    "'CUDA ' + m.version.cuda + (', sees GPUs' if m.cuda.is_available() else ', sees no GPU')"
    " if m.version.cuda else 'CPU only'"
)
# (distributions, module, what to say of it once imported, fix)
_LIBRARIES = (
    (("torch",), "torch", _TORCH, "pip install torch"),
    (("triton",), "triton", "''", "comes with torch for CUDA; without it the torch references serve"),
    (("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"), "", "", "comes with torch for CUDA"),
    (("nvshmem4py-cu13", "nvshmem4py-cu12"), "nvshmem.core", "''", GPU_EXTRA),
    (("flashinfer-python",), "flashinfer", "''", GPU_EXTRA),
    (("sgl-deep-gemm", "deep-gemm"), "deep_gemm", "hasattr(m, 'fp8_gemm_nt')", GPU_EXTRA),
    (("transformers",), "", "", "pip install transformers"),
    (("papermill",), "", "", "only to run notebooks: pip install papermill ipykernel nbconvert"),
    (("jupyterlab",), "", "", "only to open notebooks: pip install jupyterlab"),
)


def checks() -> list[Check]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda row: _library(*row), _LIBRARIES))


def _library(distributions: tuple[str, ...], module: str, answer: str, fix: str) -> Check:
    name, version = version_of(*distributions) or (distributions[0], None)
    shown = module.split(".")[0] if module == "deep_gemm" else name
    if version is None and not (module and _found(module)):
        return Check(SECTION, shown, MISSING, "not installed", fix)
    what = f"{name} {version}" if shown != name and version else version or "version unknown"
    if not module:
        return _pinned(name, version) if name.startswith("nvidia-nvshmem") else Check(SECTION, shown, OK, what)
    try:
        said = ask(_IMPORT.format(module=module, answer=answer))
    except ChildFailed as failure:
        if module == "deep_gemm" and name == "deep-gemm":
            return _placeholder(version)
        return Check(
            SECTION,
            shown,
            WARN,
            f"{what}, import fails: {failure}",
            f"reinstall it; {fix}" if fix == GPU_EXTRA else fix,
        )
    if module == "deep_gemm":
        return Check(SECTION, shown, OK, what) if said else _placeholder(version)
    return Check(SECTION, shown, OK, f"{what}, {said}" if said else what)


def _placeholder(version: str | None) -> Check:
    return Check(
        SECTION,
        "deep_gemm",
        WARN,
        f"deep-gemm {version} is PyPI's placeholder, not the library",
        f"pip uninstall deep-gemm; then {GPU_EXTRA}, which has it as sgl-deep-gemm",
    )


def _pinned(name: str, version: str) -> Check:
    """torch loads its own NVSHMEM host library, and two of them in one process do not work."""
    package, pin = torch_pin() or (None, None)
    if package != name or pin == version:
        return Check(SECTION, name, OK, version + (" (torch's own pin)" if package == name else ""))
    return Check(SECTION, name, WARN, f"{version}, but this torch is built with {pin}", f"pip install {name}=={pin}")


def torch_pin() -> tuple[str, str] | None:
    """(package, version) of NVSHMEM that the installed torch asks for."""
    try:
        required = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (re.match(r"(nvidia-nvshmem-cu\d+)\s*==\s*([\w.]+)", line) for line in required)
    return next(((m[1], m[2]) for m in found if m), None)


def backend_checks() -> list[Check]:
    """`moelab.comm.AllToAll.available()`, asked in a child."""
    code = "import json; from moelab.comm import AllToAll; print(json.dumps(AllToAll.available()))"
    try:
        found = ask(code)
    except ChildFailed as failure:
        return [Check("Backends", "all-to-all", WARN, f"cannot be asked: {failure}", "see torch above")]
    return [
        Check("Backends", name, OK if reason == "ok" else MISSING, reason if reason != "ok" else "works")
        for name, reason in found.items()
    ]


def version_of(*distributions: str) -> tuple[str, str] | None:
    """(name, version) of the first that is installed."""
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _found(module: str) -> bool:
    return importlib.util.find_spec(module.split(".")[0]) is not None
