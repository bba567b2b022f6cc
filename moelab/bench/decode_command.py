"""`moelab bench decode` as it is typed. Imports what it needs when it is called, as all verbs do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def decode(
    model: Annotated[
        str,
        typer.Option("--model", metavar="NAME|DIR", help="deepseek-v3 (random weights), tinyseek, or a checkpoint."),
    ] = "deepseek-v3",
    dp: Annotated[int, typer.Option("--dp", help="DP groups.")] = 1,
    tp: Annotated[int, typer.Option("--tp", help="Ranks per DP group, which share its attention.")] = 1,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            "--batch",
            metavar="N|max",
            help="Requests of a DP group; repeatable, or 1,16,64; max: the largest that fits, without its parts. [1]",
        ),
    ] = None,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="MTP drafts that a step verifies.")] = 0,
    acceptance: Annotated[float, typer.Option("--acceptance", help="Chance of a draft, for tok/s.")] = 0.0,
    kv_len: Annotated[int, typer.Option("--kv-len", help="Tokens in a request's cache, the step's included.")] = 4096,
    kv_dtype: Annotated[Literal["bf16", "fp8"], typer.Option("--kv-dtype", help="Of the cache.")] = "bf16",
    overlap: Annotated[
        Literal["none", "dispatch", "microbatch"],
        typer.Option("--overlap", help="What runs while an exchange is in flight; see moelab/stages.py."),
    ] = "none",
    shadow: Annotated[
        bool, typer.Option("--shadow", help="One rank of the deployment on one GPU; the others are stood in for.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option("--layers", help="Of the model, the dense ones first; random weights only. [all]")
    ] = None,
    routing: Annotated[
        Literal["equal", "uniform", "zipf", "tinyseek"] | None,
        typer.Option("--routing", help="Load of a shadow rank. [equal]"),
    ] = None,
    fabric: Annotated[
        Literal["none", "nvlink", "ib400", "efa"] | None,
        typer.Option("--fabric", help="By whose law a shadow rank waits. [none]"),
    ] = None,
    graph: Annotated[
        bool | None, typer.Option("--graph/--eager", help="CUDA graphs, or calls by the host. [graphs on a GPU]")
    ] = None,
    device: Annotated[
        Literal["cuda", "cpu"] | None, typer.Option("--device", help="[cuda where there is a GPU]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")] = False,
    records: Annotated[
        Path, typer.Option("--records", metavar="DIR", help="Folder the records are appended to.")
    ] = Path("records"),
) -> None:
    """Time a decode step, and each of its stages alone.

    FP8 weights, a cache filled with random rows. Stages run through all layers' weights, by graphs of their own; what
    does not fit into memory is refused before anything is allocated. On a CPU a small model shows the method.
    """
    from moelab.bench import decode_console as console

    console.decode_bench(
        batch or ["1"], model=model, dp=dp, tp=tp, draft_tokens=draft_tokens, acceptance=acceptance, kv_len=kv_len,
        kv_dtype=kv_dtype, overlap=overlap, shadow=shadow, layers=layers, routing=routing, fabric=fabric, graph=graph,
        device=device, as_json=as_json, records=records,
    )  # fmt: skip
