"""Measured numbers with their provenance: `Record`, the JSONL `Store`, published tables beside it. No torch."""

from __future__ import annotations

from .provenance import Provenance, collect
from .published import PublishedError
from .record import Record, RecordError
from .store import Damage, Entry, Store, StoreError

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
