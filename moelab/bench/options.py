"""Options that several benchmarks of a step have, with one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str, typer.Option("--model", metavar="NAME|DIR", help="deepseek-v3 (random weights), tinyseek, or a checkpoint.")
]
Tp = Annotated[int, typer.Option("--tp", help="Ranks per DP group, which share its attention.")]
DraftTokens = Annotated[int, typer.Option("--draft-tokens", help="MTP drafts that a step verifies.")]
KvLen = Annotated[int, typer.Option("--kv-len", help="Tokens in a request's cache, the step's included.")]
KvDtype = Annotated[Literal["bf16", "fp8"], typer.Option("--kv-dtype", help="Of the cache on a GPU.")]
Overlap = Annotated[
    Literal["none", "dispatch", "microbatch"],
    typer.Option("--overlap", help="What runs while an exchange is in flight; see moelab/stages.py."),
]
Layers = Annotated[
    int | None, typer.Option("--layers", help="Of the model, the dense ones first; random weights only. [all]")
]
Graph = Annotated[
    bool | None, typer.Option("--graph/--eager", help="CUDA graphs, or calls by the host. [graphs on a GPU]")
]
Device = Annotated[Literal["cuda", "cpu"] | None, typer.Option("--device", help="[cuda where there is a GPU]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
Records = Annotated[Path, typer.Option("--records", metavar="DIR", help="Folder the records are appended to.")]
