"""What a second new token does to an attention kernel, on the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moelab.plots.style import SOFT, backend_color, halo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moelab.perf.roofline import Point

Pairs = Mapping[str, Mapping[tuple[int, int], Sequence["Point"]]]


def second_token(ax: Axes, pairs: Pairs) -> None:
    """{backend: {(heads, batch): [with one new token, with two]}} on a roofline: a hollow and a full dot joined by a
    line, in the backend's colour; batches named at the first backend's, heads below the lowest of them."""
    key = []
    for i, (backend, found) in enumerate(pairs.items()):
        color = backend_color(backend)
        key += ax.plot([], [], marker="o", markersize=6, color=color, label=backend)
        for (_, batch), (one, two) in found.items():
            ax.plot([one.intensity, two.intensity], [one.tflops, two.tflops], color=color, linewidth=1.6, zorder=3)
            ax.plot(one.intensity, one.tflops, marker="o", markersize=6, markerfacecolor="white", color=color, zorder=4)
            ax.plot(two.intensity, two.tflops, marker="o", markersize=6, color=color, zorder=4)
            if i == 0:
                name = ax.annotate(f"{batch}", (one.intensity, one.tflops), (-7, 0), textcoords="offset points",
                                   ha="right", va="center", fontsize=8.5, color=SOFT, zorder=5)  # fmt: skip
                halo(name)
    lowest: dict[int, Point] = {}
    for found in pairs.values():
        for (heads, _), (one, _two) in found.items():
            if heads not in lowest or one.tflops < lowest[heads].tflops:
                lowest[heads] = one
    for heads, point in lowest.items():
        ax.annotate(f"{heads} heads", (point.intensity, point.tflops), (0, -9), textcoords="offset points", ha="left",
                    va="top", fontsize=9)  # fmt: skip
    for name, fill in (("one new token", "white"), ("two", SOFT)):
        key += ax.plot([], [], marker="o", markersize=6, markerfacecolor=fill, color=SOFT, linestyle="none", label=name)
    ax.legend(handles=key, loc="lower right")
