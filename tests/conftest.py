"""Seeds, pools of ranks, and small checkpoints with the oracle that made them."""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from hypothesis import settings

from moelab.comm import AllToAll
from moelab.comm.library import load
from tests.pool import Pool, ProcessPool, ThreadPool, moves_by_kernels

settings.register_profile("moelab", deadline=None, max_examples=50)
settings.load_profile("moelab")

# Every test draws its own inputs, the same on every run; MOELAB_TEST_SEED=n draws others.
SEED = int(os.environ.get("MOELAB_TEST_SEED", "0"))


# Small tensors gain nothing from threads, and threads that wait for each other on busy cores cost a hundredfold.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded(request):
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()) + SEED)


def pytest_addoption(parser):
    parser.addoption("--record", metavar="DIR", help="append how many tests passed, failed and skipped, as Records")


def pytest_terminal_summary(terminalreporter, config):
    """Once per run, also where workers share the tests. What was selected is the setting: paths and marker."""
    folder = config.getoption("--record")
    if not folder or hasattr(config, "workerinput"):  # a worker of xdist; who shares out the tests counts for all
        return
    from moelab.results import Record, Store, collect

    on_gpu = torch.cuda.is_available()
    where = collect("cuda", gpu_count=torch.cuda.device_count()) if on_gpu else collect("cpu", gpu_count=0)
    paths = sorted(os.path.relpath(path.partition("::")[0], config.rootpath) for path in config.args)
    setting = {"paths": " ".join(paths), "marker": config.getoption("-m"), "seed": SEED}
    for outcome in ("passed", "failed", "error", "skipped"):
        count = len(terminalreporter.stats.get(outcome, []))
        record = Record.from_samples(
            [count], bench="tests", backend="pytest", params=setting, metric=outcome, unit="1", clock="none",
            provenance=where,
        )  # fmt: skip
        Store(folder).append(record)


# Dimensions at which transformers and we can be compared in float32; YaRN is active, groups are limited.
TINY = dict(
    vocab_size=320, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
    first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4,
    topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True, rms_norm_eps=1e-6,
    max_position_embeddings=1024, rope_interleave=True,
    rope_scaling=dict(
        type="yarn", rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=128,
        beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
    ),
)  # fmt: skip


def make_oracle(seed: int, **changes):
    """transformers' model on the tiny configuration, float32, norms and biases drawn so that no trap stays hidden."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV3Config(**{**TINY, **changes}, attn_implementation="eager")
    model = DeepseekV3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.7, 1.3)
            elif "e_score_correction_bias" in name:
                tensor.uniform_(-0.9, -0.3)  # negative: a mask of zeros would pick dropped groups
            elif tensor.dim() >= 2:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="session")
def oracle():
    return make_oracle(SEED + 1)


@pytest.fixture(scope="session")
def tiny_checkpoint(oracle, tmp_path_factory):
    """The oracle as transformers saves it: the hub's names, float32, no MTP layer."""
    folder = tmp_path_factory.mktemp("tiny")
    oracle.save_pretrained(folder)
    return folder


GPUS = torch.cuda.device_count()

# Kinds of tests/pool.py. A number is how many processes there are: 2 have a GPU each where there are two, 4 share them.
ON_CPU = ("virtual", "gloo", "emulated", "emulated-flags")
ON_GPU = (
    "nccl", "gloo-cuda", "gpu-virtual", "gpu-virtual-flags", "nvshmem-2", "nvshmem-flags-2", "nvshmem-puts-2",
    "nvshmem-4", "nvshmem-half-4", "nvshmem-puts-4",
)  # fmt: skip


def make_pool(name: str, folder: str) -> Pool:
    """Skips the test with the reason where there is no such pool."""
    if name in ON_GPU and not GPUS:
        pytest.skip(f"a pool of {name} ranks needs a GPU; none here")
    if name == "virtual":
        return ThreadPool()
    if name == "gloo":
        return ProcessPool("gloo", 8, (1, 2, 4, 8), folder)
    if name.startswith("emulated"):
        from tests.comm.emulation import emulation, missing

        if why := missing():
            pytest.skip(why)
        return ThreadPool(name, (1, 2, 4), emulation())
    if name == "gloo-cuda":
        return ProcessPool("gloo-cuda", 4, (1, 2, 4), folder)
    if name == "nccl":
        if GPUS < 2:
            pytest.skip(f"NCCL needs a GPU for each of at least 2 ranks; {GPUS} here")
        # An exchange over NCCL takes the whole world, so there are no smaller groups.
        size = 1 << (min(GPUS, 8).bit_length() - 1)
        return ProcessPool("nccl", size, (size,), folder)
    if (why := AllToAll.available()["nvshmem"]) != "ok":
        pytest.skip(why)
    if name.startswith("gpu-virtual"):
        return ThreadPool(name, (1, 2, 4, 8, 16, 32), load())
    kind, _, size = name.rpartition("-")
    return ProcessPool(kind, int(size), (int(size),), folder)  # NVSHMEM serves one set of ranks in a process


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """name -> pool of ranks, one of each kind for the whole session."""
    made: dict[str, Pool] = {}
    failed: dict[str, BaseException] = {}  # which is not tried again

    def get(name: str) -> Pool:
        if name in failed:
            raise failed[name]
        if name not in made:
            try:
                made[name] = make_pool(name, str(tmp_path_factory.mktemp(name)))
            except BaseException as error:
                failed[name] = error
                raise
        return made[name]

    yield get
    for pool in made.values():
        pool.stop()


@pytest.fixture
def virtual_pool(pools):
    return pools("virtual")


@pytest.fixture
def gloo_pool(pools):
    return pools("gloo")


@pytest.fixture
def nccl_pool(pools):
    return pools("nccl")


KERNELS = [name for name in (*ON_CPU, *ON_GPU) if moves_by_kernels(name)]


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.gpu] if n in ON_GPU else []) for n in KERNELS])
def kernel_pool(request, pools):
    """Runs a test on ranks of every kind whose data kernels move."""
    return pools(request.param)


@pytest.fixture(params=[name for name in ON_GPU if name.startswith("nvshmem")])
def nvshmem_pool(request, pools):
    return pools(request.param)


@pytest.fixture(params=[*ON_CPU, *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_GPU)])
def pool(request, pools):
    """Runs a test on ranks of every kind."""
    return pools(request.param)
