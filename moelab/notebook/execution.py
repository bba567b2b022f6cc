"""Execute a notebook, render it, and run all of them as the tour.

A notebook runs in its own kernel process under this very interpreter, whatever kernels are installed on the
machine: the numbers in it belong to the versions in its footer. It succeeded if no cell raised and the kernel
lived; a file that was written proves nothing, for the partly executed notebook is kept on failure too.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab.notebook.locate import NotebookError, find, folder, names
from moelab.notebook.parameter import check


@dataclass(frozen=True)
class Run:
    """An executed notebook: `ipynb` with outputs, `html` rendered from it, `seconds` it took."""

    name: str
    ipynb: Path
    html: Path
    seconds: float
    error: str = ""  # empty: success


def run(
    path: str | Path,
    params: Mapping[str, Any] | None = None,
    out_dir: str | Path = "out",
    *,
    progress: bool = True,
) -> Run:
    """Execute a notebook with checked parameters and render it: <out_dir>/<stem>.ipynb and .html. The kernel
    works in the current folder, so `./records` is the caller's. `progress`: a bar over the cells on standard
    error.

    Raises NotebookError when a cell fails or the kernel dies: it names the cell, the exception with its
    place, and the partly executed notebook, which is rendered all the same."""
    path = find(path)
    given = check(path, params or {})
    papermill, exceptions = _papermill()
    out = _make_folder(out_dir)
    ipynb, html = out / f"{path.stem}.ipynb", out / f"{path.stem}.html"
    if ipynb.exists() and ipynb.samefile(path):
        raise NotebookError(f"--out {out} is where {path.name} itself lies: choose another folder")
    for old in (ipynb, html):  # a file of an earlier run must not pass for this one's
        old.unlink(missing_ok=True)
    started, failure = time.monotonic(), ""
    try:
        papermill.execute_notebook(
            str(path), str(ipynb), given, kernel_name="python3", language="python", progress_bar=progress,
            kernel_manager_class=_kernel_manager(),
        )  # fmt: skip
    except exceptions.PapermillExecutionError as error:
        failure = _explain(error)
    except (RuntimeError, OSError, exceptions.PapermillException) as error:  # kernel died or could not start
        failure = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    seconds = time.monotonic() - started
    if ipynb.exists():
        _render(ipynb, html)
    if failure:
        raise NotebookError(f"{path.stem} failed: {failure}; executed so far: {html if html.exists() else 'nothing'}")
    return Run(path.stem, ipynb, html, seconds)


def tour(out_dir: str | Path = "report", *, progress: bool = True) -> Path:
    """Run every notebook of `folder()` in order and write <out_dir>/index.html, a gallery of them; returns
    its path. One that fails does not stop the rest: its card says so, and NotebookError is raised at the
    end."""
    from moelab.notebook import gallery

    found = [folder() / f"{name}.ipynb" for name in names()]
    if not found:
        raise NotebookError(f"no notebooks in {folder()}")
    out, runs, started = _make_folder(out_dir), [], time.monotonic()
    for number, path in enumerate(found, start=1):
        if progress:
            print(f"[{number}/{len(found)}] {path.stem}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        try:
            runs.append(run(path, out_dir=out, progress=progress))
        except NotebookError as error:
            if progress:
                print(f"  failed: {error}", file=sys.stderr, flush=True)
            ipynb, html = out / path.name, out / f"{path.stem}.html"
            runs.append(Run(path.stem, ipynb, html, time.monotonic() - begun, str(error)))
    index = gallery.write(runs, out, seconds=time.monotonic() - started)
    failed = [r for r in runs if r.error]
    if failed:
        raise NotebookError(f"{len(failed)} of {len(runs)} notebooks failed (see {index}): {failed[0].error}")
    return index


def _papermill():
    try:
        import ipykernel  # noqa: F401  # the kernel's own side
        import papermill
        from papermill import exceptions
    except ImportError as error:
        raise NotebookError(f"running notebooks needs papermill and ipykernel: {error}") from None
    return papermill, exceptions


def _kernel_manager() -> type:
    """A kernel manager that starts this interpreter. The kernelspec "python3" may belong to another one:
    whichever environment registered it last in the user's folder."""
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    # ipykernel's own spec, with the full path of sys.executable. Its log (50: only what is fatal) would stand
    # in the middle of the progress bar; what a cell prints does not pass through it.
    spec = KernelSpec(**get_kernel_dict(extra_arguments=["--log-level=50"]))
    root = Path(__file__).resolve().parents[2]
    if root.name != "site-packages":  # a clone: the notebook imports this package, installed or not
        spec.env["PYTHONPATH"] = os.pathsep.join(x for x in (str(root), os.environ.get("PYTHONPATH")) if x)

    class ThisInterpreter(AsyncKernelManager):
        transport_encryption = "auto"  # jupyter_client from 8.10; before, there is none to ask for

        @property
        def kernel_spec(self):
            return spec

    return ThisInterpreter


def _render(ipynb: Path, html: Path) -> None:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="lab")
    exporter.log = logging.getLogger(f"{__name__}.nbconvert")
    exporter.log.setLevel(logging.ERROR)  # it warns of every figure without alternative text
    body, _ = exporter.from_filename(str(ipynb))
    html.write_text(body, encoding="utf-8")


def _explain(error: Any) -> str:
    """The failing cell, the exception, and the deepest line of the notebook's own code that the traceback
    shows."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", x) for part in error.traceback for x in part.splitlines()]
    arrows = [m for x in lines if (m := re.match(r"\s*-+>\s*(\d+)\s+(.*\S)", x))]
    first = next((x.strip() for x in error.source.splitlines() if x.strip() and not x.strip().startswith("#")), "")
    place = f" at line {arrows[-1][1]}: {arrows[-1][2]}" if arrows else ""
    message = f"{error.ename}: {error.evalue}".strip().replace("\n", " | ")
    return f"cell In [{error.exec_count}] ({first[:60]}) raised {message}{place}"


def _make_folder(out_dir: str | Path) -> Path:
    out = Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotebookError(f"cannot make the folder {out}: {error.strerror}; choose another with --out") from None
    return out
