"""Where the notebooks are, and which one is meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from moelab.config import MoelabError
from moelab.share import share_dir


class NotebookError(MoelabError):
    """A notebook that is not there, was given what it does not take, or failed."""


def folder() -> Path:
    """Where the notebooks are: at the root of a clone, or inside an installed package."""
    return share_dir("notebooks")


def names() -> list[str]:
    """Stems of the notebooks at hand, in order of their numbers."""
    return sorted(path.stem for path in folder().glob("*.ipynb"))


def find(name: str | Path) -> Path:
    """A path to an .ipynb file, a stem ("01_parallelism"), or its unique beginning ("01"). Raises
    NotebookError, with close matches, when there is none."""
    text = str(name)
    if text.endswith(".ipynb") or "/" in text:
        if Path(text).is_file():
            return Path(text)
        if "/" in text:
            raise NotebookError(f"no notebook at {text}")
    stem, known = text.removesuffix(".ipynb"), names()
    hits = [x for x in known if x == stem] or [x for x in known if stem and x.startswith(stem)]
    if len(hits) == 1:
        return folder() / f"{hits[0]}.ipynb"
    if hits:
        raise NotebookError(f"notebook {text!r} may be any of {', '.join(hits)}: write more of the name")
    raise NotebookError(f"no notebook {text!r}; {close(stem, known)}there are: {', '.join(known) or 'none'}")


def close(name: str, known: Iterable[str]) -> str:
    """For the middle of an error: "did you mean 'x'? ", or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=2, cutoff=0.5)
    return f"did you mean {' or '.join(repr(x) for x in matches)}? " if matches else ""
