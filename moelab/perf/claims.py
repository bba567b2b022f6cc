"""What the study says of whole deployments, checked against a sweep of them: the statements that need times.

`frame` is a `study_sweep`, `gains` an `overlap_gains`, of whichever exchange is asked about. Verdicts follow from
numbers, as in `moelab.perf.study` (which has the statements that need none):

    holds      ours is as the study says, within its tolerance
    depends    for a part of the range, or the study's number lies within the model's 80 %; the note says which
    differs    neither

The 80 % of a quotient of two predictions is put together as if their errors were independent. Most are not (the same
tables, the same laws), so the true range is narrower.

Source: "Lower latency and higher throughput with multi-node DeepSeek deployment", 2025-04-18.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moelab.perf.study import DEPENDS, DIFFERS, HOLDS, Statement, number
from moelab.perf.sweeps import STUDY_BATCHES, STUDY_GPUS, frontier, sweep, throughput_at

if TYPE_CHECKING:
    import pandas as pd


def claims(frame: pd.DataFrame, gains: pd.DataFrame) -> list[Statement]:
    """All of them, in the study's order. `frame` has to hold EP8 to EP128, `gains` EP128."""
    return [*_one_node(frame), *_ratio(frame), *_order(frame), *_flat(frame), *_large(frame), *_overlap(gains)]


def overlap_gains(ep: tuple[int, ...] = (16, 32, 64, 128), **settings) -> pd.DataFrame:
    """What micro-batches bring over dispatch overlap: step_ms of both, and `gain`, the part of the time that they save
    (negative: they cost), by ep and batch, TP1. `settings` are those of `study_sweep`."""
    import pandas as pd

    given = {"batch": list(STUDY_BATCHES), "kv_len": 5000, "draft_tokens": 1, "acceptance": 0.6,
             "alltoall": "pplx-2025"} | settings  # fmt: skip
    both = [sweep(STUDY_GPUS[n], ep=n, overlap=["dispatch", "microbatch"], **given) for n in ep]
    steps = pd.concat(both).pivot(index=["ep", "batch"], columns="overlap", values="step_ms").reset_index()
    return steps.assign(gain=1 - steps["microbatch"] / steps["dispatch"])


def ratio_range(first: pd.Series, second: pd.Series) -> tuple[float, float]:
    """80 % of the quotient of two rows' throughputs (or speeds), as factors on it."""
    ups = [math.log(row["step_ms"] / row["step_low"]) for row in (first, second)]
    downs = [math.log(row["step_high"] / row["step_ms"]) for row in (first, second)]
    return math.exp(-math.hypot(downs[0], ups[1])), math.exp(math.hypot(ups[0], downs[1]))


def _verdict(ok: bool, within: bool = False) -> str:
    return HOLDS if ok else DEPENDS if within else DIFFERS


def _of(frame: pd.DataFrame, **setting) -> pd.DataFrame:
    for column, value in setting.items():
        frame = frame[frame[column] == value]
    return frame


def _one_node(frame: pd.DataFrame) -> list[Statement]:
    said = number("pareto", "output speed per request", ep=8)
    row = _of(frame, ep=8, tp=8, batch=1).iloc[0]
    speed = row["tok_s_per_request"]
    low, high = (speed * row["step_ms"] / row[name] for name in ("step_high", "step_low"))
    fastest = {ep: _of(frame, ep=ep, fits=True)["tok_s_per_request"].max() for ep in (8, 128)}
    lead = fastest[8] / fastest[128]
    return [
        Statement("EP8 DP1 TP8, batch 1: a request's speed is over", said, speed, "tok/s",
                  _verdict(speed > said, high > said), f"80 %: {low:.0f}–{high:.0f}"),
        Statement("and the node's throughput equals it, so their quotient is", 1, row["tok_s_per_node"] / speed, "×",
                  _verdict(math.isclose(row["tok_s_per_node"], speed)), "one group, one request"),
        Statement("the fastest request: EP8 / EP128, over", 1, lead, "×", _verdict(lead > 1),
                  f"{fastest[8]:.0f} and {fastest[128]:.0f} tok/s, both TP8 and batch 1"),
    ]  # fmt: skip


def _ratio(frame: pd.DataFrame) -> list[Statement]:
    said = number("pareto", "throughput ratio EP128 / EP8")
    start, end = (int(number("pareto", f"{which} end of that speed range")) for which in ("lower", "upper"))
    one, many = _of(frame, ep=8), _of(frame, ep=128)
    at = {speed: throughput_at(many, speed) / throughput_at(one, speed) if throughput_at(one, speed) else math.nan
          for speed in range(start, end + 1)}  # fmt: skip
    best = max(at, key=lambda speed: at[speed] if at[speed] == at[speed] else 0)
    shown = ", ".join(f"{speed}: {at[speed]:.1f}×" for speed in range(start, end + 1, 10))
    near = [speed for speed, ratio in at.items() if ratio >= 0.8 * said]
    end_row = frontier(many).iloc[-1]
    reach = end_row["tok_s_per_request"] * end_row["step_ms"] / end_row["step_low"]
    share = 100 * sum(ratio > 1 for ratio in at.values()) / len(at)
    return [
        Statement(f"EP128 / EP8 throughput at {start}–{end} tok/s, about", said, at[best], "×",
                  _verdict(abs(at[best] / said - 1) <= 0.2 and len(near) == len(at), bool(near)),
                  f"the most, at {best} tok/s; {shown}"),
        Statement(f"EP128 serves more than EP8, part of {start}–{end} tok/s", 100, share, "%",
                  _verdict(share >= 95, reach >= end),
                  f"EP128's fastest request: {end_row['tok_s_per_request']:.0f} tok/s, at the upper end of 80 % "
                  f"{reach:.0f}"),
    ]  # fmt: skip


def _order(frame: pd.DataFrame) -> list[Statement]:
    eps = (16, 32, 64, 128)
    edges = {ep: frontier(_of(frame, ep=ep)) for ep in eps}
    ends = {ep: edge["tok_s_per_request"].max() for ep, edge in edges.items()}
    tops = {ep: edge["tok_s_per_node"].max() for ep, edge in edges.items()}
    first = int(min(edge["tok_s_per_request"].min() for edge in edges.values()))
    speeds = range(first, int(min(ends.values())) + 1)
    served = {speed: [throughput_at(edges[ep], speed) for ep in eps] for speed in speeds}
    good = [speed for speed, values in served.items() if values == sorted(set(values))]
    share = 100 * len(good) / len(speeds)
    broken = sorted(set(speeds) - set(good))
    sorted_tops, sorted_ends = (list(x.values()) == sorted(set(x.values())) for x in (tops, ends))
    return [
        Statement(f"EP16 < EP32 < EP64 < EP128 in throughput, of {first}–{speeds[-1]} tok/s", 100, share, "%",
                  _verdict(not broken, share >= 50),
                  f"not at {broken[0]}–{broken[-1]} tok/s" if broken else "everywhere that all four reach"),
        Statement("the same order in the most that a node serves: EP128 / EP16, over", 1, tops[128] / tops[16], "×",
                  _verdict(sorted_tops, tops[128] > tops[16]), _list(tops, "tok/s")),
        Statement("the same order in the fastest request: EP128 / EP16, over", 1, ends[128] / ends[16], "×",
                  _verdict(sorted_ends, ends[128] > ends[16]), _list(ends, "tok/s")),
    ]  # fmt: skip


def _list(values: dict[int, float], unit: str) -> str:
    return ", ".join(f"EP{ep} {value:,.0f}" for ep, value in values.items()) + f" {unit}"


def _flat(frame: pd.DataFrame) -> list[Statement]:
    limit = number("pareto", "batch below which")
    last = max(batch for batch in STUDY_BATCHES if batch < limit)
    rows = {(ep, b): _of(frame, ep=ep, tp=1, batch=b).iloc[0] for ep in (8, 128) for b in (1, last)}
    kept = {ep: 100 * rows[ep, 1]["step_ms"] / rows[ep, last]["step_ms"] for ep in (8, 128)}
    attention = rows[128, last]["layer_MLA"] - rows[128, 1]["layer_MLA"]
    return [
        Statement(f"EP128's speed hardly changes below batch {limit:.0f}: kept from batch 1 to {last}, TP1", 100,
                  kept[128], "%", _verdict(kept[128] >= 90, kept[128] > kept[8] + 15),
                  f"EP8 keeps {kept[8]:.0f} %; attention alone, whose cache grows with the batch at any EP, adds "
                  f"{attention:.0f} µs to a layer"),
    ]  # fmt: skip


def _large(frame: pd.DataFrame) -> list[Statement]:
    said = int(number("pareto", "batch from which one node"))
    one, many = (_of(frame, ep=ep, tp=1, batch=said).iloc[0] for ep in (8, 128))
    lead = one["tok_s_per_node"] / many["tok_s_per_node"]
    low, high = (lead * f for f in ratio_range(one, many))
    cannot = number("memory", "batch that does not fit")
    most = {ep: frontier(_of(frame, ep=ep))["tok_s_per_node"].max() for ep in (8, 128)}
    return [
        Statement(f"at batch {said} one node is slightly ahead: EP8 / EP128 throughput, over", 1, lead, "×",
                  _verdict(lead > 1, high > 1),
                  f"80 %: {low:.2f}–{high:.2f}" + ("" if one["fits"] and many["fits"] else "; but does not fit")),
        Statement(f"EP8 cannot reach batch {cannot:.0f}: it holds", cannot, one["largest_batch"], "requests",
                  _verdict(one["largest_batch"] < cannot), "fewer than the study's number"),
        Statement("so the most that a node serves is multi-node's: EP128 / EP8, over", 1, most[128] / most[8], "×",
                  _verdict(most[128] > most[8]), _list(most, "tok/s")),
    ]  # fmt: skip


def _overlap(gains: pd.DataFrame) -> list[Statement]:
    said = number("overlap", "batch from which")
    smallest = number("overlap", "smallest batch in the MicroBatch figure")
    at = _of(gains, ep=128).set_index("batch")["gain"] * 100
    at = at[at.index >= smallest]
    crossing = next((batch for batch in at.index if (at[at.index >= batch] > 0).all()), math.inf)
    shown = ", ".join(f"{batch:g}: {gain:+.0f} %" for batch, gain in at.items())
    found = [Statement("micro-batches gain over dispatch overlap from batch", said, crossing, "requests",
                       _verdict(crossing == said), f"EP128, TP1; {shown}")]  # fmt: skip
    for text, part, (low, high) in (
        (f"below batch {said:.0f}", at[at.index < said], (-40, -5)),
        (f"from batch {said:.0f} on", at[at.index >= said], (10, 35)),
    ):
        for which, value, study in (("least", part.min(), low), ("most", part.max(), high)):
            inside = low <= value <= high
            found.append(
                Statement(f"micro-batches' gain {text}, the {which}", study, value, "%",
                          _verdict(inside, low - 5 <= value <= high + 5),
                          f"the study: {low} to {high} %, here read as time saved")
            )  # fmt: skip
    return found
