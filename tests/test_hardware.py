from __future__ import annotations

import pytest

from moelab import hardware
from moelab.config import ConfigError

FACTS = [*hardware.gpus(), *hardware.fabrics(), *hardware.nodes()]


@pytest.mark.parametrize("fact", FACTS, ids=lambda x: x.name)
def test_every_fact_has_a_source(fact):
    assert len(fact.source) > 8


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "H200"), ("h200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H800", "H800"),
        ("NVIDIA GB200", "GB200"),
    ],
)  # fmt: skip
def test_a_gpu_is_found_by_the_drivers_name(name, short):
    assert hardware.gpu(name).name == short


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB", ""])
def test_a_card_with_other_peaks_is_refused(name):
    with pytest.raises(ConfigError, match="known: H100, H200, H800, GB200"):
        hardware.gpu(name)


def test_an_unknown_name_gets_a_close_match():
    with pytest.raises(ConfigError, match="did you mean hgx-h100"):
        hardware.node("hgxh100")
    with pytest.raises(ConfigError, match="did you mean cx7-400g.*nvlink4"):
        hardware.fabric("cx7")


def test_ridge_points_of_the_study():
    """FLOP per byte where BF16 compute and memory meet: 295 on H100, 206 on H200."""
    ridge = {g.name: g.bf16_tflops * 1e3 / g.hbm_gb_s for g in hardware.gpus()}
    assert round(ridge["H100"]) == 295 and round(ridge["H200"]) == 206


def test_wire_floor_of_the_study():
    """256 tokens, 8 copies of 7,408 bytes: 29.5 us over NVLink at EP8, 284.5 us over the NIC at EP128."""
    sent = 256 * 59_264
    assert sent * 7 / 8 / hardware.fabric("nvlink4").gb_s / 1e3 == pytest.approx(29.5, abs=0.1)
    assert sent * 15 / 16 / hardware.fabric("cx7-400g").gb_s / 1e3 == pytest.approx(284.5, abs=0.1)
