"""tinyseek over real processes: however it is cut, it writes the same text, and so does transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moelab.comm.dense import Dense
from moelab.comm.nvshmem import Nvshmem
from moelab.config import ModelConfig, ParallelConfig, preset
from moelab.engine.engine import Engine
from moelab.engine.executor import run_layers
from moelab.engine.sequence import Sampling
from moelab.model.arithmetic import Plain
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from moelab.ops.fp8 import dequantize_block
from tests.helpers import Session, load_alone

TINYSEEK = Path(__file__).parents[2] / "moelab" / "data" / "tinyseek"
HELDOUT = TINYSEEK / "heldout"
COUNT = 24
LOGITS_ERROR = 0.04  # of block FP8; tests/model/test_block_fp8.py derives it


def prompts() -> list[list[int]]:
    """Beginnings of held-out files of unequal lengths, as byte ids behind the bos id; one is longer than a step."""
    files = ("sched.py", "secrets.py", "traceback.py", "opcode.py", "copyreg.py")
    lengths = (40, 200, 7, 64, 121)
    texts = [(HELDOUT / f"{name}.txt").read_bytes()[:n] for name, n in zip(files, lengths, strict=True)]
    return [[256, *text] for text in texts]


def write_texts(rank, folder: str, dp: int, tp: int, requests: list[list[int]]) -> dict[int, list[int]] | None:
    """What one rank of dp × tp generates: the first groups have more requests than the last, which may have none."""
    parallel = ParallelConfig(dp, tp)
    group = parallel.dp_group(rank.index)
    model = DeepSeek.load(folder, parallel, 128, rank=rank.index, group=rank.groups[parallel.ep])
    engine = Engine(model, cache_tokens=2048)
    mine = [i for i in range(len(requests)) if (i * i) % dp == group]
    sequences = {i: engine.add(i, requests[i], Sampling(COUNT)) for i in mine}
    for _ in engine.run():
        pass
    model.close()
    return {i: sequence.output for i, sequence in sequences.items()}


@pytest.fixture(scope="module")
def alone():
    """One process, one rank."""
    engine = Engine(load_alone(TINYSEEK, max_tokens=128), cache_tokens=2048)
    sequences = [engine.add(i, prompt, Sampling(COUNT)) for i, prompt in enumerate(prompts())]
    for _ in engine.run():
        pass
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_cut_writes_the_same_greedy_text(gloo_pool, alone, dp, tp):
    results = gloo_pool.run(write_texts, str(TINYSEEK), dp, tp, prompts(), ranks=dp * tp)
    for rank, texts in enumerate(results):
        assert texts == {i: alone[i] for i in texts}, f"rank {rank}"
        assert texts == results[rank // tp * tp], "ranks of one TP group differ"
    assert {i for texts in results for i in texts} == set(range(len(alone)))


def text_over(rank, folder: str, wrap, tp: int, prompt: list[int]) -> list[int]:
    """Greedy text with attention cut by heads, over a group inside of what says how to exchange."""
    parallel = ParallelConfig(1, tp)
    group = wrap(group=rank.groups[parallel.ep])
    model = DeepSeek.load(folder, parallel, 128, rank=rank.index, group=group)
    engine = Engine(model, cache_tokens=1024)
    request = engine.add(0, prompt, Sampling(COUNT))
    for _ in engine.run():
        pass
    model.close()
    return request.output


def test_attention_is_cut_over_the_group_inside_a_choice_of_exchange(gloo_pool, alone):
    texts = gloo_pool.run(text_over, str(TINYSEEK), Dense, 2, prompts()[0], ranks=2)
    assert texts == [alone[0], alone[0]]


def dequantized_oracle():
    """transformers' model on tinyseek's weights, dequantised."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config.from_pretrained(TINYSEEK)
    del config.quantization_config
    config._attn_implementation = "eager"
    stored, weights = load_file(TINYSEEK / "model.safetensors"), {}
    for name, tensor in stored.items():
        if name.endswith("scale_inv") or ".layers.5." in name:  # 5 is the MTP layer, which transformers leaves out
            continue
        scale = stored.get(f"{name}_scale_inv")
        weights[name] = tensor.float() if scale is None else dequantize_block(tensor, scale, torch.float32)
    for layer in range(1, 5):
        prefix = f"model.layers.{layer}.mlp.experts"
        experts = [[weights.pop(f"{prefix}.{e}.{p}_proj.weight") for p in ("gate", "up", "down")] for e in range(16)]
        weights[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in experts])
        weights[f"{prefix}.down_proj"] = torch.stack([parts[2] for parts in experts])
    model = DeepseekV3ForCausalLM(config).float().eval()
    model.load_state_dict(weights)
    return model


def test_transformers_writes_it_too_and_sees_the_same_logits(alone):
    oracle = dequantized_oracle()
    model = load_alone(TINYSEEK)
    for prompt, text in zip(prompts(), alone, strict=True):
        tokens = [*prompt, *text]
        with torch.no_grad():
            logits = oracle(torch.tensor([tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == text
        ours = model.logits(Session(model).feed(tokens, absorbed=False))
        torch.testing.assert_close(ours, logits, rtol=0, atol=2e-5 * max(1.0, logits.std().item()))


def test_the_checkpoint_is_the_preset():
    assert ModelConfig.from_hf(TINYSEEK) == preset("tinyseek")
    assert (TINYSEEK / "model.safetensors").stat().st_size <= 16 * 2**20


@torch.no_grad()
def test_the_mtp_head_drafts_what_the_model_then_writes(alone):
    """Drafts on the model's own text, as decode would make them; the acceptance in the records was 0.95."""
    model = load_alone(TINYSEEK)
    accepted = total = 0
    for prompt, text in zip(prompts(), alone, strict=True):
        tokens = [*prompt, *text]
        session = Session(model)
        hidden = session.feed(tokens[:-1], absorbed=False)
        drafts = model.logits(session.draft(hidden, tokens[1:], absorbed=False)).argmax(-1)
        start = len(prompt) - 1  # the draft at i is for token i + 2
        accepted += sum(drafts[i].item() == tokens[i + 2] for i in range(start, len(tokens) - 2))
        total += len(text) - 1
    assert accepted / total > 0.8, f"{accepted} of {total}"


@torch.no_grad()
def test_held_out_text_costs_as_few_bits_as_the_records_say():
    """A file's first 1024 bytes each, which is harder than the records' windows: they come with context."""
    model, bits, count = load_alone(TINYSEEK, max_tokens=2048), 0.0, 0
    for name in ("sched.py", "traceback.py", "secrets.py"):
        tokens = torch.tensor([256, *(HELDOUT / f"{name}.txt").read_bytes()[:1024]])
        logits = model.logits(Session(model, length=1088).feed(tokens[:-1].tolist(), absorbed=False))
        bits -= logits.log_softmax(-1).gather(-1, tokens[1:, None]).sum().item() / torch.tensor(2.0).log().item()
        count += len(tokens) - 1
    assert bits / count < 1.4


def text_on_gpu(rank, folder: str, dp: int, tp: int, prompt: list[int]) -> list[int]:
    """Greedy text in bfloat16 on this rank's GPU; only the last group has the request."""
    parallel = ParallelConfig(dp, tp)
    group = rank.groups[parallel.ep] if parallel.ep > 1 else None
    options = dict(rank=rank.index, group=group, arithmetic=Plain(torch.bfloat16), device=str(rank.device))
    model = DeepSeek.load(folder, parallel, 128, **options)
    engine = Engine(model, cache_tokens=1024)
    busy = parallel.dp_group(rank.index) == dp - 1
    sequence = engine.add(0, prompt, Sampling(COUNT)) if busy else None
    for _ in engine.run():
        pass
    model.close()
    return sequence.output if busy else []


@pytest.mark.gpu
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_two_gpus_write_what_one_writes(nccl_pool, dp, tp):
    """Over NCCL, an idle group beside a busy one, and attention cut by heads."""
    if nccl_pool.size != 2:
        pytest.skip(f"an exchange over NCCL takes all ranks; this pool has {nccl_pool.size}")
    prompt = prompts()[1]
    results = nccl_pool.run(text_on_gpu, str(TINYSEEK), dp, tp, prompt)
    alone = nccl_pool.submit(0, text_on_gpu, str(TINYSEEK), 1, 1, prompt).result(60)
    assert results[-1] == alone and len(alone) == COUNT
    assert results[0] == ([] if dp == 2 else alone)


@pytest.mark.gpu
@torch.no_grad()
def test_bfloat16_on_a_gpu_stays_near_float32_on_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    tokens = prompts()[1]
    reference = load_alone(TINYSEEK)
    expected = reference.logits(Session(reference).feed(tokens, absorbed=False))
    model = load_alone(TINYSEEK, arithmetic=Plain(torch.bfloat16), device="cuda")
    session = Session(model)
    ours = model.logits(session.feed(tokens, absorbed=True)).cpu()
    assert (ours.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95
    error = (ours - expected).square().mean().sqrt() / expected.std()
    assert 1e-4 < error < 0.05, error


def served(rank, folder: str, dp: int, tp: int, prompts: list[list[list[int]]], overlap: str):
    """As it is served, in block FP8 over our kernels: logits [tokens, vocab] of this rank's prompts in one pass, and
    the greedy text of captured steps and of the same steps run eagerly."""
    parallel = ParallelConfig(dp, tp)
    mine = prompts[parallel.dp_group(rank.index)]
    group = rank.groups[dp * tp] if rank.kernels else Nvshmem(rank.groups[dp * tp], returns="bf16")
    options = dict(rank=rank.index, group=group, arithmetic=BlockFp8(), device=str(rank.device))
    model = DeepSeek.load(folder, parallel, 256, **options)
    with torch.no_grad():
        session = Session(model, max(1, len(mine)), 256)
        state = model.begin(session._batch(mine, session.lengths, absorbed=True), session.cache)
        run_layers(model, state, overlap)
        logits = model.logits(model.finish(state)).cpu()
        texts = []
        for capture in (True, False):
            engine = Engine(model, 2048, overlap, draft_tokens=1, batch_sizes=(1, 2, 4), capture=capture)
            requests = [engine.add(i, prompt, Sampling(8 + 5 * i)) for i, prompt in enumerate(mine)]
            for _ in engine.run():
                pass
            texts.append([request.output for request in requests])
    model.close()
    return logits, texts


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["none", "microbatch"])
@pytest.mark.parametrize(
    ("kind", "dp", "tp"), [("nvshmem-2", 2, 1), ("nccl", 1, 2), ("nvshmem-4", 4, 1), ("gpu-virtual", 1, 1)]
)
def test_block_fp8_over_our_kernels_is_the_same_on_any_number_of_gpus(pools, kind, dp, tp, overlap):
    """Groups with one request, two, none and three at once, each replaying graphs of its own size: captured steps write
    what eager ones write, and logits are those of the CPU's float32 reference to the error of FP8."""
    groups = [[p] for p in prompts()[:1]] + [prompts()[1:3], [], prompts()[2:5]]
    pool = pools(kind)
    if kind == "nccl" and pool.size != 2:
        pytest.skip(f"an exchange over NCCL takes all ranks; this pool has {pool.size}")
    results = pool.run(served, str(TINYSEEK), dp, tp, groups[:dp], overlap, ranks=dp * tp)
    reference = load_alone(TINYSEEK)
    for rank, (logits, (captured, eager)) in enumerate(results):
        mine = groups[rank // tp]
        assert captured == eager and [len(text) for text in eager] == [8 + 5 * i for i in range(len(mine))]
        if mine:
            session = Session(reference, len(mine), 256)
            with torch.no_grad():
                expected = reference.logits(session.feed(*mine, absorbed=False))
            assert (logits - expected).square().mean().sqrt() < LOGITS_ERROR * expected.std()
