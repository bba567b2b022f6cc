"""The last line of every notebook and report: what it was made with, on what, and when."""

from __future__ import annotations

import html
from dataclasses import dataclass


@dataclass(frozen=True)
class Footer:
    """Shows itself as HTML in a notebook, as Markdown or text elsewhere."""

    date: str
    device: str
    commit: str
    versions: str

    def _parts(self) -> list[str]:
        return [self.date, self.versions, f"commit {self.commit}", self.device]

    def __str__(self) -> str:
        return " · ".join(self._parts())

    def _repr_markdown_(self) -> str:
        return f"---\n*{self}*"

    def _repr_html_(self) -> str:
        return (
            '<hr style="margin:1.5em 0 .5em;border:0;border-top:1px solid currentColor;opacity:.3">'
            f'<p style="font-size:.85em;opacity:.75">{html.escape(str(self))}</p>'
        )


def footer() -> Footer:
    """Date (UTC), versions of moelab, Python and torch, commit, and GPU or processor of this machine."""
    from moelab import results
    from moelab.results.record import now

    found = results.collect()
    labels = {"moelab": "moelab", "python": "Python", "torch": "torch"}
    shown = [f"{label} {found.versions[key]}" for key, label in labels.items() if key in found.versions]
    gpu = f"{found.gpu_count} × {found.gpu} (driver {found.driver})"
    commit = found.commit[:12]
    if found.dirty:
        commit += " with changes" if commit != "unknown" else ""
    return Footer(
        date=now()[:16].replace("T", " ") + " UTC",
        device=gpu if found.gpu_count else f"CPU: {found.versions['cpu']}",
        commit=commit,
        versions=", ".join(shown),
    )
