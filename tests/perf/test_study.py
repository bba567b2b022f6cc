"""The study's statements: every number is in its table, every verdict can change."""

from __future__ import annotations

import pytest

from moelab.perf import study


def test_numbers_come_from_the_table():
    assert study.number("model", "KV cache per token") == 70_272
    assert study.number("layer breakdown", "Dispatch", ep=128, mode="MicroBatch") == 367
    with pytest.raises(KeyError, match="0 values"):
        study.number("model", "no such quantity")
    with pytest.raises(KeyError, match="5 values"):
        study.number("sweep", "EP value swept")


def test_verdicts():
    found = {s.text: s for s in study.statements()}
    assert len(found) == len(study.statements())
    kv = found["KV cache per token"]
    assert (kv.study, kv.ours, kv.verdict) == (70_272, 70_272, "holds")
    fits = found["requests of 5,000 tokens per GPU"]
    assert (fits.study, fits.ours, fits.verdict) == (100, 81, "depends")
    assert "109" in fits.note and "105" in fits.note
    for ep, ours, said in ((8, 64, 128), (128, 1024, 2048)):
        rows = found[f"EP{ep}, batch 128: tokens per expert"]
        assert (rows.study, rows.ours, rows.verdict) == (said, ours, "differs")
    assert found["EP8 → EP128 GroupGEMM, like for like"].ours == 206  # check 14
    assert found["share of InfiniBand reached"].ours == pytest.approx(48, abs=0.1)
    assert {s.verdict for s in found.values()} == {"holds", "depends", "differs", "open"}
    assert all((s.ours is None) == (s.verdict == "open") for s in found.values())
    assert all(s.verdict != "differs" or s.note for s in found.values())


def test_a_wrong_number_is_noticed(monkeypatch):
    real = study.number
    monkeypatch.setattr(study, "number", lambda *a, **k: 1.2 * real(*a, **k))
    found = {s.text: s.verdict for s in study.statements()}
    for text in ("parameters in all", "KV cache per token", "EP8 DP8 TP1: weights per GPU", "DispatchOverlap saves"):
        assert found[text] == "differs"
