"""The rules of CONTRIBUTING.md: layers, silent imports, stripped notebooks, no paths of a machine."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "moelab"

# Left to right: a module imports from its own package and from what stands before it, nothing else of moelab.
LAYERS = [
    "config", "share", "hardware", "stages", "results", "perf", "ops", "comm", "model", "engine", "serve",
    "launch", "bench", "doctor", "plots", "notebook", "cli", "__main__",
]  # fmt: skip
WITHOUT_TORCH = {"config", "hardware", "stages", "results", "perf", "cli", "__main__"}
WITHOUT_JUPYTER = set(LAYERS) - {"plots", "notebook"}
JUPYTER = ["papermill", "jupyterlab", "jupyter_client", "jupyter_core", "nbformat", "nbclient", "nbconvert",
           "ipykernel", "IPython", "notebook", "ipywidgets"]  # fmt: skip
NEVER = {"notebooks", "experiments", "tests", "kernels"}
MAX_FILE_LINES = 350
MAX_KERNEL_LINES, MAX_COLUMNS = 500, 120
MAX_CODE_CELLS, MAX_CELL_LINES = 16, 15


def modules() -> dict[str, Path]:
    """{dotted name: file} of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] != "data":
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layer(module: str) -> str | None:
    """`moelab.comm.torch` -> `comm`; the package itself has none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def imports(module: str, path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a file, whether at its top or inside a function."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from moelab import x` means the module x, if there is one.
            names = [f"{base}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name if name in MODULES else base) for name in names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append((node.lineno, node.args[0].value))
    return found


def broken_layers(module: str, found: list[tuple[int, str]]) -> list[str]:
    own, broken = layer(module), []
    for line, name in found:
        top, target = name.split(".")[0], layer(name)
        where = f"{module}:{line} imports {name}"
        if top in NEVER:
            broken.append(f"{where}: the package never imports that folder")
        elif top == "moelab" and target in LAYERS and own is None:
            broken.append(f"{where}: importing moelab imports nothing else")
        elif top == "moelab" and target in LAYERS and LAYERS.index(target) > LAYERS.index(own):
            broken.append(f"{where}: {own} stands before {target} in {' '.join(LAYERS)}")
    return broken


def run_python(code: str, *args: str) -> subprocess.CompletedProcess:
    """In a fresh interpreter that reads this clone and writes no byte code."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )


def tracked() -> list[Path]:
    """The files under version control; where there is no git, the files that would be."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode == 0 and git.stdout:
        return [path for name in git.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    skipped = {"build", "dist", "report", "records", "__pycache__"}
    found = [p for p in ROOT.iterdir() if p.is_file()]
    for top in ROOT.iterdir():
        hidden = top.name.startswith(".") and top.name != ".ci"
        if top.is_dir() and top.name not in skipped and not hidden:
            found += [p for p in top.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return found


def test_every_module_has_a_layer():
    unknown = {layer(m) for m in MODULES} - {None, *LAYERS}
    assert not unknown, f"say in LAYERS where these stand: {sorted(unknown)}"


def test_imports_point_left():
    broken = [line for m, path in MODULES.items() for line in broken_layers(m, imports(m, path))]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("moelab.perf.memory", "from ..config import ModelConfig\nfrom . import traffic\nimport numpy\n", 0),
        ("moelab.perf.memory", "def f():\n    from moelab import cli\n", 1),
        ("moelab.config", "from .cli import main\n", 1),
        ("moelab.results.store", "from ..perf.memory import kv_bytes\n", 1),
        ("moelab.cli", "import experiments.tinyseek\nfrom notebooks import x\n", 2),
        ("moelab.ops.gemm", "import importlib\nimportlib.import_module('moelab.engine')\n", 1),
    ],
)
def test_the_layer_check_sees(tmp_path, monkeypatch, module, source, count):
    path = tmp_path / "module.py"
    path.write_text(source)
    monkeypatch.setitem(MODULES, "moelab.cli", PACKAGE / "cli.py")
    assert len(broken_layers(module, imports(module, path))) == count


# Removes a list of packages from the sight of the import system, as if they were not installed. A finder that
# raises would not be the same: importlib.util.find_spec returns None for what is missing.
HIDE = """
import sys, importlib
from importlib.machinery import PathFinder
hidden, tried = set(sys.argv[1].split(",")), []
class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in hidden:
            tried.append(name)
            return None
        return PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Hide if finder is PathFinder else finder for finder in sys.meta_path]
for name in sys.argv[2].split(","):
    importlib.import_module(name)
"""


def test_what_models_and_records_do_without_torch():
    """Not even tried: a `try: import torch` at the top would cost seconds wherever torch is there."""
    names = sorted(m for m in MODULES if layer(m) in WITHOUT_TORCH)
    done = run_python(HIDE + "assert not tried, tried", "torch,triton,transformers", ",".join(names))
    assert done.returncode == 0, done.stderr


def test_what_a_gpu_host_needs_imports_without_jupyter():
    names = sorted(m for m in MODULES if layer(m) in WITHOUT_JUPYTER)
    assert {"moelab.cli", "moelab.doctor", "moelab.results"} <= set(names)
    done = run_python(HIDE, ",".join(JUPYTER), ",".join(names))
    assert done.returncode == 0, done.stderr


# What third parties do while they are imported is their affair: they come first, then an audit hook watches.
SILENT = """
import importlib, json, os, sys, time
modules, third, root, report = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
for name in third:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
sys.stdout.flush(); sys.stderr.flush()
os.write(1, b"=====moelab=====\\n"); os.write(2, b"=====moelab=====\\n")
seen, now = [], [None]
ALWAYS = ("socket.connect", "socket.bind", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.fork",
          "os.posix_spawn", "os.mkdir", "os.remove", "os.rename", "os.putenv", "os.unsetenv", "ctypes.dlopen")
def hook(event, args):
    if now[0] is None:
        return
    if event in ALWAYS:
        seen.append([now[0], event, repr(args)[:200]])
    elif event == "open":
        path, mode, flags = str(args[0]), args[1] or "", args[2] or 0
        writes = any(c in mode for c in "wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        reads_data = path.startswith(root) and not path.endswith((".py", ".pyc"))
        if writes or (reads_data and "site-packages" not in path):
            seen.append([now[0], event, path])
sys.addaudithook(hook)
for name in modules:
    if name.endswith("__main__"):
        continue
    env, start = dict(os.environ), time.process_time()
    now[0] = name
    importlib.import_module(name)
    now[0] = None
    if dict(os.environ) != env:
        seen.append([name, "environment", ""])
    if time.process_time() - start > 1.5:
        seen.append([name, "slow", f"{time.process_time() - start:.1f} s of CPU time of its own"])
torch = sys.modules.get("torch")
if torch is not None and torch.cuda.is_initialized():
    seen.append(["", "CUDA", "initialised"])
with open(report, "w") as file:
    json.dump(seen, file)
"""


def test_importing_is_silent(tmp_path):
    third = sorted({
        name for m, path in MODULES.items() for _, name in imports(m, path)
        if name.split(".")[0] != "moelab" and layer(m) not in ("plots", "notebook")
    })  # fmt: skip
    report = tmp_path / "report.json"
    done = run_python(SILENT, json.dumps(list(MODULES)), json.dumps(third), str(ROOT), str(report))
    assert done.returncode == 0, done.stderr
    assert done.stdout.partition("=====moelab=====\n")[2] == ""
    assert done.stderr.partition("=====moelab=====\n")[2] == ""
    assert json.loads(report.read_text()) == []


def test_files_are_short():
    lengths = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8").count("\n") for p in MODULES.values()}
    long = {name: n for name, n in lengths.items() if n > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines; a file is one noun: {long}"


def test_kernel_sources_are_short_and_narrow():
    """As ruff holds it for Python. Columns are characters, not bytes."""
    sources = sorted(path for path in (ROOT / "kernels").iterdir() if path.suffix in (".cu", ".cuh", ".h"))
    assert sources
    lines = {path.name: path.read_text(encoding="utf-8").splitlines() for path in sources}
    wide = [f"{n}:{i}" for n, of in lines.items() for i, line in enumerate(of, start=1) if len(line) > MAX_COLUMNS]
    assert not wide, f"over {MAX_COLUMNS} columns: {wide}"
    long = {name: len(of) for name, of in lines.items() if len(of) > MAX_KERNEL_LINES}
    assert not long, f"over {MAX_KERNEL_LINES} lines: {long}"


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_first_notebooks_are_there():
    assert {"00_start_here", "01_parallelism", "03_all_to_all"} <= {p.stem for p in NOTEBOOKS}
    strays = [p.name for p in NOTEBOOKS if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", p.name)]
    assert not strays, f"a notebook is called NN_topic.ipynb: {strays}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in code:
        assert cell["outputs"] == [] and cell["execution_count"] is None, "strip it before committing"
    assert "widgets" not in notebook["metadata"], "strip it before committing"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert len(code) <= MAX_CODE_CELLS
    assert max(len("".join(cell["source"]).splitlines()) for cell in code) <= MAX_CELL_LINES
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1, "one code cell is tagged `parameters`"
    source = "".join(tagged[0]["source"])
    lines = source.splitlines()
    for node in ast.parse(source).body:
        line = lines[node.lineno - 1]
        assert isinstance(node, ast.Assign | ast.AnnAssign), f"{line}: parameters are assignments"
        ast.literal_eval(node.value)  # raises unless it is a literal
        assert "#" in lines[node.end_lineno - 1], f"{line}: say in a comment what it means"


# Only where a path starts: in a web address or after a variable the same words are harmless.
MACHINE_PATH = re.compile(r"(?<![\w.:/}~*)\]-])/(?:work|root|home|Users|tmp|opt|mnt|scratch)/\w")
REGISTRY_HOST = re.compile(r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org)\b")
# CPython's own sources, held out from training: their text is data.
FOREIGN = ROOT / "moelab" / "data" / "tinyseek" / "heldout"


def machine_marks(text: str) -> list[str]:
    return [
        f"{number}: {line.strip()[:120]}"
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line)
    ]


def test_no_paths_of_a_machine():
    found = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" in data or FOREIGN in path.parents:
            continue
        text = data.decode("utf-8", "replace")
        found += [f"{path.relative_to(ROOT)}:{mark}" for mark in machine_marks(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("top", ["work/x", "root/x", "home/someone", "tmp/x", "Users/someone/x"])
def test_the_path_check_sees(top):
    for text in (f"open('/{top}')", f"cd /{top}/y", f"=/{top}/y", f'"/{top}"'):
        assert machine_marks(text), text
    for text in (f"https://example.org/{top}", f"a/{top}", f"./{top}/y", f"$OUT/{top}"):
        assert not machine_marks(text), text


def test_ruff():
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed: pip install -e '.[test]'")
    folders = [name for name in ("moelab", "tests", "experiments") if (ROOT / name).is_dir()]
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
