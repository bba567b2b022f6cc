"""The one look of the tables that benches print."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table


def empty(*left: str, right: Sequence[str]) -> Table:
    """A table without rows: columns of words, which fold, and columns of numbers, which stand at the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right")
    return table
