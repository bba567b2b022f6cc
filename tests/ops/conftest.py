"""Kernel tests run twice: on a GPU, and on the CPU under Triton's interpreter.

A test that takes the fixture `device` gets "cuda" (marked gpu) and "cpu" (marked interpreted). Kernels are interpreted
only if TRITON_INTERPRET=1 stood in the environment before their modules were imported, and every other test must meet
the package without it; so `test_interpreted.py` runs the interpreted ones in a process of their own, and elsewhere they
are deselected.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config, items):
    dropped = [item for item in items if (item.get_closest_marker("interpreted") is not None) and not INTERPRETING]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.interpreted)]
)
def device(request):
    """A device whose tensors go to the Triton kernels."""
    return request.getfixturevalue("gpu") if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; none here")
    return torch.device("cuda")
