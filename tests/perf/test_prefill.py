"""Prefill: FLOP by hand where it is bound by them, what chunks cost, and its limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.config import ConfigError
from moelab.perf.prefill import ATTENTION_SHARE, prefill
from moelab.perf.tables import NOTHING_RECORDED


def run(*arguments, **options):
    return prefill(*arguments, tables=NOTHING_RECORDED, **options)


def test_attention_by_hand():
    p = run("h100", 32, prompt_len=8000)
    pairs = 8000 * 8000 / 2
    assert p.layer_us["attention"] == pytest.approx(2 * pairs * 128 * (192 + 128) / (ATTENTION_SHARE * 989e6))
    cut = run("h100", 8, 4, prompt_len=8000)
    assert cut.layer_us["attention"] == pytest.approx(p.layer_us["attention"] / 4)


def test_rates_are_between_the_roofline_and_half_of_what_was_published():
    """LMSYS (2025-05-05) reports 52-59 thousand tokens a second and node for EP32 of H100 with prompts of 4k."""
    p = run("h100", 32, prompt_len=4096, prompts=4)
    node = 8 * p.tok_s_per_gpu
    assert 40_000 < node < 110_000
    peak = 8 * 1979e12 / (2 * 37e9)
    assert node < peak


def test_passes_and_chunks():
    whole, chunked = run("h100", 32, prompt_len=8192), run("h100", 32, prompt_len=8192, chunk=2048)
    assert (whole.passes, chunked.passes) == (1, 4) and chunked.tokens == 2048
    assert chunked.ttft_ms > whole.ttft_ms  # every chunk expands all that came before it
    assert whole.ttft_ms == whole.pass_ms and chunked.pass_ms == pytest.approx(chunked.ttft_ms / 4)
    assert whole.interval[0] < whole.ttft_ms < whole.interval[1]
    assert whole.tok_s_per_gpu == pytest.approx(8192e3 / whole.ttft_ms)


@settings(max_examples=20)
@given(st.sampled_from(["h100", "h200", "h800"]), st.integers(1, 30_000), st.sampled_from([8, 32, 64]))
def test_longer_prompts_take_longer(name, length, ep):
    short, long = run(name, ep, prompt_len=length), run(name, ep, prompt_len=2 * length)
    assert 0 < short.ttft_ms < long.ttft_ms
    hidden, shown = (run(name, ep, prompt_len=length, overlap=o).layer_us for o in (True, False))
    assert shown["total"] == pytest.approx(shown["compute"] + shown["exchange"])
    assert hidden["total"] <= shown["total"] * 1.25


def test_experts_cut_by_tp_read_all_weights():
    p = run("h200", 1, 8, ep=1, prompt_len=922)
    assert 25 < p.ttft_ms < 90  # 84 GB of experts on each GPU alone take 17 ms


def test_impossible_prompts():
    with pytest.raises(ConfigError, match="prompt_len 0"):
        run("h100", 32, prompt_len=0)
    with pytest.raises(ConfigError, match="chunk 0"):
        run("h100", 32, prompt_len=10, chunk=0)
