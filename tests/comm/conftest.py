"""One pool of ranks of each kind for the whole session; `pool` runs a test on each kind."""

from __future__ import annotations

import pytest
import torch

from tests.comm.pool import ProcessPool, ThreadPool

GPUS = torch.cuda.device_count()


@pytest.fixture(scope="session")
def virtual_pool():
    pool = ThreadPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def gloo_pool(tmp_path_factory):
    pool = ProcessPool("gloo", 8, (1, 2, 4, 8), str(tmp_path_factory.mktemp("gloo")))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def nccl_pool(tmp_path_factory):
    if GPUS < 2:
        pytest.skip(f"NCCL needs a GPU for each of at least 2 ranks; {GPUS} here")
    # An exchange over NCCL takes the whole world, so there are no smaller groups.
    size = 1 << (min(GPUS, 8).bit_length() - 1)
    pool = ProcessPool("nccl", size, (size,), str(tmp_path_factory.mktemp("nccl")))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def gloo_cuda_pool(tmp_path_factory):
    if not GPUS:
        pytest.skip("staging through the host needs a GPU; none here")
    pool = ProcessPool("gloo-cuda", 4, (1, 2, 4), str(tmp_path_factory.mktemp("gloo_cuda")))
    yield pool
    pool.stop()


@pytest.fixture(
    params=[
        "virtual",
        "gloo",
        pytest.param("nccl", marks=pytest.mark.gpu),
        pytest.param("gloo_cuda", marks=pytest.mark.gpu),
    ]
)
def pool(request):
    return request.getfixturevalue(f"{request.param}_pool")
