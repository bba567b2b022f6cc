"""What construction refuses, and the layouts that follow from the spec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.comm.layout import (
    dequantize_rows,
    empty_scales,
    grouped_layout,
    is_power_of_two,
    pack_ue8m0,
    segment_starts,
    unpack_ue8m0,
    write_scales,
)
from moelab.comm.spec import ExchangeSpec
from moelab.config import ConfigError, ParallelConfig

GOOD = dict(num_experts=16, top_k=4, hidden=256, max_tokens=8)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            dict(num_experts=18),
            r"num_experts is 18, which does not divide over ep = 4 ranks.*\[1, 2, 3, 6, 9, 18\]",
        ),
        (dict(top_k=17), "top_k is 17: legal are 1…16"),
        (dict(top_k=0), "top_k is 0: give a positive integer"),
        (dict(max_tokens=2.0), "max_tokens is 2.0"),
        (dict(slots=0), "slots is 0"),
        (
            dict(hidden=250),
            "hidden is 250: a bf16 row must be a multiple of 16 bytes, so hidden a multiple of 8",
        ),
        (dict(hidden=24, payload="fp8"), "hidden a multiple of 16"),
        (dict(payload="fp16"), "payload is 'fp16': legal are 'bf16', 'fp8', 'f32'"),
        (dict(layout="padded"), "layout is 'padded': legal are 'expert_padded', 'contiguous_128'"),
        (dict(scales="ue8m0"), "scales is 'ue8m0' but a bf16 payload has none"),
    ],
)
def test_illegal_specs_say_what_is_legal(change, words):
    with pytest.raises(ConfigError, match=words):
        ExchangeSpec(ParallelConfig(dp=2, tp=2), **GOOD | change)


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    top_k=st.integers(1, 16),
    data=st.data(),
)
def test_segments_are_aligned_disjoint_and_fit(counts, top_k, data):
    local = len(counts)
    # A batch that can produce these counts: no expert has more than dp·M rows, no token more than min(K, L) rows.
    top_k = min(top_k, local)
    rows = max(max(counts), -(-sum(counts) // top_k), 1) + data.draw(st.integers(0, 50))
    spec = ExchangeSpec(ParallelConfig(), local, top_k, 64, rows, layout="contiguous_128")
    counts = torch.tensor(counts, dtype=torch.int32)
    starts = segment_starts(counts)
    assert starts.dtype == torch.int32 and not (starts % 128).any()
    assert spec.capacity % 128 == 0 and int((starts + counts).max()) <= spec.capacity
    layout = grouped_layout(counts, spec.capacity)
    assert torch.equal(torch.bincount(layout[layout >= 0], minlength=local), counts.long())
    for e, (start, n) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        assert (layout[start : start + n] == e).all()


@pytest.mark.parametrize("hidden", [128, 144, 640, 7168])
@pytest.mark.parametrize("layout", ["expert_padded", "contiguous_128"])
def test_scale_formats_have_the_strides_that_tma_wants(hidden, layout):
    def spec(scales):
        return ExchangeSpec(ParallelConfig(dp=3), 6, 2, hidden, 3, "fp8", layout=layout, scales=scales)

    s, packed = (hidden + 127) // 128, (hidden + 511) // 512
    rows = spec("row").rows_shape[-2]
    aligned = -(-rows // 4) * 4
    row = empty_scales(spec("row"), torch.device("cpu"))
    column = empty_scales(spec("column_tma"), torch.device("cpu"))
    ue8m0 = empty_scales(spec("ue8m0"), torch.device("cpu"))
    assert row.shape == column.shape == (*spec("row").rows_shape[:-1], s) and row.is_contiguous()
    assert ue8m0.shape == (*row.shape[:-1], packed) and ue8m0.dtype == torch.int32
    for t, columns in ((column, s), (ue8m0, packed)):
        assert t.stride()[-2:] == (1, aligned)
        if layout == "expert_padded":
            assert t.stride(0) == columns * aligned

    # Written row by row in any order, all three dequantise to the same values.
    n = row.shape[:-1].numel()
    where = torch.randperm(n)[: n // 2]
    scales = torch.exp2(torch.randint(-20, 20, (len(where), s)).float())
    rows8 = torch.randn(*spec("row").rows_shape).to(torch.float8_e4m3fn)
    values = []
    for out, name in ((row, "row"), (column, "column_tma"), (ue8m0, "ue8m0")):
        write_scales(out, where, scales, spec(name))
        values.append(dequantize_rows(rows8, out, spec(name)).view(n, hidden)[where])
    want = rows8.view(n, hidden)[where].float() * scales.repeat_interleave(128, 1)[:, :hidden]
    assert all(torch.equal(v, want) for v in values)


@given(st.lists(st.integers(-126, 127), min_size=1, max_size=9))
def test_ue8m0_round_trip(exponents):
    scales = torch.exp2(torch.tensor([exponents]).double()).float()
    assert is_power_of_two(scales).all()
    packed = pack_ue8m0(scales)
    assert packed.shape == (1, -(-len(exponents) // 4)) and packed.dtype == torch.int32
    assert int(packed[0, 0]) & 255 == exponents[0] + 127  # the first in the lowest byte
    assert torch.equal(unpack_ue8m0(packed, len(exponents)), scales)


def test_what_ue8m0_cannot_hold():
    bad = torch.tensor([0.0, -0.0, -2.0, 3.0, 1.5, torch.inf, torch.nan, 2.0**-127, 1e-45])
    assert not is_power_of_two(bad).any()
