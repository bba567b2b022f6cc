from __future__ import annotations

import base64
import hashlib
import textwrap

import pytest


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install("name", "1.0", module="m", source="...") puts a distribution where this process and its children look.
    `files`: {path: bytes}, with their hashes in its RECORD."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def put(name, version, *, module="", source="", requires=(), files=None):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
        if module:
            path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        record = []
        for file, content in (files or {}).items():
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(content)}")
        if record:
            (info / "RECORD").write_text("\n".join(record) + "\n")
        return tmp_path

    return put
