from __future__ import annotations

import json
import re
import sys

import nbformat
import pytest

from moelab import notebook
from moelab.notebook import NotebookError, gallery

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
FIGURE = f"from IPython.display import Image, display\nimport base64\ndisplay(Image(base64.b64decode('{PNG}')))"


def printed(path):
    cells = nbformat.read(path, as_version=4).cells
    return "".join(o.get("text", "") for c in cells for o in c.get("outputs", []))


def test_run_executes_with_the_given_values_and_renders(write, tmp_path, monkeypatch, capsys):
    path = write("small", "# Small\n\nDoes it run?", "# parameters\nn = 1\nname = 'a'\n", "print(n * 2, name)")
    monkeypatch.chdir(tmp_path)
    done = notebook.run(path, {"n": "21", "name": "b"}, tmp_path / "deep" / "out")
    assert printed(done.ipynb) == "42 b\n" and done.error == "" and done.seconds > 0
    assert "Does it run?" in done.html.read_text()
    assert printed(path) == ""  # the notebook itself stays as it is
    shown = capsys.readouterr()
    assert shown.out == "" and "100%" in shown.err  # the progress bar, and nothing on standard output


def test_the_kernel_is_this_interpreter_whatever_is_installed(write, tmp_path, monkeypatch):
    """A kernelspec of the same name that belongs to something else must not be used."""
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps({"argv": ["/bin/false", "{connection_file}"], "display_name": "x", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.chdir(tmp_path)  # moelab must be importable from anywhere
    path = write("which", "import os, sys, moelab\nprint(sys.executable, moelab.__file__, os.getcwd(), sep='\\n')")
    done = notebook.run(path, out_dir=tmp_path / "out", progress=False)
    executable, package, folder = printed(done.ipynb).split()
    import moelab

    assert (executable, package, folder) == (sys.executable, moelab.__file__, str(tmp_path))


def test_a_failing_cell_is_named_and_the_partly_executed_notebook_kept(write, tmp_path):
    ratio = "def ratio(x):\n    return 1 / (x - 1)"
    path = write("fails", "# Fails", ratio, "# parameters\nn = 1", "ratio(n)", "print('never')")
    out = tmp_path / "out"
    out.mkdir()
    (out / "fails.html").write_text("of an earlier run")
    with pytest.raises(NotebookError) as caught:
        notebook.run(path, out_dir=out, progress=False)
    message = str(caught.value)
    assert re.search(r"cell In \[3\] \(ratio\(n\)\) raised ZeroDivisionError: division by zero", message)
    assert "at line 2: return 1 / (x - 1)" in message and str(out / "fails.html") in message
    assert "ZeroDivisionError" in (out / "fails.html").read_text() and printed(out / "fails.ipynb") == ""


def test_a_dying_kernel_is_a_failure(write, tmp_path):
    path = write("dies", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(NotebookError, match="dies failed: DeadKernelError"):
        notebook.run(path, out_dir=tmp_path / "out", progress=False)


def test_wrong_parameters_run_nothing(write, tmp_path):
    path = write("small", "# parameters\nbatch = 1", "print(batch)")
    with pytest.raises(NotebookError, match="did you mean 'batch'"):
        notebook.run(path, {"bacth": "2"}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_notebook_is_never_overwritten_by_its_own_run(write, tmp_path):
    path = write("small", "print(1)")
    before = path.read_bytes()
    with pytest.raises(NotebookError, match="choose another folder"):
        notebook.run(path, out_dir=tmp_path)
    assert path.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(NotebookError, match="--out"):
        notebook.run(path, out_dir=tmp_path / "file")


def test_tour_makes_a_gallery_and_goes_on_after_a_failure(write, here, tmp_path, capsys):
    write("01_second", "# Second <b>\nIs `x` **bold** & [linked](http://example.org)?", FIGURE, folder=here)
    write("00_first", "# First\n\nWhat comes first?", "print(1)", folder=here)
    write("02_third", "# Third", "raise ValueError('no <luck>')", folder=here)
    with pytest.raises(NotebookError, match="1 of 3 notebooks failed.*index.html.*02_third failed.*no <luck>"):
        notebook.tour(tmp_path / "report", progress=True)
    page = (tmp_path / "report" / "index.html").read_text()
    places = [page.index(x) for x in ('href="00_first.html"', 'href="01_second.html"', 'href="02_third.html"')]
    assert places == sorted(places) and "2 of 3 notebooks ran through" in page
    assert "Second &lt;b&gt;" in page and "Is <code>x</code> <strong>bold</strong> &amp; linked?" in page
    assert f"data:image/png;base64,{PNG}" in page and "no &lt;luck&gt;" in page
    assert "moelab " in page and "commit " in page and "UTC" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import""", page)  # works without network
    shown = capsys.readouterr()
    assert shown.out == "" and "[1/3] 00_first" in shown.err and "failed: 02_third" in shown.err


def test_tour_without_failure_returns_the_index(write, here, tmp_path):
    write("00_only", "# Only\nWhy?", "print(1)", folder=here)
    index = notebook.tour(tmp_path / "report", progress=False)
    assert index == tmp_path / "report" / "index.html" and "1 notebook, executed in" in index.read_text()


def test_tour_without_notebooks(here, tmp_path):
    here.mkdir()
    with pytest.raises(NotebookError, match="no notebooks in"):
        notebook.tour(tmp_path / "report")


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["# Title\n\nQuestion\nin two lines?\n\nMore."], ("Title", "Question in two lines?")),
        (["# Title\nQuestion?"], ("Title", "Question?")),
        (["# Title", "# Part\n\nQuestion?"], ("Title", "Question?")),
        (["print(1)"], ("", "")),
    ],
)
def test_title_and_question(write, cells, expected):
    assert gallery.describe(nbformat.read(write("n", *cells), as_version=4)) == expected


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (42, "42 s"), (150, "2.5 min")])
def test_duration(seconds, text):
    assert gallery.duration(seconds) == text


def test_footer_shows_where_it_comes_from(monkeypatch):
    monkeypatch.setenv("MOELAB_COMMIT", "abcdef0123456789")
    monkeypatch.setenv("MOELAB_DIRTY", "1")
    foot = notebook.footer()
    for text in (str(foot), foot._repr_html_(), foot._repr_markdown_()):
        assert "commit abcdef012345 with changes" in text and "UTC" in text and "moelab " in text and "torch " in text
