"""The study's claims on made-up sweeps: verdicts follow from numbers, and a false statement is seen as false."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from moelab.config import ConfigError
from moelab.perf import claims, grid, predict
from moelab.perf.sweeps import STUDY_BATCHES, STUDY_TP, frontier, sweep
from moelab.perf.tables import NOTHING_RECORDED


def made_up(speed_of, largest=lambda ep: 95 if ep == 8 else 200) -> pd.DataFrame:
    """A sweep whose speed is what `speed_of(ep, tp, batch)` says, each known to 10 % either way."""
    rows = []
    for ep in (8, 16, 32, 64, 128):
        for tp in STUDY_TP:
            for batch in STUDY_BATCHES:
                speed = speed_of(ep, tp, batch)
                step = 1600 / speed
                rows.append({
                    "ep": ep, "tp": tp, "batch": float(batch), "step_ms": step, "step_low": step / 1.1,
                    "step_high": step * 1.1, "tok_s_per_request": speed, "tok_s_per_node": 8 * batch / tp * speed,
                    "largest_batch": largest(ep), "fits": batch <= largest(ep), "layer_MLA": float(batch),
                })  # fmt: skip
    return pd.DataFrame(rows)


def made_up_gains(by_batch: dict[int, float]) -> pd.DataFrame:
    return pd.DataFrame([{"ep": 128, "batch": float(b), "gain": g} for b, g in by_batch.items()])


def as_the_study_says(ep, tp, batch):
    """Fast where EP or TP is large; one node falls with the batch, EP128 does not below 64."""
    fast = {8: 40, 16: 42, 32: 50, 64: 56, 128: 90}[ep] * (1 + 0.3 * math.log2(tp) * (2.2 if ep == 8 else 0.5))
    half = {8: 8, 16: 20, 32: 40, 64: 100, 128: 1000}[ep]
    return fast / (1 + batch / half) ** (0.35 if ep == 8 else 0.6)


GAINS = {4: -0.38, 8: -0.3, 16: -0.06, 32: 0.11, 64: 0.3, 128: 0.34}


def verdicts(frame, gains) -> dict[str, str]:
    return {s.text: s.verdict for s in claims.claims(frame, made_up_gains(gains))}


def found(by_text: dict[str, str], start: str) -> str:
    (verdict,) = [verdict for text, verdict in by_text.items() if text.startswith(start)]
    return verdict


def test_what_the_study_says_holds_where_it_is_so():
    now = verdicts(made_up(as_the_study_says), GAINS)
    for start in ("EP8 DP1 TP8, batch 1", "and the node's throughput", "EP128 serves more", "EP16 < EP32",
                  "the same order in the most", "EP128's speed hardly", "EP8 cannot reach batch 128",
                  "so the most that a node serves", "micro-batches gain over"):  # fmt: skip
        assert found(now, start) == "holds", start
    gains = [v for text, v in now.items() if text.startswith("micro-batches'")]
    assert gains == ["holds"] * 4


@pytest.mark.parametrize(
    ("start", "speed_of", "gains"),
    [
        ("EP8 DP1 TP8, batch 1", lambda ep, tp, b: 60.0, GAINS),
        ("the fastest request", lambda ep, tp, b: 50.0 + ep, GAINS),
        ("EP16 < EP32", lambda ep, tp, b: 200.0 - ep - b / 10, GAINS),
        ("the same order in the most", lambda ep, tp, b: 200.0 - ep, GAINS),
        ("the same order in the fastest", lambda ep, tp, b: 200.0 - ep, GAINS),
        ("EP128's speed hardly", lambda ep, tp, b: 100.0 / b, GAINS),
        ("at batch 64 one node", lambda ep, tp, b: 10.0 + ep, GAINS),
        ("micro-batches gain over", as_the_study_says, {**GAINS, 64: -0.1}),
        ("micro-batches' gain below batch 32, the least", as_the_study_says, {**GAINS, 4: -0.6}),
        ("micro-batches' gain from batch 32 on, the least", as_the_study_says, {**GAINS, 32: 0.01}),
    ],
)
def test_what_is_not_so_is_seen(start, speed_of, gains):
    assert found(verdicts(made_up(speed_of), gains), start) == "differs"


def test_within_the_error_it_depends():
    now = verdicts(made_up(lambda ep, tp, b: 95.0 if ep == 8 else 97.0), GAINS)
    assert found(now, "EP8 DP1 TP8, batch 1") == "depends"  # 95 tok/s, 80 % up to 104.5
    assert found(now, "at batch 64 one node") == "depends"  # 0.98, +- 14 %
    fits = verdicts(made_up(as_the_study_says, largest=lambda ep: 200), GAINS)
    assert found(fits, "EP8 cannot reach") == "differs"


def test_gains_are_the_time_saved():
    gains = claims.overlap_gains((128,), batch=[4, 128], tables=NOTHING_RECORDED).set_index("batch")
    steps = {
        overlap: predict("h100", 128, batch=128, kv_len=5000, draft_tokens=1, acceptance=0.6, overlap=overlap,
                         alltoall="pplx-2025", tables=NOTHING_RECORDED).step_ms
        for overlap in ("dispatch", "microbatch")
    }  # fmt: skip
    assert gains["gain"][128] == pytest.approx(1 - steps["microbatch"] / steps["dispatch"])
    assert gains["gain"][4] < 0 < gains["gain"][128]


def test_a_grid_is_the_sweep():
    """Step times, what fits and frontiers are those of `sweep`, which takes another way."""
    found = grid.step_grid(["deepep/ib400", "deepep/ib800"], [2000], [0, 1], gpus={8: "h200", 16: "h100"}, tps=[1, 8],
                           batches=[2, 128], tables=NOTHING_RECORDED)  # fmt: skip
    assert found["points"] == [(e, t, b) for e in (8, 16) for t in (1, 8) for b in (2, 128)]
    same = sweep("h100", ep=16, tp=[1, 8], batch=[2, 128], kv_len=2000, draft_tokens=1, acceptance=0.7, fabric="ib800",
                 tables=NOTHING_RECORDED)  # fmt: skip
    assert found["step"][1][1][0][4:] == pytest.approx(list(same["step_ms"]), abs=1e-3)
    assert found["largest"][1][1][0][4:] == list(same["largest_batch"])
    assert found["step"][0][1][0][:4] == found["step"][1][1][0][:4]  # one node has no NIC to go through
    edge = grid.grid_frontiers(found, 1, 1, 0, 0.7)[16]
    expected = frontier(same)[["tok_s_per_request", "tok_s_per_node"]].to_numpy()
    assert [x for point in edge for x in point] == pytest.approx(list(expected.ravel()), rel=1e-4)


@pytest.mark.parametrize(
    ("exchanges", "kv_lens", "message"),
    [(["deepep"], [1000], "'deepep' has no fabric"), ([], [1000], "exchanges, kv_lens and drafts"),
     (["deepep/wire"], [1000], "wire")],
)  # fmt: skip
def test_a_grid_refuses(exchanges, kv_lens, message):
    with pytest.raises(ConfigError, match=message):
        grid.step_grid(exchanges, kv_lens, [0], gpus={16: "h100"}, tables=NOTHING_RECORDED)
