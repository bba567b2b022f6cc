"""The style, the colours, and what every figure needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moelab.config import ConfigError
from moelab.stages import CATEGORIES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, LINE, PANEL = "#1c2430", "#5b6675", "#c9d0d9", "#f2f4f7"
PAINT = (  # soft fills, in order, for parts of a whole that have no fixed colour
    "#8fb8de", "#f2b179", "#93c9a1", "#d8a1c4", "#c9c27a", "#a9a4d6", "#8ccdd0", "#e39b9b", "#b9b9b9", "#c7a98b",
)  # fmt: skip
_BACKENDS = {
    "torch-gloo": "#0173b2",
    "torch-nccl": "#56b4e9",
    "virtual": "#949494",
    "nvshmem": "#029e73",
    "nvshmem-flags": "#93c9a1",
    "nvshmem-puts": "#0b5d45",
    "nvshmem-padded": "#8c564b",
    "nccl-split": "#56b4e9",
    "nccl-split-packed": "#0173b2",
    "nccl-padded": "#d55e00",
    "symm_mem-vdev2d": "#de8f05",
    "dense-padded": "#d55e00",
    "dense-split": "#de8f05",
    "deep_ep": "#cc78bc",
    "pplx": "#ca9161",
    "reference": "#5b6675",
    "triton": "#ca9161",
    "hopper": "#56b4e9",
    "deep_gemm": "#029e73",
    "flashinfer": "#cc78bc",
    "moelab": "#0173b2",
    "cublas": "#de8f05",
    "cublas per tensor": "#de8f05",
    "two launches": "#d55e00",
    "torch.compile": "#949494",
    "triton-padded": "#d55e00",
}
_SCHEMES = {  # by where their scales stand (`moelab.bench.schemes`)
    "per tensor": "#d55e00",
    "per row": "#de8f05",
    "1×128": "#0173b2",
    "128×128": "#0173b2",
    "1×128, 2ⁿ": "#56b4e9",
    "128×128, 2ⁿ": "#56b4e9",
    "BF16": "#5b6675",
    "INT8 per tensor": "#949494",
}
_CATEGORIES = dict(
    zip(
        CATEGORIES,
        ("#e8743b", "#f4b183", "#2f6db3", "#8fb8de", "#2e9e6b", "#9ad1b3", "#c9c27a", "#d5dae1", "#a98bc9", "#b3aca4"),
        strict=True,
    )
)


def _apply_style() -> None:
    import seaborn as sns

    sns.set_theme(
        context="notebook",
        style="whitegrid",
        rc={
            "figure.dpi": 110,
            "savefig.dpi": 110,
            "font.size": 10.5,
            "axes.titlesize": 11.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 10,
            "axes.labelsize": 10.5,
            "axes.labelcolor": INK,
            "axes.edgecolor": LINE,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": "#e6e9ee",
            "text.color": INK,
            "xtick.color": SOFT,
            "ytick.color": SOFT,
            "xtick.labelsize": 9.5,
            "ytick.labelsize": 9.5,
            "legend.fontsize": 9.5,
            "legend.frameon": False,
            "figure.facecolor": "white",
        },
    )


def figure(rows: int = 1, columns: int = 1, width: float = 9.5, height: float = 4.2, **options):
    """(figure, axes) of so many inches in the house style; `axes` as `plt.subplots` gives them."""
    import matplotlib.pyplot as plt

    _apply_style()
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)


def canvas(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> tuple[Figure, Axes]:
    """A figure without axes to draw boxes on, with its coordinates."""
    fig, ax = figure(width=width, height=height)
    ax.set(xlim=x, ylim=y)
    ax.axis("off")
    return fig, ax


def label(ax: Axes, x: str = "", y: str = "", title: str = "") -> None:
    """Axis labels, "quantity [unit]", and a title. An axis that panels share is labelled on the outside of their grid
    only. Raises ConfigError for a label without its unit ([1]: none)."""
    for text in (x, y):
        if text and not text.endswith("]"):
            raise ConfigError(f"axis label {text!r} has no unit: write 'quantity [unit]'")
    place = ax.get_subplotspec()
    if x and (place.is_last_row() or len(ax.get_shared_x_axes().get_siblings(ax)) == 1):
        ax.set_xlabel(x)
    if y and (place.is_first_col() or len(ax.get_shared_y_axes().get_siblings(ax)) == 1):
        ax.set_ylabel(y)
    if title:
        ax.set_title(title)


def roof(ax: Axes, value: float, text: str, place: float = 1.0) -> None:
    """A limit, as a dashed line across, named above it; `place`: where the name ends, as a share of the width."""
    low, high = ax.get_ylim()
    ax.axhline(value, color=INK, linestyle="--", linewidth=1.3, zorder=3)
    # Room for the name above: text outside the axes would make the whole picture grow to hold it.
    ax.set_ylim(min(low, value), max(high, value + 0.08 * (value - low)))
    ax.annotate(
        text, (place, value), (-2, 4), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
        va="bottom", fontsize=9, zorder=4,
    )  # fmt: skip


def wall(ax: Axes, value: float, text: str) -> None:
    """A limit, as a dashed line upwards, named along its foot."""
    ax.axvline(value, color=INK, linestyle="--", linewidth=1.3, zorder=1.5)
    halo(ax.annotate(text, (value, 0), (3, 5), xycoords=("data", "axes fraction"), textcoords="offset points",
                     rotation=90, ha="left", va="bottom", fontsize=9, zorder=4))  # fmt: skip


def ep_color(ep: int):
    """The colour of an EP degree: dark for few GPUs, light for many."""
    import matplotlib

    place = min(max((math.log2(ep) - 2) / 6, 0), 1)
    return matplotlib.colormaps["viridis"](0.05 + 0.82 * place)


def backend_color(backend: str) -> str:
    """Raises ConfigError for a backend that has none: give it one in this file."""
    if backend not in _BACKENDS:
        raise ConfigError(f"backend {backend!r} has no colour; those that have: {', '.join(_BACKENDS)}")
    return _BACKENDS[backend]


def scheme_color(scheme: str) -> str:
    """The colour of a scheme of quantisation, the same for activations and weights."""
    return _SCHEMES[scheme]


def category_color(category: str) -> str:
    """The colour of a kernel category of `moelab.stages`."""
    return _CATEGORIES[category]


def box(
    ax: Axes, x: float, y: float, width: float, height: float, color: str = "white", edge: str = LINE,
    line: float = 1.0, dashed: bool = False, radius: float = 0.0, z: float = 2,
) -> None:  # fmt: skip
    """A rectangle with its lower left corner at (x, y)."""
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={radius}" if radius else "square,pad=0"
    ax.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle=style, facecolor=color, edgecolor=edge, linewidth=line,
            linestyle="--" if dashed else "-", zorder=z,
        )
    )  # fmt: skip


def decimal_ticks(axis) -> None:
    """Numbers on a logarithmic axis: at 1, 2 and 5 of each decade where few decades are shown, else at 1."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def mark(ax: Axes, x: float, y: float, color: object, text: str = "") -> None:
    """A diamond: a number that somebody published, with a name to its left."""
    ax.plot(x, y, marker="D", markersize=8, color=color, markeredgecolor="white", zorder=5, linestyle="none")
    halo(ax.annotate(text, (x, y), (-9, 0), textcoords="offset points", ha="right", va="center", fontsize=9,
                     color=color, zorder=6))  # fmt: skip


def halo(text) -> None:
    """White around a text that stands on lines."""
    from matplotlib import patheffects

    text.set_path_effects([patheffects.withStroke(linewidth=3, foreground="white")])


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str = SOFT, bend: float = 0) -> None:
    from matplotlib.patches import FancyArrowPatch

    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, color=color, linewidth=1.2, shrinkA=0, shrinkB=0,
            connectionstyle=f"arc3,rad={bend}", zorder=3,
        )
    )  # fmt: skip


def show_table(frame: pd.DataFrame, digits: int = 1, **formats: str):
    """A data frame as a table without its index: numbers with thousands separators and `digits` decimals, or by
    `formats`, {column: format}; text to the left."""
    import pandas as pd

    def number(value) -> str:
        if isinstance(value, str):
            return value
        if value is None or value != value:
            return "–"
        return f"{value:,.{0 if float(value).is_integer() else digits}f}"

    text = [c for c in frame.columns if not pd.api.types.is_numeric_dtype(frame[c])]
    return (
        frame.style.format({c: formats.get(c, number) for c in frame.columns})
        .hide(axis="index")
        .set_properties(subset=text, **{"text-align": "left", "white-space": "normal"})
        .set_table_styles([{"selector": "th", "props": "text-align: left; vertical-align: bottom;"}])
    )


def verdict_style(verdict: str) -> str:
    """CSS of a table's cell that holds a verdict of `moelab.perf.study`."""
    colors = {"holds": "#dff0e4", "depends": "#fbf0d3", "differs": "#f8dcd6", "open": PANEL}
    return f"background-color: {colors[verdict]}; color: {INK}"


def show_missing(op: str, gpu: str, bench: str = ""):
    """What stands in a figure's place where nothing was recorded of `op` on `gpu`; `bench`: what records it, as after
    `moelab bench`, for what is none of its ops."""
    from IPython.display import Markdown

    return Markdown(
        f"> **Nothing recorded of `{op}` on {gpu}**, so there is no figure here. "
        f"`moelab bench {bench or f'ops --op {op}'}` on such a GPU writes the records to `./records`; run where they "
        "are, this notebook draws them."
    )


def show_text(title: str, prompt: str, continuation: str):
    """A prompt and what a model made of it, told apart by colour."""
    import html

    from IPython.display import HTML

    body = f'{html.escape(prompt)}<span style="background:#dff0e4">{html.escape(continuation)}</span>'
    return HTML(
        f'<p style="margin:.6em 0 .2em"><b>{html.escape(title)}</b></p>'
        f'<pre style="background:{PANEL};color:{INK};padding:.6em .8em;white-space:pre-wrap;'
        f'font-family:monospace">{body}</pre>'
    )
