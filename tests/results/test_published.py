from __future__ import annotations

import pytest

from moelab.config import MoelabError
from moelab.results import PublishedError, published

ROWS = {
    "alltoall": 190,
    "deepseek_trace": 27,
    "deployments": 34,
    "gemm": 51,
    "grouped_gemm": 130,
    "mla": 107,
    "study": 106,
}


def test_all_tables_are_there():
    assert published.names() == sorted(ROWS)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_row_names_its_source(name):
    table = published.table(name)
    assert len(table) == ROWS[name]
    assert table.columns[-1] == "source" and table["source"].map(lambda x: isinstance(x, str) and len(x) > 8).all()


@pytest.mark.parametrize("name", sorted(ROWS))
def test_readme_describes_the_table(name):
    text = (published.FOLDER / "README.md").read_text()
    path = published.path(name)
    assert f"| {path.name} | {ROWS[name]} |" in text
    missing = [c for c in published.table(name) if f"`{c}`" not in text and c not in text]
    assert not missing


def test_no_table_points_at_a_place_that_is_not_shipped():
    for path in published.FOLDER.iterdir():
        text = path.read_text()
        assert "spec/" not in text and "shared/" not in text


def test_an_unknown_table_names_the_close_one():
    with pytest.raises(PublishedError, match="did you mean 'alltoall'.*study") as caught:
        published.table("altoall")
    assert isinstance(caught.value, MoelabError)
    with pytest.raises(PublishedError):
        published.table("../../secret")
    assert published.path("mla_published") == published.path("mla")
