"""A notebook's parameters: one cell tagged `parameters`, an assignment of a literal per line.

Papermill only warns of a parameter that the notebook does not know, and takes any type, so a misspelt
`bacth=64` runs for minutes with the default and says nothing. Here both are errors before anything starts.
The cell is read as Python syntax, not line by line, and never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab.notebook.locate import NotebookError, close


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell."""

    name: str
    default: Any
    help: str  # the comment behind the value

    @property
    def type_name(self) -> str:
        return "any" if self.default is None else type(self.default).__name__


def parameters(path: str | Path) -> dict[str, Parameter]:
    """The parameters of a notebook by name, in order; {} if it has no cell tagged `parameters`. Raises
    NotebookError where that cell holds anything but assignments of literals."""
    for cell in _read(path).cells:
        if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", []):
            return _parse(cell.source, Path(path).name)
    return {}


def check(path: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with every value in its parameter's type. Strings, as they come from a command line, are read
    by the type of the default: 3, 0.5, true, text as it is, and lists and mappings as YAML or JSON. Raises
    NotebookError for an unknown name (with close matches) and for a value of another type."""
    known = parameters(path)
    checked = {}
    for name, value in given.items():
        if name not in known:
            listed = ", ".join(f"{p.name} ({p.type_name})" for p in known.values()) or "none"
            raise NotebookError(
                f"{Path(path).stem} has no parameter {name!r}; {close(name, known)}parameters: {listed}"
            )
        try:
            checked[name] = _as_type_of(known[name].default, value)
        except (TypeError, ValueError) as error:
            expected = known[name]
            raise NotebookError(
                f"parameter {name} of {Path(path).stem} is {value!r}, not {_article(expected.type_name)} "
                f"as its default {expected.default!r}" + (f" ({error})" if str(error) else "")
            ) from None
    return checked


def _parse(source: str, where: str) -> dict[str, Parameter]:
    found, lines = {}, source.splitlines()
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise NotebookError(f"the parameters cell of {where} is not Python: {error}") from None
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        try:
            if not isinstance(target, ast.Name) or node.value is None:
                raise ValueError
            default = ast.literal_eval(node.value)
        except ValueError:
            raise NotebookError(
                f"the parameters cell of {where} holds {ast.unparse(node)!r}; only NAME = LITERAL is allowed there"
            ) from None
        comment = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
        found[target.id] = Parameter(target.id, default, comment.lstrip("# "))
    return found


def _as_type_of(default: Any, value: Any) -> Any:
    """`value` in the type of `default`; raises ValueError or TypeError."""
    if isinstance(default, str):
        if not isinstance(value, str):
            raise TypeError
        return value
    if isinstance(value, str):
        value = _yaml(value)
    if default is None:
        return value
    if isinstance(default, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, (list, tuple)) and isinstance(value, (list, tuple)):
        kinds = {type(x) for x in default}
        return [_as_type_of(default[0], x) for x in value] if len(kinds) == 1 else list(value)
    if type(value) is not type(default):
        raise TypeError
    return value


def _yaml(text: str) -> Any:
    import yaml

    try:
        return float(text) if re.fullmatch(r"[+-]?[\d.]+[eE][+-]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError as error:  # YAML 1.1 takes 1e-3 for text, hence the line above
        raise ValueError(getattr(error, "problem", None) or "not YAML") from None


def _read(path: str | Path):
    import nbformat

    try:
        return nbformat.read(str(path), as_version=4)
    except FileNotFoundError:
        raise NotebookError(f"no notebook at {path}") from None
    except Exception as error:  # nbformat raises a dozen kinds for a file that is no notebook
        raise NotebookError(f"{path} is not a notebook: {str(error).splitlines()[0][:200]}") from None


def _article(type_name: str) -> str:
    return ("an " if type_name[0] in "aeiou" else "a ") + type_name
