from __future__ import annotations

import pytest

from moelab import share
from moelab.config import MoelabError


@pytest.fixture
def at(tmp_path, monkeypatch):
    package = tmp_path / "moelab"
    package.mkdir()
    monkeypatch.setattr(share, "__file__", str(package / "share.py"))
    return tmp_path


def test_installed_package_then_clone_then_an_error(at):
    (at / "notebooks").mkdir()  # beside site-packages/moelab: somebody else's
    with pytest.raises(MoelabError, match="no folder 'notebooks'"):
        share.share_dir("notebooks")
    (at / "pyproject.toml").write_text("")
    assert share.share_dir("notebooks") == at / "notebooks"
    (at / "moelab" / "_share" / "notebooks").mkdir(parents=True)
    assert share.share_dir("notebooks") == at / "moelab" / "_share" / "notebooks"
