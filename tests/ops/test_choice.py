"""The measured table: what `pick` takes from it, and whose table counts."""

from __future__ import annotations

import pytest
import torch

from moelab.ops import choice
from moelab.ops.choice import COLUMNS, Choice, ChoiceError, Row, pick, read, table_path, write

GPU = torch.device("cuda", 0)
BOTH = ("deep_gemm", "triton")


def row(m, backend, us, config="", n=256, k=512, groups=0):
    return Row(groups, n, k, m, Choice(backend, config, us))


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """(the user's, the package's), both empty, on a GPU called NVIDIA H200."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(choice, "PACKAGE_RECORDS", tmp_path / "package")
    choice.tables.cache_clear()
    yield tmp_path / "own", tmp_path / "package"
    choice.tables.cache_clear()


def put(folder, *rows):
    write(table_path(folder, "linear", "NVIDIA H200"), rows, "a test")


def picked(folders, m, **keys):
    return pick("linear", GPU, keys.pop("n", 256), keys.pop("k", 512), m, directory=folders[0], **keys)


def test_the_fastest_that_can_be_used(folders):
    put(folders[1], row(8, "triton", 7.0, "a"), row(8, "deep_gemm", 6.0), row(8, "triton", 8.0, "b"))
    assert picked(folders, 8) == Choice("deep_gemm", "", 6.0)
    assert picked(folders, 8, backends=("triton",)) == Choice("triton", "a", 7.0)
    assert picked(folders, 8, backends=("other",)) is None


@pytest.mark.parametrize(("m", "config"), [(1, "2"), (2, "2"), (3, "16"), (16, "16"), (17, "64"), (99, "64")])
def test_an_m_that_is_not_there_takes_the_next_larger_or_the_largest(folders, m, config):
    put(folders[1], *(row(at, "triton", 5.0, str(at)) for at in (64, 2, 16)))
    assert picked(folders, m).config == config


def test_what_is_not_in_the_table(folders, monkeypatch):
    assert picked(folders, 8) is None
    put(folders[1], row(8, "triton", 5.0, groups=4))
    choice.tables.cache_clear()
    assert picked(folders, 8) is None and picked(folders, 8, groups=4, n=128) is None
    assert picked(folders, 8, groups=4) is not None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    choice.tables.cache_clear()
    assert picked(folders, 8, groups=4) is None


def test_the_own_table_replaces_a_whole_shape_and_no_other(folders):
    put(folders[1], row(8, "triton", 1.0, "package"), row(16, "triton", 1.0, "package"), row(8, "triton", 1, "p", n=64))
    put(folders[0], row(8, "triton", 9.0, "own"))
    assert picked(folders, 8).config == picked(folders, 16).config == "own"
    assert picked(folders, 8, n=64).config == "p"


def test_the_folder_of_a_command(folders, monkeypatch):
    monkeypatch.setattr(choice, "_own", [folders[1]])
    put(folders[0], row(8, "triton", 9.0, "own"))
    assert pick("linear", GPU, 256, 512, 8) is None
    choice.use_records(folders[0])
    assert pick("linear", GPU, 256, 512, 8).config == "own"


def test_a_table_is_read_as_it_was_written(folders):
    rows = [row(8, "deep_gemm", 6.25), row(8, "triton", 7.5, "64x16x128/s7"), row(16, "triton", 7.0, "x", groups=2)]
    put(folders[0], *reversed(rows))
    path = table_path(folders[0], "linear", "NVIDIA H200")
    assert path.parts[-2:] == ("h200x1", "choice_linear.csv")
    assert path.read_text().splitlines()[0] == "# a test"
    assert read(path) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [("groups,n\n0,1\n", "has the columns"), (",".join(COLUMNS) + "\n0,1,x,8,triton,,5\n", "has a damaged line")],
)
def test_a_table_that_cannot_be_read_says_which(tmp_path, text, message):
    path = tmp_path / "choice_linear.csv"
    path.write_text(text)
    with pytest.raises(ChoiceError, match=f"{path} {message}"):
        read(path)


@pytest.mark.parametrize("path", sorted(choice.PACKAGE_RECORDS.glob("*/choice_*.csv")), ids=str)
def test_tables_of_the_package_can_be_read(path):
    points = [(r.groups, r.n, r.k, r.m, r.choice.backend) for r in read(path)]
    assert len(points) == len(set(points)) and all(r.choice.us > 0 for r in read(path))
