"""Notebooks from the package: find them, check their parameters, run and render them, and their footer."""

from __future__ import annotations

from .colophon import Footer, footer
from .execution import Run, run, tour
from .locate import NotebookError, find, folder, names
from .parameter import Parameter, check, parameters

__all__ = [
    "Footer",
    "NotebookError",
    "Parameter",
    "Run",
    "check",
    "find",
    "folder",
    "footer",
    "names",
    "parameters",
    "run",
    "tour",
]
