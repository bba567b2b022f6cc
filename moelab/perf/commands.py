"""The verbs predict, plan, validate and calibrate, for `moelab.cli`. Bodies import what they need.

An option with an impossible value is wrong usage: one line with the nearest legal choice, exit status 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moelab.config import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
Records = Annotated[
    Path | None,
    typer.Option("--records", metavar="DIR", help="Folder of your own records, used first. [default: ./records]"),
]
GPUS = "h100|h200|h800|h20|b200|gb200"
OVERLAPS = "none|dispatch|microbatch|best"
FABRICS = "nvlink|ib400|ib800|ib200|efa|nvl72"
ALLTOALLS = "deepep|pplx-2025|moelab|…"

KvLen = Annotated[float | None, typer.Option("--kv-len", help="Tokens in a request's cache.")]
Drafts = Annotated[int | None, typer.Option("--draft-tokens", help="MTP drafts per step. [default: 0]")]
Acceptance = Annotated[
    str | None,
    typer.Option("--acceptance", metavar="A[,A…]", help="Chance of a draft, or one per depth. [default: 0]"),
]
Overlap = Annotated[str | None, typer.Option("--overlap", metavar=OVERLAPS, help="[default: best]")]
Fabric = Annotated[
    str | None, typer.Option("--fabric", metavar=FABRICS, help="What joins nodes. [default: the usual for GPU and EP]")
]
AllToAll = Annotated[
    str | None, typer.Option("--alltoall", metavar=ALLTOALLS, help="Whose dispatch and combine. [default: deepep]")
]
Imbalance = Annotated[
    float | None, typer.Option("--imbalance", metavar="X", help="Rows of the busiest GPU over the mean. [default: 1]")
]


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
    for verb in (predict, plan, validate, calibrate):
        app.command()(verb)


def predict(
    gpu: Annotated[str | None, typer.Option("--gpu", metavar=GPUS, help="Kind of GPU.")] = None,
    dp: Annotated[int | None, typer.Option("--dp", help="DP groups.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="GPUs per DP group. [default: 1]")] = None,
    ep: Annotated[int | None, typer.Option("--ep", help="dp·tp, or 1: experts cut by TP. [default: dp·tp]")] = None,
    batch: Annotated[float | None, typer.Option("--batch", help="Requests of one DP group; may be fractional.")] = None,
    kv_len: KvLen = None,
    draft_tokens: Drafts = None,
    acceptance: Acceptance = None,
    overlap: Overlap = None,
    fabric: Fabric = None,
    alltoall: AllToAll = None,
    imbalance: Imbalance = None,
    redundant_experts: Annotated[
        int | None, typer.Option("--redundant-experts", metavar="R", help="Copies of experts (EP72: 32). [default: 0]")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", metavar="bf16|fp8", help="[default: bf16]")] = None,
    capacity: Annotated[
        float | None,
        typer.Option("--capacity", metavar="BYTES", help="Memory of a GPU. [default: as a device reports]"),
    ] = None,
    reserve: Annotated[
        float | None, typer.Option("--reserve", help="Share of it that the runtime keeps. [default: 0.07]")
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option("--scenario", metavar="NAME", help="Start from a preset: gb200-nvl72, eagle-tree, nics-2x400g, …"),
    ] = None,
    layer_only: Annotated[bool, typer.Option("--layer-only", help="One MoE layer, without step and memory.")] = False,
    as_json: AsJson = False,
    records: Records = None,
) -> None:
    """Predict a decode step of DeepSeek-V3, and how sure that is.

    Time, speed, throughput and memory of dp groups of tp GPUs. Kernel times come from records and published tables,
    the exchange from a law per fabric and library; every term says which, and the step has an 80 % interval.
    """
    from moelab.perf import console
    from moelab.perf.prediction import predict as run
    from moelab.perf.scenarios import scenario as find

    given = {
        "gpu": gpu, "dp": dp, "tp": tp, "ep": ep, "batch": batch, "kv_len": kv_len, "draft_tokens": draft_tokens,
        "acceptance": _acceptance(acceptance), "overlap": overlap, "fabric": fabric, "alltoall": alltoall,
        "imbalance": imbalance, "redundant_experts": redundant_experts, "kv_dtype": kv_dtype,
        "capacity": capacity, "reserve": reserve,
    }  # fmt: skip
    with _Usage():
        settings = dict(find(scenario).settings) if scenario else {}
        settings |= {name: value for name, value in given.items() if value is not None}
        for name in ("gpu", "dp", "batch", "kv_len"):
            if name not in settings:
                raise typer.BadParameter(f"give --{name.replace('_', '-')} (or a --scenario)")
        prediction = run(records=records, **settings)
    assumes = find(scenario).assumes if scenario else ()
    if as_json:
        _print({**prediction.to_dict(layer_only), **({"scenario": scenario, "assumes": assumes} if scenario else {})})
    else:
        console.prediction(prediction, layer_only, assumes)


def plan(
    gpus: Annotated[str, typer.Option("--gpus", metavar="8xH200,16xH100", help="The GPUs at hand, by kind.")],
    kv_len: Annotated[float, typer.Option("--kv-len", help="Tokens in a request's cache.")],
    min_speed: Annotated[float, typer.Option("--min-speed", metavar="TOK_S", help="Least tok/s of a request.")],
    max_ttft: Annotated[
        float | None, typer.Option("--max-ttft", metavar="MS", help="Longest prefill of kv-len tokens, ms.")
    ] = None,
    output_len: Annotated[
        float | None, typer.Option("--output-len", help="Prefill on GPUs of its own, for answers so long.")
    ] = None,
    price: Annotated[
        str | None,
        typer.Option("--price-per-gpu-hour", metavar="USD|h200=USD,…", help="Rank by cost: one price, or by GPU."),
    ] = None,
    draft_tokens: Drafts = None,
    acceptance: Acceptance = None,
    overlap: Overlap = None,
    fabric: Fabric = None,
    alltoall: AllToAll = None,
    imbalance: Imbalance = None,
    top: Annotated[int, typer.Option("--top", help="How many to list.")] = 8,
    as_json: AsJson = False,
    records: Records = None,
) -> None:
    """Rank deployments of the GPUs at hand that are fast enough.

    For every EP, DP and TP the largest batch that fits and keeps the speed; what bounds each; and what would change
    the ranking, by making each term 10 % shorter and longer.
    """
    from moelab.perf import console
    from moelab.perf.plan import plan as run
    from moelab.perf.tables import load

    given = {"overlap": overlap, "fabric": fabric, "alltoall": alltoall, "imbalance": imbalance}
    with _Usage():
        found = run(
            gpus, kv_len=kv_len, min_speed=min_speed, draft_tokens=draft_tokens or 0,
            acceptance=_acceptance(acceptance) or 0.0, max_ttft_ms=max_ttft, output_len=output_len,
            prices=_prices(price), top=top, tables=load(records),
            **{name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
    if as_json:
        _print(console.plan_dict(found))
    else:
        console.plan(found)


def validate(
    points: Annotated[
        Path | None,
        typer.Option("--points", metavar="FILE.csv", help="Deployments of your own, columns as the published table."),
    ] = None,
    as_json: AsJson = False,
    records: Records = None,
) -> None:
    """Compare the model with every published and recorded point.

    Inputs come from the point's own columns by one set of rules; nothing is tuned on the points. Errors per row,
    median and worst per class, causes with the error before and after.
    """
    from moelab.perf import console
    from moelab.perf import points as other
    from moelab.perf import validate as module
    from moelab.perf.tables import load

    with _Usage():
        tables = load(records)
        rows = module.deployments(module.read(points) if points else None, tables)
    if points is None:
        rows += other.every(tables)
    left_out = other.leave_one_out() if points is None else []
    if as_json:
        _print(console.validation_dict(rows, left_out))
    else:
        console.validation(rows, left_out)


def calibrate(as_json: AsJson = False, records: Records = None) -> None:
    """Fit fabric laws and overheads to records, with residuals.

    Your own records (--records DIR, ./records) precede the package's, and predict uses what is fitted here. The fits of
    the published tables stand beside them.
    """
    from moelab.perf import calibrate as module
    from moelab.perf import console
    from moelab.perf.tables import load

    with _Usage():
        tables = load(records)
    fits, published, overheads = module.recorded_fits(tables), module.published_fits(), module.overheads(tables)
    if as_json:
        _print({"recorded": [vars(f) for f in fits], "overheads": [vars(o) for o in overheads],
                "published": [vars(f) for f in published]})  # fmt: skip
    else:
        console.calibration(fits, overheads, published)


class _Usage:
    """ConfigError inside is wrong usage."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, ConfigError):
            raise typer.BadParameter(str(error)) from error


def _acceptance(text: str | None) -> float | list[float] | None:
    if text is None:
        return None
    try:
        values = [float(x) for x in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no number or list of numbers, as 0.6 or 0.8,0.6", param_hint="--acceptance"
        ) from None
    return values[0] if len(values) == 1 else values


def _prices(text: str | None) -> float | dict[str, float] | None:
    if text is None:
        return None
    try:
        if "=" not in text:
            return float(text)
        return {name.strip(): float(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no price; write 2.5 or h200=3.5,h100=2.5",
                                 param_hint="--price-per-gpu-hour") from None  # fmt: skip


def _print(what: dict[str, Any]) -> None:
    print(json.dumps(what, indent=2, ensure_ascii=False))
