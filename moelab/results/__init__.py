"""Measured numbers with their provenance: `Record`, the JSONL `Store`, published tables beside it. No torch."""

from __future__ import annotations

from moelab.results.provenance import Provenance, collect
from moelab.results.published import PublishedError
from moelab.results.record import Record, RecordError
from moelab.results.store import Damage, Entry, Store, StoreError

__all__ = [
    "Damage",
    "Entry",
    "Provenance",
    "PublishedError",
    "Record",
    "RecordError",
    "Store",
    "StoreError",
    "collect",
]
