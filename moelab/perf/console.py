"""What predict, plan, validate and calibrate print: tables for a terminal, dictionaries for --json."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moelab.perf.calibrate import Fit, Overhead
from moelab.perf.plan import Option, Plan
from moelab.perf.points import LeftOut
from moelab.perf.prediction import Prediction
from moelab.perf.validate import FITTED, Row, summary
from moelab.stages import CATEGORIES

MOST = 12
STATEMENT = (
    "Nothing is tuned on these points: inputs come from each row's own columns; tables of kernels and laws of fabrics "
    "from other sources. A cause is a term for every row of its class."
)


def prediction(p: Prediction, layer_only: bool, assumes: Sequence[str]) -> None:
    d = p.deployment
    how = "experts cut by TP" if d.expert_tp else f"EP{d.parallel.ep}"
    print(
        f"{d.gpu.name}, {how} DP{d.parallel.dp} TP{d.parallel.tp}, batch {d.batch:g}, KV {d.kv_len:g}, "
        f"{d.draft_tokens} drafts, overlap {p.overlap}, {d.alltoall} on {d.fabric}"
    )
    for line in assumes:
        print(f"assumes: {line}")
    if not layer_only:
        low, high = p.interval["step_ms"]
        slow, fast = p.interval["tok_s_per_request"]
        print(f"step {p.step_ms:.2f} ms (80 %: {low:.1f} to {high:.1f})")
        print(f"{p.tok_s_per_request:.1f} tok/s per request ({slow:.1f} to {fast:.1f}), "
              f"{p.tok_s_per_gpu:.0f} per GPU, {p.tok_s_per_node:.0f} per node")  # fmt: skip
        verdict = "fits" if p.fits else "DOES NOT FIT"
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in p.memory_bytes.items())
        print(f"memory {verdict} (largest batch {p.largest_batch}): {parts} GB")
    shown = ", ".join(f"{c} {p.layer_us[c]:.0f}" for c in CATEGORIES if p.layer_us[c])
    print(f"one MoE layer {p.layer_us['total']:.0f} us: {shown}")
    table = _table(("term", "ms", "origin", "±", "source"), right=(1, 3))
    for name, o in p.origins.items():
        table.add_row(name, f"{o.ms:.2f}", o.origin, f"{o.error:.0%}", o.source)
    _show(table)
    for note in p.notes:
        print(f"note: {note}")


def option_dict(o: Option) -> dict:
    p, d = o.prediction, o.prediction.deployment
    term, share = o.bounds()[0]
    return {
        "pool": o.pool, "instances": o.instances, "ep": 1 if d.expert_tp else d.parallel.ep, "dp": d.parallel.dp,
        "tp": d.parallel.tp, "redundant_experts": d.redundant, "batch": d.batch, "overlap": p.overlap,
        "fabric": d.fabric, "alltoall": d.alltoall, "tok_s_per_request": p.tok_s_per_request,
        "tok_s_per_gpu": o.tok_s_per_gpu, "tok_s_per_node": p.tok_s_per_node, "tok_s_total": o.tok_s,
        "step_ms": p.step_ms, "interval": p.interval, "batch_limited_by": o.limit,
        "bound_by": {"term": term, "share": share, "all": dict(o.bounds())},
        "usd_per_million_tokens": o.usd_per_million,
        "ttft_ms": o.prefill.ttft_ms if o.prefill else None,
        "prefill_gpus_per_decode_gpu": o.matched.prefill_gpus if o.matched else None,
        "extrapolated": [name for name, origin in p.origins.items() if origin.origin == "extrapolated"],
    }  # fmt: skip


def plan_dict(plan: Plan) -> dict:
    return {
        "ranked_by": plan.by,
        "ranked": [{"rank": i, **option_dict(o)} for i, o in enumerate(plan.ranked, start=1)],
        "what_would_change_it": [
            {"term": c.term, "factor": c.factor, "best": c.best, "gain_of_the_best": c.gain,
             "order_changes": c.order_changes, "best_changes": c.best != plan.ranked[0].name()}
            for c in plan.changes
        ],
    }  # fmt: skip


def plan(found: Plan) -> None:
    columns = ("#", "deployment", "batch", "overlap", "tok/s request", "tok/s GPU", "80 %", "bound by", "stopped by")
    table = _table(columns + (("USD/1M",) if found.ranked[0].usd_per_million is not None else ()), right=(0, 2, 4, 5))
    for i, o in enumerate(found.ranked, start=1):
        p = o.prediction
        low, high = p.interval["tok_s_per_gpu"]
        bound = ", ".join(f"{name} {share:.0%}" for name, share in o.bounds()[:2])
        cost = (f"{o.usd_per_million:.2f}",) if o.usd_per_million is not None else ()
        table.add_row(str(i), o.name(), f"{p.deployment.batch:g}", p.overlap,
                      f"{p.tok_s_per_request:.1f}", f"{o.tok_s_per_gpu:.0f}", f"{low:.0f}–{high:.0f}", bound, o.limit,
                      *cost)  # fmt: skip
    print(f"ranked by {found.by}")
    _show(table)
    print("what would change it, each term 10 % shorter or longer for all:")
    table = _table(("term", "", "gain of the best", "best then", "order"), right=(2,))
    for c in found.changes:
        then = "the same" if c.best == found.ranked[0].name() else c.best
        table.add_row(c.term, f"x {c.factor}", f"{c.gain:+.1%}", then, "changes" if c.order_changes else "stays")
    _show(table)


def row_dict(r: Row) -> dict:
    return {
        "id": r.id, "class": r.kind, "quantity": r.quantity, "unit": r.unit, "measured": r.measured,
        "predicted": r.predicted, "interval": None if r.low is None else [r.low, r.high], "error": r.error,
        "inside": r.inside, "causes": list(r.causes), "error_before_causes": r.before, "passed_over": r.reason or None,
        "inputs": dict(r.inputs), "source": r.source,
    }  # fmt: skip


def validation_dict(rows: Sequence[Row], left_out: Sequence[LeftOut]) -> dict:
    return {
        "statement": STATEMENT,
        "fitted": [{"constant": name, "to": source} for name, source in FITTED],
        "classes": summary(rows),
        "rows": [row_dict(r) for r in rows],
        "leave_one_source_out": [vars(x) for x in left_out],
    }


def validation(rows: Sequence[Row], left_out: Sequence[LeftOut]) -> None:
    print(STATEMENT)
    table = _table(("class", "point", "measured", "predicted", "80 %", "error", "before", "inside", "causes"),
                   right=(2, 3, 5, 6))  # fmt: skip
    for r in _shown(rows):
        if r.error is None:
            table.add_row(r.kind, r.id, "", "", "", "", "", "", f"passed over: {r.reason}")
            continue
        table.add_row(
            r.kind, r.id, f"{r.measured:.4g} {r.unit}", f"{r.predicted:.4g}",
            "" if r.low is None else f"{r.low:.4g}–{r.high:.4g}",
            f"{r.error:+.1%}", "" if r.before is None else f"{r.before:+.1%}",
            {True: "yes", False: "no", None: ""}[r.inside], ", ".join(r.causes),
        )  # fmt: skip
    _show(table)
    columns = ("class", "rows", "median |error|", "worst", "worst row", "inside", "half-width", "passed over")
    table = _table(columns, right=(1, 2, 3, 5, 6, 7))
    for kind, s in summary(rows).items():
        table.add_row(
            kind, str(s["rows"]), f"{s['median_abs_error']:.1%}", f"{s['worst_error']:+.1%}", s["worst_row"],
            *("" if s[name] is None else f"{s[name]:.0%}" for name in ("inside_interval", "median_half_width")),
            str(s["passed_over"]),
        )  # fmt: skip
    _show(table)
    if left_out:
        table = _table(("constant", "fitted to"))
        for name, source in FITTED:
            table.add_row(name, source)
        _show(table)
        table = _table(("left out", "judged by it", "points", "median |error|", "worst"), right=(2, 3, 4))
        for x in left_out:
            table.add_row(x.left_out, x.judged, str(x.points), f"{x.median:.1%}", f"{x.worst:+.1%}")
        _show(table)


def _shown(rows: Sequence[Row]) -> list[Row]:
    """All rows, but of a class of many only the MOST with the largest errors (--json has every one)."""
    shown = []
    for kind in dict.fromkeys(r.kind for r in rows):
        of_kind = [r for r in rows if r.kind == kind]
        if len(of_kind) > 5 * MOST:
            of_kind = sorted(of_kind, key=lambda r: -abs(r.error or 0.0))[:MOST]
        shown += of_kind
    return shown


def calibration(fits: Sequence[Fit], overheads: Sequence[Overhead], published: Sequence[Fit]) -> None:
    columns = ("library", "GPU", "EP", "stage", "alpha us", "beta GB/s", "points", "tokens", "worst residual", "origin")
    table = _table(columns, right=(4, 5, 6, 8))
    for f in (*fits, *published):
        table.add_row(f.library, f.gpu, f.ep, f.stage, f"{f.alpha_us:.1f}", f"{f.beta_gb_s:.1f}", str(f.points),
                      f"{f.tokens[0]}–{f.tokens[1]}", f"{f.worst_residual_us:+.1f} us ({f.worst_residual:+.0%})",
                      f.origin)  # fmt: skip
    _show(table)
    for o in overheads:
        print(f"{o.name} on {o.gpu}: {o.us:.0f} us ({o.low:.0f} to {o.high:.0f}, {o.points} records, {o.origin})")
    if not fits:
        print("no records of an exchange (bench alltoall) with three or more numbers of tokens: published laws count",
              file=sys.stderr)  # fmt: skip
    if not overheads:
        print("no records of the host's share of a step (metric host): an assumption counts", file=sys.stderr)


def _table(columns: Sequence[str], right: Sequence[int] = ()):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in right else "left", overflow="fold")
    return table


def _show(table) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
