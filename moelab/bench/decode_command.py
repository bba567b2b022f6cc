"""`moelab bench decode` as it is typed. Imports what it needs when it is called, as all verbs do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from moelab.bench.options import (
    AsJson,
    Device,
    DraftTokens,
    Graph,
    KvDtype,
    KvLen,
    Layers,
    Model,
    Overlap,
    Records,
    Tp,
)


def decode(
    model: Model = "deepseek-v3",
    dp: Annotated[int, typer.Option("--dp", help="DP groups.")] = 1,
    tp: Tp = 1,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            "--batch",
            metavar="N|max",
            help="Requests of a DP group; repeatable, or 1,16,64; max: the largest that fits, without its parts. [1]",
        ),
    ] = None,
    draft_tokens: DraftTokens = 0,
    acceptance: Annotated[float, typer.Option("--acceptance", help="Chance of a draft, for tok/s.")] = 0.0,
    kv_len: KvLen = 4096,
    kv_dtype: KvDtype = "bf16",
    overlap: Overlap = "none",
    shadow: Annotated[
        bool, typer.Option("--shadow", help="One rank of the deployment on one GPU; the others are stood in for.")
    ] = False,
    layers: Layers = None,
    routing: Annotated[
        Literal["equal", "uniform", "zipf", "tinyseek"] | None,
        typer.Option("--routing", help="Load of a shadow rank. [equal]"),
    ] = None,
    fabric: Annotated[
        Literal["none", "nvlink", "ib400", "efa"] | None,
        typer.Option("--fabric", help="By whose law a shadow rank waits. [none]"),
    ] = None,
    comm_sms: Annotated[
        int, typer.Option("--comm-sms", metavar="N", help="SMs that the exchange's kernels take; 0: all.")
    ] = 0,
    compute_sms: Annotated[
        int, typer.Option("--compute-sms", metavar="N", help="SMs that our other kernels share; 0: all.")
    ] = 0,
    graph: Graph = None,
    device: Device = None,
    as_json: AsJson = False,
    records: Records = Path("records"),
) -> None:
    """Time a decode step, and each of its stages alone.

    FP8 weights, a cache filled with random rows. Stages run through all layers' weights, by graphs of their own; what
    does not fit into memory is refused before anything is allocated. On a CPU a small model shows the method.
    """
    from moelab.bench import decode_console as console

    console.decode_bench(
        batch or ["1"], model=model, dp=dp, tp=tp, draft_tokens=draft_tokens, acceptance=acceptance, kv_len=kv_len,
        kv_dtype=kv_dtype, overlap=overlap, shadow=shadow, layers=layers, routing=routing, fabric=fabric, graph=graph,
        device=device, as_json=as_json, records=records, comm_sms=comm_sms, compute_sms=compute_sms,
    )  # fmt: skip
