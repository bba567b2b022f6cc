"""Where the files lie that travel with the package but are not Python modules: notebooks and the kernels'
sources."""

from __future__ import annotations

from pathlib import Path

from moelab.config import MoelabError


def share_dir(name: str) -> Path:
    """The folder `name` ("notebooks", "kernels"): at the root of a clone, or in an installed package's
    `_share`. Raises MoelabError where neither has it."""
    package = Path(__file__).resolve().parent
    installed, clone = package / "_share" / name, package.parent / name
    if installed.is_dir():
        return installed
    # Beside an installed package lie other people's packages, and one of them is called "notebook": a clone
    # is known by its pyproject.toml.
    if clone.is_dir() and (package.parent / "pyproject.toml").is_file():
        return clone
    raise MoelabError(f"no folder {name!r} in {installed.parent} or in a clone at {package.parent}: reinstall moelab")
