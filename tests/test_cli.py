"""The command's contract: what goes to which stream, exit status, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import nbformat
import pandas as pd
import pytest

from moelab import __version__, cli
from moelab.results import Provenance, Record, Store, commands
from moelab.results import store as store_module


@pytest.fixture
def moelab(capsys):
    """moelab("verb", ...) -> (exit status, standard output, standard error)."""

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(x) for x in arguments])
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err

    return call


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Two benches in ./records: alltoall twice (one outdone), gemm dirty. The package's records are out of sight."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store_module, "PACKAGE_RECORDS", tmp_path / "none")
    store = Store()
    for bench, value, day, dirty in [
        ("alltoall", 9.0, 1, False),
        ("alltoall", 7.5, 2, False),
        ("gemm", 3.0, 1, True),
    ]:
        where = Provenance("NVIDIA H200", 2, "580.159", {"torch": "2.11.0"}, "a" * 40, dirty)
        store.append(Record.from_samples(
            [value, value + 1], bench=bench, metric="time", unit="us", clock="graph", provenance=where,
            params={"tokens": 128}, time=f"2026-01-0{day}T00:00:00Z",
        ))  # fmt: skip
    return store


@pytest.fixture
def notebook(tmp_path):
    def write(*cells):
        made = [nbformat.v4.new_code_cell(cells[0], metadata={"tags": ["parameters"]})]
        made += [nbformat.v4.new_code_cell(x) for x in cells[1:]]
        nbformat.write(nbformat.v4.new_notebook(cells=made), tmp_path / "small.ipynb")
        return tmp_path / "small.ipynb"

    return write


def test_help_names_every_verb_and_is_quick():
    code = "import sys, moelab.cli\ntry: moelab.cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'pandas', 'numpy', 'papermill'} & set(sys.modules)"
    started = time.process_time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    for verb in ("doctor", "run", "tour", "records", "kernels", "--debug", "--version"):
        assert verb in done.stdout
    cut_off = [x for x in done.stdout.partition("Commands:")[2].splitlines() if x.endswith("...")]
    assert not cut_off, "the first line of a verb's docstring is its summary: shorten it"
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "verb",
    [["doctor"], ["run"], ["tour"], ["kernels", "build"], ["kernels", "info"]]
    + [["records", verb] for verb in ("list", "show", "export")],
)
def test_every_verb_explains_itself(moelab, verb):
    status, out, err = moelab(*verb, "--help")
    assert status == 0 and err == "" and " ".join(verb) in out


def test_version(moelab):
    assert moelab("--version") == (0, f"moelab {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["doctor", "--jsn"], "--jsn"),
        (["run"], "Missing argument"),
        (["run", "x", "-p"], "-p"),
        (["run", "x", "-p", "a"], "'a' has no value"),
        (["run", "x", "-p", "a", "1", "-p", "a", "2"], "'a' is given twice: '1' and '2'"),
        (["records", "export", "x.csv"], "does not end in .parquet"),
        (["records", "show"], "Missing argument"),
        (["tour", "extra"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(moelab, arguments, message):
    status, out, err = moelab(*arguments)
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err and "--help" in err


def test_no_verb_shows_the_help_as_an_error(moelab):
    status, out, err = moelab()
    assert status == 2 and out == "" and "Commands:" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["records", "list", "--records", "/no/such"], "no folder /no/such"),
        (["records", "show", "nope"], "no records of bench 'nope'; there are: alltoall, gemm"),
        (["records", "show", "9"], "no record number 9; there are 2"),
        (["records", "show", "0"], "no record number 0"),
        (["records", "export", "/no/such/x.parquet"], "cannot write"),
        (["run", "no/such.ipynb"], "no notebook at no/such.ipynb"),
    ],
)
def test_failure_is_one_line_and_status_1(moelab, store, arguments, message):
    status, out, err = moelab(*arguments)
    assert status == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_debug_shows_the_traceback_wherever_it_stands(store):
    for arguments in (["--debug", "records", "show", "nope"], ["records", "show", "nope", "--debug"]):
        done = subprocess.run([sys.executable, "-m", "moelab", *arguments], capture_output=True, text=True)
        assert done.returncode == 1 and "Traceback" in done.stderr and "StoreError" in done.stderr


def test_an_unforeseen_error_is_one_line_too(moelab, monkeypatch):
    def broken(*arguments, **options):
        raise KeyError("inner\nstate")

    monkeypatch.setattr(commands, "_entries", broken)
    status, _, err = moelab("records", "list")
    assert status == 1 and err.startswith("error: KeyError: ") and "--debug" in err and err.count("\n") == 1


def test_ctrl_c_ends_without_a_traceback(moelab, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_entries", interrupted)
    status, out, err = moelab("records", "list")
    assert status == 130 and out == "" and "Traceback" not in err


def test_records_list(moelab, store):
    status, out, err = moelab("records", "list")
    assert status == 0 and err == "" and "alltoall" in out and "8" in out and "2 × NVIDIA H200" in out
    assert "aaaaaaa (dirty)" in out and "tokens=128" in out
    listed = json.loads(moelab("records", "list", "--json")[1])
    assert [(r["bench"], r["min"]) for r in listed] == [("alltoall", 7.5), ("gemm", 3.0)]
    assert len(json.loads(moelab("records", "list", "--json", "--all")[1])) == 3
    assert listed[0]["own"] and listed[0]["line"] == 2 and listed[0]["file"].endswith("h200x2/alltoall.jsonl")


def test_the_packages_records_are_listed_beside_ones_own(moelab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = json.loads(moelab("records", "list", "--json")[1])
    assert "heldout_bits_per_byte" in {r["metric"] for r in listed if r["bench"] == "tinyseek"}
    assert not any(r["own"] or r["dirty"] for r in listed)


def test_a_stand_in_is_marked_as_one(moelab, store):
    record = store.records("alltoall")[0]
    store.append(Record(**record.to_dict() | {"kind": "stand-in", "metric": "combine"}))
    assert moelab("records", "list")[1].count("combine (stand-in)") == 1


def test_records_show(moelab, store):
    status, out, _ = moelab("records", "show", "alltoall")
    assert status == 0 and "driver" in out and "580.159" in out and "torch=2.11.0" in out and "9.0" not in out
    assert json.loads(moelab("records", "show", "2", "--json")[1])[0]["bench"] == "gemm"
    assert [r["min"] for r in json.loads(moelab("records", "show", "alltoall", "--all", "--json")[1])] == [
        9.0,
        7.5,
    ]


def test_records_export(moelab, store, tmp_path):
    assert moelab("records", "export", "all.parquet") == (0, "all.parquet\n", "2 records\n")
    assert sorted(pd.read_parquet(tmp_path / "all.parquet")["bench"]) == ["alltoall", "gemm"]


def test_records_of_another_folder_and_damage_on_standard_error(store):
    path = store.directory / "h200x2" / "gemm.jsonl"
    with open(path, "a") as file:
        file.write("{torn")
    done = subprocess.run(
        [sys.executable, "-m", "moelab", "records", "list", "--records", store.directory.resolve(), "--json"],
        capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0 and len([r for r in json.loads(done.stdout) if r["own"]]) == 2
    assert f"warning: damaged record passed over: {path.resolve()}:2: not JSON" in done.stderr


def test_no_records_is_said_on_standard_error(moelab, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "PACKAGE_RECORDS", tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    status, out, err = moelab("records", "list")
    assert status == 0 and out == "" and "no records" in err
    assert moelab("records", "list", "--json") == (0, "[]\n", "")


@pytest.mark.parametrize("form", [["-p", "n", "-5"], ["-p", "n=-5"], ["--parameter", "n", "-5"]])
def test_run_prints_where_the_results_are(moelab, notebook, tmp_path, form):
    path = notebook("n = 1  # int", "print(n * 2)")
    status, out, err = moelab("run", path, *form, "--out", tmp_path / "o")
    assert status == 0 and out.split() == [
        str(tmp_path / "o" / "small.ipynb"),
        str(tmp_path / "o" / "small.html"),
    ]
    assert "-10" in (tmp_path / "o" / "small.ipynb").read_text() and "Traceback" not in err


def test_run_refuses_what_the_notebook_does_not_take(moelab, notebook, tmp_path):
    path = notebook("batch = 1", "print(batch)")
    for form, message in (
        (["bacth", "2"], "did you mean 'batch'"),
        (["batch", "two"], "is 'two', not an int"),
    ):
        status, out, err = moelab("run", path, "-p", *form, "--out", tmp_path / "o")
        assert status == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_run_of_a_failing_notebook_fails(moelab, notebook, tmp_path):
    path = notebook("n = 0", "1 / n")
    status, out, err = moelab("run", path, "--out", tmp_path / "o")
    assert status == 1 and out == "" and "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: small failed: cell In [2] (1 / n) raised ZeroDivisionError") and "small.html" in last


def test_tour_prints_the_index(moelab, monkeypatch, tmp_path):
    from moelab import notebook as module

    monkeypatch.setattr(module, "tour", lambda out: out / "index.html")
    assert moelab("tour", "--out", tmp_path) == (0, f"{tmp_path / 'index.html'}\n", "")
