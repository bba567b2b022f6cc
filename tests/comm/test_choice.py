"""What `default_group` takes, and under which budget of multiprocessors."""

from __future__ import annotations

import pytest

from moelab.comm import Nvshmem, choice
from moelab.comm.choice import default_group
from moelab.comm.virtual import VirtualRank
from moelab.config import ConfigError


@pytest.fixture
def kernels(monkeypatch):
    """As if ours could run here."""
    monkeypatch.setattr(choice, "unavailable_nvshmem", lambda: None)
    monkeypatch.setattr(choice.build, "unavailable", lambda: None)
    monkeypatch.setattr(choice, "load", lambda: "library")


def test_a_block_is_on_one_multiprocessor_at_most(kernels):
    assert default_group(8, "cuda") == Nvshmem(returns="bf16")
    assert default_group(8, "cuda:1", 24) == Nvshmem(returns="bf16", num_blocks=24)
    alone = default_group(1, "cuda", 24)
    assert alone.num_blocks == 24 and alone.returns == "rows" and alone.group.world.library == "library"
    assert isinstance(default_group(1, "cuda"), VirtualRank)
    with pytest.raises(ConfigError, match="num_blocks is -2"):
        default_group(8, "cuda", -2)


@pytest.mark.parametrize(("ep", "device"), [(1, "cpu"), (2, "cpu"), (1, "cuda"), (2, "cuda")])
def test_what_keeps_to_no_budget_says_so(monkeypatch, ep, device):
    monkeypatch.setattr(choice, "unavailable_nvshmem", lambda: "no NVSHMEM")
    monkeypatch.setattr(choice.build, "unavailable", lambda: "no compiler")
    why = {"cpu": "a CPU have none"}.get(device) or {1: "no compiler", 2: "no NVSHMEM"}[ep]
    with pytest.raises(ConfigError, match=f"num_sms is 24, which only our kernels.*{why}; or give 0"):
        default_group(ep, device, 24)
    assert default_group(2, device) is None and default_group(1, device).world.library is None
