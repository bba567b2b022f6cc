from __future__ import annotations

import nbformat
import pytest


@pytest.fixture
def write(tmp_path):
    """write("name", cell, ...) makes a notebook. A cell that begins with "#" and a blank is Markdown; the
    first one that begins with "# parameters" is the parameters cell."""

    def build(name, *cells, folder=tmp_path):
        made = []
        for source in cells:
            if source.startswith("# parameters"):
                made.append(nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]}))
            elif source.startswith("# "):
                made.append(nbformat.v4.new_markdown_cell(source))
            else:
                made.append(nbformat.v4.new_code_cell(source))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=made), path)
        return path

    return build


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Let the package find its notebooks in a folder of this test."""
    from moelab.notebook import execution, locate

    place = tmp_path / "notebooks"
    for module in (locate, execution):
        monkeypatch.setattr(module, "folder", lambda: place)
    return place
