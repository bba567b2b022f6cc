"""A page with sliders over a grid of step times: frontiers of other exchanges, KV lengths and acceptances at once.

Everything is in the page: it needs neither a kernel nor a network, so it moves in JupyterLab as in a rendered report.
Where scripts may not run (a notebook that is not trusted) it says so instead of standing there dead.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from string import Template

from moelab.config import ConfigError
from moelab.plots.style import ep_color

PAGE = Path(__file__).with_name("explorer.html")


def explorer(grid: Mapping, exchange: int = 0, kv_len: int | None = None, drafts: int | None = None,
             acceptance: float = 0.6, min_speed: float = 40.0):  # fmt: skip
    """`grid`: of `moelab.perf.grid.step_grid`. The rest is where the controls stand at first. Returns an HTML object.

    Raises ConfigError for a start that the grid does not hold."""
    from IPython.display import HTML
    from matplotlib.colors import to_hex

    kv_len, drafts = (grid[k][-1] if v is None else v for k, v in (("kv_lens", kv_len), ("drafts", drafts)))
    for name, value, legal in (("kv_len", kv_len, grid["kv_lens"]), ("drafts", drafts, grid["drafts"]),
                               ("exchange", exchange, range(len(grid["exchanges"])))):  # fmt: skip
        if value not in legal:
            raise ConfigError(f"{name} is {value}, the grid has {', '.join(map(str, legal))}")
    start = {"exchange": exchange, "kv": grid["kv_lens"].index(kv_len), "draft": grid["drafts"].index(drafts),
             "acceptance": acceptance, "speed": min_speed}  # fmt: skip
    colors = {ep: to_hex(ep_color(ep)) for ep in grid["gpus"]}
    data = json.dumps({**grid, "colors": colors, "start": start}, separators=(",", ":"))
    page = Template(PAGE.read_text(encoding="utf-8"))
    return HTML(page.substitute(id=f"explorer-{uuid.uuid4().hex[:8]}", data=data))
