"""The tour's front page: a card per executed notebook, in one HTML file that needs no network."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelab.notebook.colophon import footer

if TYPE_CHECKING:
    from moelab.notebook.execution import Run

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #5b6675; --line: #dde2e8;
  --accent: #0b6e8a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b212a; --ink: #e6eaf0; --soft: #9aa6b5;
  --line: #2d3641; --accent: #5cc3de; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main, header, footer { max-width: 1120px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 48px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .3em; letter-spacing: -.01em; }
header p { color: var(--soft); margin: 0; max-width: 46em; }
.cards { display: grid; gap: 24px; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); padding: 32px 0; }
.card { display: flex; flex-direction: column; background: var(--card); color: inherit; text-decoration: none;
  border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
a.card:hover, a.card:focus-visible { border-color: var(--accent); outline: 2px solid var(--accent); }
.figure { height: 200px; background: #fff; border-bottom: 1px solid var(--line); display: grid; place-items: center; }
.figure img { width: 100%; height: 200px; object-fit: contain; padding: 8px; }
.figure.none { background: var(--page); color: var(--soft); font-size: 3rem; font-weight: 600; }
.text { padding: 16px 20px; flex: 1; }
.text h2 { font-size: 1.1rem; line-height: 1.3; margin: 0 0 .4em; }
.text p { margin: 0; color: var(--soft); font-size: .95rem; }
.meta { padding: 10px 20px; border-top: 1px solid var(--line); font-size: .85rem; color: var(--soft);
  display: flex; justify-content: space-between; }
.failed { border-color: var(--bad); }
.failed .error { color: var(--bad); overflow-wrap: anywhere; margin-top: .6em; }
code { font-size: .92em; }
footer { color: var(--soft); font-size: .85rem; padding-bottom: 48px; }
"""


def write(runs: Sequence[Run], out: Path, *, seconds: float) -> Path:
    """Write <out>/index.html over executed notebooks that lie in `out`; returns its path. `seconds`: of the
    whole."""
    good = sum(not run.error for run in runs)
    summary = (
        f"{good} of {len(runs)} notebooks ran through, in {duration(seconds)}."
        if good < len(runs)
        else (f"{len(runs)} notebook{'s' * (len(runs) != 1)}, executed in {duration(seconds)}.")
    )
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>moelab: the tour</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>moelab: the tour</h1>
<p>How a DeepSeek-style Mixture-of-Experts model is spread over GPUs: measured, modelled and verified. {summary}</p>
</header>
<main><div class="cards">{"".join(_card(run) for run in runs)}</div></main>
<footer>{html.escape(str(footer()))}</footer>
</body>
</html>
"""
    index = out / "index.html"
    index.write_text(page, encoding="utf-8")
    return index


def describe(notebook: Any) -> tuple[str, str]:
    """(title, question): the first heading and the first paragraph of the Markdown cells; "" where there is
    none."""
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown" and not _marker(cell))
    blocks = [block.strip() for block in re.split(r"\n\s*\n|(?<=\n)(?=#)|(?<=^)(?=#)", text) if block.strip()]
    title = paragraph = ""
    for block in blocks:
        first, _, rest = block.partition("\n")
        if first.startswith("#"):
            title = title or first.lstrip("# ").strip()
            block = rest.strip()
        if title and block and not paragraph:
            paragraph = " ".join(block.split())
            break
    return title, paragraph


def thumbnail(notebook: Any) -> str:
    """The first figure among the outputs as a data URI; "" if there is none."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                return "data:image/png;base64," + "".join(data["image/png"].split())
            if "image/svg+xml" in data:
                return "data:image/svg+xml;base64," + base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
    return ""


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _card(run: Run) -> str:
    title, question, image = run.name, "", ""
    if run.ipynb.exists():
        import nbformat

        notebook = nbformat.read(str(run.ipynb), as_version=4)
        found, question = describe(notebook)
        title, image = found or title, thumbnail(notebook)
    number = run.name.split("_")[0]
    if image:
        figure = f'<div class="figure"><img src="{image}" alt="First figure of {html.escape(title)}"></div>'
    else:
        sign = number if number.isdigit() else "·"
        figure = f'<div class="figure none" aria-hidden="true">{sign}</div>'
    error = f'<p class="error">{html.escape(run.error)}</p>' if run.error else ""
    tag, href = ("a", f' href="{html.escape(run.html.name)}"') if run.html.exists() else ("div", "")
    took = ("failed after " if run.error else "") + duration(run.seconds)
    return f"""
<{tag} class="card{" failed" if run.error else ""}"{href}>
{figure}
<div class="text"><h2>{_inline(title)}</h2><p>{_inline(question)}</p>{error}</div>
<div class="meta"><span>{html.escape(run.name)}</span><span>{took}</span></div>
</{tag}>
"""


def _inline(markdown: str) -> str:
    """Escape, then the inline marks that a heading or a question may hold; links keep their text."""
    text = html.escape(markdown, quote=False)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"(?<![\w*])\*([^*\s][^*]*)\*(?!\w)", r"<em>\1</em>", text)


def _marker(cell: Any) -> bool:
    return "papermill-error-cell-tag" in cell.metadata.get("tags", [])
