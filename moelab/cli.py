"""The command `moelab VERB`.

Results go to standard output, everything else (progress, warnings, errors) to standard error. Exit status: 0
done, 1 failed, 2 wrong usage. An error is one line; `--debug`, anywhere on the line, shows the traceback
instead.

A verb is one function here; its body imports what it needs, so `moelab --help` loads neither torch nor
pandas.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from moelab import __version__
from moelab.bench import decode_command, groups_command
from moelab.config import MoelabError
from moelab.perf import commands as perf_commands
from moelab.results import commands as records_commands

HELP = "Measure, model and verify the deployment of DeepSeek-style Mixture-of-Experts models."

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(records_commands.app, name="records")
bench_app = typer.Typer(help="Time what runs on the GPUs at hand, into records.", no_args_is_help=True)
bench_app.command("decode")(decode_command.decode)
bench_app.command("groups")(groups_command.groups)
app.add_typer(bench_app, name="bench")
kernels_app = typer.Typer(help="Build the CUDA kernels of the exchange, or say how they stand.", no_args_is_help=True)
app.add_typer(kernels_app, name="kernels")
perf_commands.register(app)

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
Records = Annotated[
    Path | None,
    typer.Option("--records", metavar="DIR", help="Folder of your own records, searched first. [default: ./records]"),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script. Ends by SystemExit, as a command does."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = _join_parameters([x for x in arguments if x != "--debug"])
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.addLevelName(logging.WARNING, "warning")
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it logs it also raises
    try:
        raise SystemExit(app(args=arguments, prog_name="moelab", standalone_mode=False) or 0)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a verb is missing: its text is the whole help
            print(error.format_message(), file=sys.stderr)
            raise SystemExit(2) from None
        if debug:
            raise
        sys.stdout.flush()
        message, status = _one_line(error)
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(status) from None


def _one_line(error: Exception) -> tuple[str, int]:
    """(message, exit status). Typer's own exceptions are known by what they carry: it keeps its classes
    private."""
    if type(error).__name__ == "Abort":  # Ctrl-C
        return "interrupted", 130
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        context = getattr(error, "ctx", None)
        message = " ".join(error.format_message().split())
        return f"{message} (see {context.command_path if context else 'moelab'} --help)", error.exit_code
    message = " ".join(str(error).split())
    if isinstance(error, MoelabError):
        return message, 1
    return f"{type(error).__name__}: {message} (moelab did not expect this; --debug shows where)", 1


def _join_parameters(arguments: list[str]) -> list[str]:
    """`-p NAME VALUE` as `-p NAME=VALUE`: typer has no repeatable option of two values. A value may begin
    with "-"."""
    joined: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        joined.append(argument)
        if argument in ("-p", "--parameter") and joined[0] == "run":
            name = next(rest, None)
            value = next(rest, None) if name is not None and "=" not in name else None
            joined += [x for x in (name if value is None else f"{name}={value}",) if x is not None]
    return joined


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moelab {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show the traceback.")] = False,
) -> None:
    pass  # `main` has taken --debug off the line already; it stands here for --help


@app.command()
def doctor(as_json: AsJson = False, records: Records = None) -> None:
    """Say what works on this machine, and how to fix the rest.

    Looks at GPUs and their links, CUDA, optional libraries, communication backends and data. Always exits 0:
    a missing part is a finding, not a failure.
    """
    from moelab import doctor as module

    if as_json:
        checks = module.collect(records)
        print(json.dumps(module.as_dict(checks), indent=2))
        return
    from rich.console import Console

    with Console(stderr=True).status("looking around (imports take a few seconds)"):
        checks = module.collect(records)
    Console(width=None if sys.stdout.isatty() else 120).print(module.as_table(checks))


@app.command()
def generate(
    prompt: Annotated[
        list[str], typer.Option("--prompt", metavar="TEXT", help="What to continue; repeat it for several.")
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="tinyseek|DIR", help="tinyseek, or a Hugging Face checkpoint.")
    ] = "tinyseek",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="The most new tokens per prompt.")] = 128,
    dp: Annotated[int, typer.Option("--dp", help="DP groups; prompts go to them in turn.")] = 1,
    tp: Annotated[int, typer.Option("--tp", help="Ranks per DP group, which share its attention.")] = 1,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Decides the draws of a temperature above 0.")] = 0,
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option("--device", help="cpu computes in float32, cuda in block FP8."),
    ] = "cpu",
    overlap: Annotated[
        Literal["none", "dispatch", "microbatch"],
        typer.Option("--overlap", help="What runs while an exchange is in flight; see moelab/stages.py."),
    ] = "none",
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="MTP drafts per step; the text is the same.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Continue prompts, the experts spread over dp × tp ranks.

    Starts the ranks itself, on this machine. Standard output gets the new text alone, without the prompt, as
    it comes; a line end follows each text. Several texts come in the order of their prompts. With --json it
    gets one list of {prompt, text, tokens, finish_reason} at the end. When a rank fails, its traceback comes
    first.
    """
    from moelab.launch.console import generate as run

    run(model, prompt, max_tokens, dp, tp, temperature, seed, device, overlap, draft_tokens, as_json)


@app.command("run")
def run_notebook(
    notebook: Annotated[str, typer.Argument(metavar="NOTEBOOK", help="A name such as 01_parallelism, or a path.")],
    parameter: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", metavar="NAME VALUE", help="Set a parameter (or NAME=VALUE); repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the results go.")] = Path("out"),
) -> None:
    """Run a notebook with strict parameters.

    Prints the paths of the executed notebook and of its HTML. An unknown parameter, or a value of another
    type than the default's, is an error before anything runs.
    """
    from moelab import notebook as module

    given: dict[str, str] = {}
    for text in parameter or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} has no value; write -p {text} VALUE", param_hint="-p")
        if name in given:
            raise typer.BadParameter(f"{name!r} is given twice: {given[name]!r} and {value!r}", param_hint="-p")
        given[name] = value
    done = module.run(notebook, given, out)
    print(done.ipynb)
    print(done.html)


@app.command()
def tour(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the report goes.")] = Path("report"),
) -> None:
    """Run all notebooks and make a gallery of them.

    Prints the path of its index.html. A notebook that fails does not stop the others; the exit status is then
    1.
    """
    from moelab import notebook as module

    print(module.tour(out))


@bench_app.command("ops")
def bench_ops(
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op",
            metavar="NAME",
            help="quantize, rms_norm, silu_mul, router, gather, reduce, quantize_weight, bmm, rope_append, linear, "
            "grouped_gemm, mla; repeatable. [all]",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few settings of each op.")] = False,
    write_table: Annotated[
        bool,
        typer.Option(
            "--write-table",
            help="Time every backend and config instead, and write which is fastest where: the table that linear, "
            "grouped_gemm_padded and grouped_gemm_contiguous choose by.",
        ),
    ] = False,
    as_json: AsJson = False,
    records: Annotated[
        Path, typer.Option("--records", metavar="DIR", help="Folder the records are appended to.")
    ] = Path("records"),
) -> None:
    """Time the ops of a layer on one GPU, beside others that do the same job.

    Replays of a CUDA graph over inputs that are not in the cache; shares are of roofs measured in the same run.
    """
    from moelab.bench import console

    if write_table:
        console.tables(op or [], records)
    else:
        console.ops(op or [], quick, as_json, records)


@kernels_app.command("build")
def kernels_build(as_json: AsJson = False) -> None:
    """Compile the kernels for Hopper GPUs, if they are not.

    Prints the path of the library. Needs nvcc (of CUDA_HOME, or on PATH) and NVSHMEM (torch for CUDA brings
    it; or NVSHMEM_HOME), no GPU. A build lies in ~/.cache/moelab/kernels, or in $MOELAB_CACHE/kernels, under
    a hash of all that went in: what is there is not built again, and processes that ask at the same time
    wait for one of them.
    """
    from moelab.comm import console

    console.build_kernels(as_json)


@kernels_app.command("info")
def kernels_info(as_json: AsJson = False) -> None:
    """Say whether the kernels are built, from what, and where.

    Compiles and loads nothing. What cannot be built is a finding, not a failure: its reason stands first.
    """
    from moelab.comm import console

    console.info(as_json)


@bench_app.command("alltoall")
def bench_alltoall(
    dp: Annotated[int, typer.Option("--dp", help="DP groups, which bring tokens of their own.")] = 2,
    tp: Annotated[int, typer.Option("--tp", help="Ranks per DP group, which share the sending.")] = 1,
    tokens: Annotated[
        list[str] | None,
        typer.Option("--tokens", metavar="N", help="Tokens of each DP group; repeatable, or 1,8,32. [1,8,32,128]"),
    ] = None,
    hidden: Annotated[int, typer.Option("--hidden", help="Values of a token.")] = 7168,
    experts: Annotated[int, typer.Option("--experts", help="Routed experts in all.")] = 256,
    top_k: Annotated[int, typer.Option("--top-k", help="Experts of a token.")] = 8,
    dtype: Annotated[
        Literal["fp8", "bf16"], typer.Option("--dtype", help="Of dispatched tokens; outputs come back in bf16.")
    ] = "fp8",
    routing: Annotated[
        list[str] | None,
        typer.Option(
            "--routing", metavar="NAME", help="uniform, group-limited, zipf, hot (all to rank 0); repeatable. [uniform]"
        ),
    ] = None,
    graph: Annotated[
        bool | None, typer.Option("--graph/--eager", help="Replays of a CUDA graph, or calls by the host. [both]")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="Our kernels: nvshmem, nvshmem-flags, nvshmem-puts; peers: nccl-split, nccl-split-packed, "
            "nccl-padded, nvshmem-padded, symm_mem-vdev2d, deep_ep, pplx; floor: nothing else; repeatable. [all]",
        ),
    ] = None,
    returns: Annotated[
        list[str] | None,
        typer.Option(
            "--returns",
            metavar="NAME",
            help="What our kernels send home: rows, one per expert; or a rank's sum, f32 or bf16; repeatable. [all]",
        ),
    ] = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option("--blocks", metavar="N", help="Blocks of our kernels; repeatable, or 8,16,32. [they choose]"),
    ] = None,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option("--device", help="cpu: the method over gloo, with small numbers.")
    ] = "cuda",
    as_json: AsJson = False,
    records: Annotated[
        Path, typer.Option("--records", metavar="DIR", help="Folder the records are appended to.")
    ] = Path("records"),
) -> None:
    """Time dispatch and combine over dp × tp GPUs, beside others that do the same job.

    Starts the ranks itself, one a GPU, on this machine; under torchrun it is a rank. A sample is the slowest rank's.
    The floor that no exchange gets below is measured in the same run, and the least possible time stands beside each.
    What was moved is checked before it is timed and after.
    """
    from moelab.bench import alltoall_console as console

    console.alltoall_bench(
        tokens or ["1,8,32,128"], routing or ["uniform"], device, dp=dp, tp=tp, hidden=hidden, experts=experts,
        top_k=top_k, payload=dtype, graph=graph, backends=backend or [], returns=returns or [], blocks=blocks or [],
        as_json=as_json, records=records,
    )  # fmt: skip
