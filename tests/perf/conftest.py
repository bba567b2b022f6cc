"""A generator of its own for each test."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from tests.conftest import SEED


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()) + SEED)
