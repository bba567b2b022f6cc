from __future__ import annotations

import pytest

from moelab import notebook
from moelab.config import MoelabError
from moelab.notebook import NotebookError

CELL = """# parameters
ep = 8  # int: expert-parallel degree, "quoted # mark"
acceptance = 0.6
name: str = "tinyseek"
fast = True
batches = [1,
           2, 4]  # several lines
mixed = ["a", 1]
names = {"a": 1}
folder = None
offset = -3
"""

GOOD = {
    "ep": [("16", 16), (16, 16), ("-1", -1), ("0x10", 16)],
    "acceptance": [("1", 1.0), ("1e-3", 0.001), (".5", 0.5), (1, 1.0)],
    "name": [("16", "16"), ("", ""), ("true", "true"), ("a: b", "a: b")],
    "fast": [("false", False), ("True", True), (False, False)],
    "batches": [("[8]", [8]), ("[]", []), ("[1, 2]", [1, 2]), ((1, 2), [1, 2])],
    "mixed": [('["x", 2.5]', ["x", 2.5])],
    "names": [('{"b": 2}', {"b": 2}), ("{b: 2}", {"b": 2})],
    "folder": [("null", None), ("some/where", "some/where"), ("3", 3)],
}
BAD = {
    "ep": ["8.0", "eight", "true", True, "", "[8]", 8.5, None],
    "acceptance": ["high", "true", "[0.6]"],
    "name": [3],
    "fast": ["1", "maybe"],
    "batches": ["8", '["a"]', "[1.5]", "[1,"],
    "names": ["[1]", "b"],
}
LITERALS_ONLY = ["import os", "x = 1 + len('a')", "x, y = 1, 2", "x = y = 1", "x: int", "x += 1", "x = ("]


@pytest.fixture
def path(write):
    return write("study", "# Title\n\nWhy?", CELL, "print(ep)")


def test_parameters_are_read_with_defaults_types_and_help(path):
    found = notebook.parameters(path)
    assert {name: p.default for name, p in found.items()} == {
        "ep": 8,
        "acceptance": 0.6,
        "name": "tinyseek",
        "fast": True,
        "batches": [1, 2, 4],
        "mixed": ["a", 1],
        "names": {"a": 1},
        "folder": None,
        "offset": -3,
    }
    assert found["ep"].help == 'int: expert-parallel degree, "quoted # mark"'
    assert found["batches"].help == "several lines" and found["folder"].type_name == "any"


def test_a_notebook_without_the_cell_takes_none(write):
    path = write("plain", "print(1)")
    assert notebook.parameters(path) == {}
    with pytest.raises(NotebookError, match="has no parameter 'x'; parameters: none"):
        notebook.check(path, {"x": "1"})


@pytest.mark.parametrize("line", LITERALS_ONLY)
def test_only_literals_may_stand_in_the_cell_and_nothing_is_run(write, line):
    with pytest.raises(NotebookError, match="parameters cell of bad.ipynb"):
        notebook.parameters(write("bad", f"# parameters\n{line}\n"))


@pytest.mark.parametrize(("name", "text", "value"), [(n, *pair) for n, pairs in GOOD.items() for pair in pairs])
def test_values_are_read_by_the_type_of_the_default(path, name, text, value):
    got = notebook.check(path, {name: text})[name]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(("name", "text"), [(n, text) for n, texts in BAD.items() for text in texts])
def test_a_value_of_another_type_is_refused_by_name(path, name, text):
    with pytest.raises(NotebookError, match=f"parameter {name} of study is .*default"):
        notebook.check(path, {name: text})


def test_an_unknown_parameter_gets_its_close_match_and_the_list(path):
    with pytest.raises(NotebookError, match=r"no parameter 'bacthes'; did you mean 'batches'.*ep \(int\)"):
        notebook.check(path, {"bacthes": "[1]"})
    assert issubclass(NotebookError, MoelabError)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cells": 3}'])
def test_a_file_that_is_no_notebook(tmp_path, content):
    path = tmp_path / "x.ipynb"
    path.write_text(content)
    with pytest.raises(NotebookError, match="x.ipynb is not a notebook"):
        notebook.parameters(path)


def test_find(write, here, tmp_path, monkeypatch):
    for name in ("00_start", "01_parallelism", "01_other"):
        write(name, "print(1)", folder=here)
    elsewhere = write("mine", "print(1)")
    assert notebook.find("00_start") == notebook.find("00") == here / "00_start.ipynb"
    assert notebook.find("01_o") == here / "01_other.ipynb"
    assert notebook.find(elsewhere) == elsewhere
    monkeypatch.chdir(tmp_path)
    assert notebook.find("mine.ipynb").samefile(elsewhere)
    with pytest.raises(NotebookError, match="may be any of 01_other, 01_parallelism"):
        notebook.find("01")
    with pytest.raises(NotebookError, match="did you mean '01_parallelism'.*there are: 00_start"):
        notebook.find("01_paralelism")
    with pytest.raises(NotebookError, match="no notebook at no/such.ipynb"):
        notebook.find("no/such.ipynb")
    with pytest.raises(NotebookError, match="no notebook ''"):
        notebook.find("")
