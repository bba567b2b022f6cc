"""The campaign on one node: `plan` what would be run, `run` it, `compare` what came of it.

    python experiments/one_node/campaign.py plan
    python experiments/one_node/campaign.py run --minutes 55
    python experiments/one_node/campaign.py compare

The folder of records is all that is remembered: after a lost machine the same command goes on where it stood.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import comparison
import runs
import typer
from comparison import NOT_RUN, Halves
from points import FREE, GPU, Point, points
from rich.console import Console
from rich.table import Table

from moelab.bench.table import empty
from moelab.config import MoelabError
from moelab.results import Store
from moelab.results.provenance import SmiGPU, visible_gpus

app = typer.Typer(
    help=__doc__.splitlines()[0],
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Headings of errors, so that all terms fit beside each other.
SHORT = {term: term for term in comparison.TERMS} | {
    "first draft pass": "draft", "MoE layer": "MoE", "dense layer": "dense", "GroupGEMM": "Group", "activation": "act.",
}  # fmt: skip

Gpus = Annotated[int, typer.Option("--gpus", metavar="8|4|0", help="Of the node; 0: the same small, on the CPU.")]
Records = Annotated[Path, typer.Option("--records", metavar="DIR", help="Folder of records, journal and logs.")]
Only = Annotated[str, typer.Option("--only", metavar="TEXT", help="Points whose name has this in it. [all]")]


@app.command()
def plan(gpus: Gpus = 8, records: Records = Path("records"), only: Only = "") -> None:
    """Print the points with what they need and what is left of each, and what cannot be run here."""
    seen, here = runs.Seen(records), visible_gpus()
    table = empty("point", "answers", "state", right=("ranks", "layers", f"GB of an {GPU}", "limit [s]"))
    total = 0
    for point in runs.in_order(_chosen(gpus, only), records):
        left = seen.left(point)
        seconds = point.limit_s(len(left)) if left else 0
        total += seconds
        state = "done" if not left else f"{len(left)} of {len(point.parts)} left" if len(point.parts) > 1 else "left"
        state += f"; {why}" if left and (why := _cannot(point, here)) else ""
        layers = f"{point.params['layers']} of {point.all_layers}" if point.verb == "decode" else ""
        memory = f"{point.memory / 1e9:.1f}" if point.memory else ""
        ranks = str(1 if point.params.get("shadow") else point.dp * point.tp)
        table.add_row(point.name, point.answers, state, ranks, layers, memory, str(seconds or ""))
    _console().print(table)
    print(f"at most {total / 60:.0f} minutes, of which no command takes more than its limit")


@app.command()
def run(
    minutes: Annotated[float, typer.Option("--minutes", metavar="M", help="After which everything has ended.")],
    gpus: Gpus = 8,
    records: Records = Path("records"),
    only: Only = "",
) -> None:
    """Run what is left, in order of worth, what was tried before last; a line for each point as it ends.

    None is started whose limit ends after the minutes given. Exit status 1 if one did not end well.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # of a scheduler: ends what runs, too
    end, here, well = time.monotonic() + 60 * minutes, visible_gpus(), True
    for point in runs.in_order(_chosen(gpus, only), records):
        left = runs.Seen(records).left(point)
        if not left:
            continue
        if why := _cannot(point, here):
            print(f"{point.name}: not started, {why}", flush=True)
            continue
        wanted = point.limit_s(len(left)) + runs.GRACE_S + runs.GONE_S
        if time.monotonic() + wanted > end:
            print(f"{point.name}: not started, it may take {wanted:.0f} s", flush=True)
            continue
        ended = runs.run(point, records)
        well = well and ended.well
        print(_line(ended), flush=True)
    raise typer.Exit(0 if well else 1)


@app.command()
def compare(gpus: Gpus = 8, records: Records = Path("records"), only: Only = "") -> None:
    """Print the error of shadow ranks by term, and the exchange beside published figures and aims."""
    chosen, store = _chosen(gpus, only), Store(records)
    rows = comparison.decode_rows(chosen, store)
    if rows:
        _console().print(_decode_table(rows))
        _console().print(_error_table(rows))
    for point in (p for p in chosen if p.verb == "alltoall"):
        _console().print(_exchange_table(point, store))
    if any(p.verb == "alltoall" for p in chosen):
        _console().print(_published_table(chosen[0].dp * chosen[0].tp))
    for point in (p for p in chosen if p.verb == "pytest"):
        ended = store.records("tests", **point.params)
        of = {r.metric: int(r.p50) for r in ended if r.gpu_count >= point.gpus}
        print(f"{point.name}: " + (", ".join(f"{n} {what}" for what, n in of.items() if n) or NOT_RUN))


def _chosen(gpus: int, only: str) -> list[Point]:
    return [point for point in points(gpus) if only in point.name]


def _cannot(point: Point, here: list[SmiGPU]) -> str:
    """Why it cannot be run here, "" if it can."""
    if point.gpus > len(here):
        return f"it takes {point.gpus} GPU{'s' * (point.gpus > 1)}, here: {len(here)}"
    least = min((gpu.memory_bytes for gpu in here), default=0)
    if point.memory and point.memory > least * FREE:
        return f"a rank takes {point.memory / 1e9:.0f} GB, a GPU here has {least / 1e9:.0f}"
    return ""


def _line(ended: runs.Run) -> str:
    how = "killed at its limit" if ended.status == "limit" else f"exit status {ended.status}"
    text = f"{ended.name}: {'done' if ended.well else how}, {ended.seconds:.0f} s"
    if ended.left:
        text += f", no records of {', '.join(ended.left)}"
    return text if ended.well else f"{text}; last words: {ended.said}"


def _decode_table(rows: list[comparison.Row]) -> Table:
    """A line for each batch of a point; one for all those that were not run."""
    table = empty("real ranks, and error of their shadow", right=("batch", "step [us]", "MoE layer", *SHORT.values()))
    for point in dict.fromkeys(row.point for row in rows):
        if missing := [str(row.batch) for row in rows if row.point == point and not row.terms]:
            table.add_row(point, ", ".join(missing), NOT_RUN)
    for row in (row for row in rows if row.terms):
        real = ["" if t not in row.terms else f"{row.terms[t][0]:.1f}" for t in ("step", "MoE layer")]
        table.add_row(row.point, str(row.batch), *real, *(_error(row, term) for term in SHORT))
    return table


def _error(row: comparison.Row, term: str) -> str:
    if term not in row.terms:
        return ""
    error = row.error(term)
    return NOT_RUN if row.terms[term][1] is None else "" if error is None else f"{error:+.0%}"


def _error_table(rows: list[comparison.Row]) -> Table:
    table = empty("term", right=("points", "median |error|", "lowest", "highest"))
    found = comparison.errors(rows)
    for term in comparison.TERMS:
        count, *shares = found.get(term, (0,))
        table.add_row(term, str(count), *([f"{x:+.1%}" for x in shares] or [NOT_RUN]))
    return table


def _exchange_table(point: Point, store: Store) -> Table:
    table = empty("tokens", f"{point.name} [us]", right=("dispatch", "combine", "pair"))
    for tokens, halves in comparison.exchange(point, store).items():
        for one in halves:
            table.add_row(str(tokens), one.who, *_us(one), _us(one, "pair"))
        if tokens == comparison.AIM_TOKENS:
            table.add_row("", f"aim: {comparison.verdict(point, halves[0])}")
    return table


def _published_table(ep: int) -> Table:
    table = empty(f"published, EP{ep}, {comparison.AIM_TOKENS} tokens [us]", right=("dispatch", "combine"))
    table.add_column("source", overflow="fold")
    for one in comparison.others_published(ep):
        table.add_row(one.who, *_us(one), one.source)
    if not table.row_count:
        table.add_row("none in moelab/data/published")
    return table


def _us(one: Halves, what: str = "") -> list[str] | str:
    def text(value: float | None) -> str:
        return NOT_RUN if value is None else f"{value:.1f}"

    return text(getattr(one, what)) if what else [text(one.dispatch), text(one.combine)]


def _console() -> Console:
    return Console(width=max(200, shutil.get_terminal_size().columns), highlight=False, markup=False)


def main() -> None:
    try:
        app()
    except MoelabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
