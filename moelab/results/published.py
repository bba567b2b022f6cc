"""Numbers that others published, a source in every row. They are not Records: nobody here measured them.

Columns, units and licences: `moelab/data/published/README.md`. An empty cell is NaN: not published or not
applicable.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from moelab.config import MoelabError

if TYPE_CHECKING:
    import pandas as pd

FOLDER = Path(__file__).resolve().parents[1] / "data" / "published"
_SUFFIX = "_published"


class PublishedError(MoelabError, KeyError):
    """There is no published table of that name."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


def names() -> list[str]:
    """alltoall, deepseek_trace, deployments, gemm, grouped_gemm, mla, study."""
    return sorted(path.stem.removesuffix(_SUFFIX) for path in FOLDER.glob("*.csv"))


def path(name: str) -> Path:
    stem = name.removesuffix(_SUFFIX)
    for candidate in (FOLDER / f"{stem}{_SUFFIX}.csv", FOLDER / f"{stem}.csv"):
        if stem in names() and candidate.is_file():
            return candidate
    close = difflib.get_close_matches(stem, names(), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise PublishedError(f"no published table {name!r}; {hint}there are: {', '.join(names())}")


def table(name: str) -> pd.DataFrame:
    """The table as it stands in the file; its last column is `source`."""
    import pandas as pd

    return pd.read_csv(path(name))
