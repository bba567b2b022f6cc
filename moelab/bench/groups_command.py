"""`moelab bench groups` as it is typed. Imports what it needs when it is called, as all verbs do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def groups(
    batch_by_group: Annotated[
        list[str],
        typer.Option(
            "--batch-by-group",
            metavar="N,N,…",
            help="Requests of each DP group, one number a group, 0: idle; repeatable, with as many groups.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option("--model", metavar="NAME|DIR", help="deepseek-v3 (random weights), tinyseek, or a checkpoint."),
    ] = "deepseek-v3",
    tp: Annotated[int, typer.Option("--tp", help="Ranks per DP group, which share its attention.")] = 1,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="MTP drafts that a step verifies.")] = 0,
    kv_len: Annotated[int, typer.Option("--kv-len", help="Tokens in a request's cache, the step's included.")] = 4096,
    kv_dtype: Annotated[Literal["bf16", "fp8"], typer.Option("--kv-dtype", help="Of the cache on a GPU.")] = "bf16",
    overlap: Annotated[
        Literal["none", "dispatch", "microbatch"],
        typer.Option("--overlap", help="What runs while an exchange is in flight; see moelab/stages.py."),
    ] = "none",
    layers: Annotated[
        int | None, typer.Option("--layers", help="Of the model, the dense ones first; random weights only. [all]")
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
    """Time decode steps of DP groups with different batches, in two ways.

    own: each group runs the size of its own batch. padded: all groups first agree on the largest, by an all-reduce of
    one integer, and pad to it; padding is routed nowhere. The step is otherwise the same, over the same exchange.
    """
    from moelab.bench import groups_console as console

    console.groups_bench(
        batch_by_group, model=model, tp=tp, draft_tokens=draft_tokens, kv_len=kv_len, kv_dtype=kv_dtype,
        overlap=overlap, layers=layers, graph=graph, device=device, as_json=as_json, records=records,
    )  # fmt: skip
