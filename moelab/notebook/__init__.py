"""Notebooks from the package: find them, check their parameters, run and render them, and their footer."""

from __future__ import annotations

from moelab.notebook.colophon import Footer, footer
from moelab.notebook.execution import Run, run, tour
from moelab.notebook.locate import NotebookError, find, folder, names
from moelab.notebook.parameter import Parameter, check, parameters

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
