"""`moelab bench groups` as it is typed. Imports what it needs when it is called, as all verbs do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def groups(
    batch_by_group: Annotated[
        list[str],
        typer.Option(
            "--batch-by-group",
            metavar="N,N,…",
            help="Requests of each DP group, one number a group, 0: idle; repeatable, with as many groups.",
        ),
    ],
    model: Model = "deepseek-v3",
    tp: Tp = 1,
    draft_tokens: DraftTokens = 0,
    kv_len: KvLen = 4096,
    kv_dtype: KvDtype = "bf16",
    overlap: Overlap = "none",
    layers: Layers = None,
    graph: Graph = None,
    device: Device = None,
    as_json: AsJson = False,
    records: Records = Path("records"),
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
