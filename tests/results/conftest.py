from __future__ import annotations

import pytest

from moelab.results import Provenance, Record

CLEAN, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def make():
    """A legal record; keyword arguments replace fields."""

    def build(**fields) -> Record:
        where = Provenance(
            gpu="NVIDIA H200",
            gpu_count=2,
            driver="580.159",
            versions={"torch": "2.11.0"},
            commit=CLEAN,
            dirty=False,
        )
        samples = fields.pop("samples", [3.0, 1.0, 2.0])
        base = Record.from_samples(
            samples,
            bench="alltoall",
            backend="nvshmem",
            params={"tokens": 128, "hidden": 7168},
            metric="dispatch",
            unit="us",
            clock="graph",
            provenance=where,
            seed=7,
            time="2026-01-01T00:00:00Z",
        )
        return Record(**(base.to_dict() | fields))

    return build
