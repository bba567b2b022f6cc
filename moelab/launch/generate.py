"""`moelab generate`: prompts in, text out, as it comes.

What can be checked without a rank is checked first, here. Prompt i goes to DP group i mod dp. The ranks
(generate_rank.py) send token ids; here they become text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelab.config import ConfigError, ModelConfig, ParallelConfig
from moelab.launch.failure import LaunchError
from moelab.launch.local import launch, threads_per_rank
from moelab.stages import SCHEDULES

# The most tokens of one DP group in a step; longer prompts are cut. The experts' buffers grow with it.
MAX_STEP_TOKENS = 512
MAX_DRAFT_TOKENS = 63  # as in the performance model


@dataclass(frozen=True)
class Request:
    """What is asked for. `temperature` 0 takes the likeliest token; otherwise `seed` decides the draws."""

    model: str  # a checkpoint's folder, or "tinyseek"
    prompts: list[str]
    max_tokens: int
    dp: int = 1
    tp: int = 1
    temperature: float = 0.0
    seed: int = 0
    device: str = "cpu"
    overlap: str = "none"  # a schedule of moelab.stages
    draft_tokens: int = 0  # of the MTP layer, per step


@dataclass
class Answer:
    """A continuation. `finish_reason`: "stop" at the end-of-sequence token, "length" at the limit."""

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def find_model(name: str) -> Path:
    """The folder of the packaged model "tinyseek", or the folder that `name` is."""
    folder = Path(__file__).parents[1] / "data" / "tinyseek" if name == "tinyseek" else Path(name)
    if not folder.is_dir():
        raise LaunchError(f"model {name!r}: no such folder; give a checkpoint's folder, or tinyseek")
    return folder


def generate(
    request: Request,
    say: Callable[[str], None] = lambda line: None,
    loaded: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[tuple[int, str, Answer]]:
    """(prompt's number, new text, its answer so far) as they come, from all prompts interleaved.

    Starts ranks of its own and ends them, also when the caller stops early. `say` gets lines of progress, `loaded` how
    many of how many layers the first rank has loaded. Raises `MoelabError` before anything starts for what cannot run;
    `RankFailure` when a rank fails.
    """
    folder = find_model(request.model)
    config = ModelConfig.from_hf(folder)
    _check(request, config)
    from moelab.model.tokenizer import TextStream, Tokenizer  # takes seconds

    tokenizer = Tokenizer(folder, config.bos_token_id)
    prompts = [_encode(tokenizer, text, request.max_tokens, config) for text in request.prompts]

    ranks = request.dp * request.tp
    say(
        f"{ranks} rank{'s' * (ranks > 1)} on {request.device}: dp {request.dp} × tp {request.tp}, "
        f"{config.n_routed_experts // ranks} of {config.n_routed_experts} experts per rank"
        + (f", threads per rank: {threads_per_rank(ranks)}" if request.device == "cpu" else "")
    )
    fates = []  # of each group's drafts
    answers = [Answer(text) for text in request.prompts]
    streams = [TextStream(tokenizer) for _ in answers]
    started = time.monotonic()
    with launch("moelab.launch.generate_rank:generate", _job(request, folder, prompts), ranks, request.device) as run:
        for _, event in run:
            if "loaded" in event:
                loaded(event["loaded"], event["layers"])
                continue
            if "ready" in event:
                say(f"ready after {time.monotonic() - started:.1f} s: {event['ready']}")
                started = time.monotonic()
                continue
            if "drafts" in event:
                fates.append(event["drafts"])
                continue
            number, token = event["prompt"], event["token"]
            answer, stream = answers[number], streams[number]
            answer.tokens.append(token)
            text = stream.add(token)
            if event["last"]:
                text += stream.finish()
                answer.finish_reason = "stop" if token == config.eos_token_id else "length"
            answer.text += text
            elapsed_s = time.monotonic() - started
            yield number, text, answer
    count = sum(len(answer.tokens) for answer in answers)
    say(f"{count} tokens in {elapsed_s:.1f} s: {count / elapsed_s:.1f} tokens/s, prompts included in the time")
    if request.draft_tokens:
        say(f"drafts accepted, by depth, of those whose forerunners were: {', '.join(_shares(fates))}")


def in_order(pieces: Iterator[tuple[int, str, Answer]], write: Callable[[str], None]) -> None:
    """Write the texts one after another, each ended by a line end; the one whose turn it is as it comes."""
    turn, waiting, finished = 0, {}, set()
    for number, text, answer in pieces:
        waiting[number] = waiting.get(number, "") + text
        if answer.finish_reason:
            finished.add(number)
            waiting[number] += "\n"
        while turn in waiting:
            write(waiting.pop(turn))
            if turn not in finished:
                break
            turn += 1


def _shares(fates: list[list[list[int]]]) -> Iterator[str]:
    """Accepted of tried, by depth, over all groups; `fates` holds [accepted, tried] of each depth for each group."""
    for depth in zip(*fates, strict=True):
        accepted, tried = (sum(column) for column in zip(*depth, strict=True))
        yield f"{100 * accepted / tried:.0f} %" if tried else "none tried"


def _check(request: Request, config: ModelConfig) -> None:
    ParallelConfig(request.dp, request.tp, gpus_per_node=max(1, request.dp * request.tp)).check(config)
    if request.max_tokens < 1:
        raise ConfigError(f"max-tokens is {request.max_tokens}: give 1 or more")
    if not (request.temperature >= 0 and math.isfinite(request.temperature)):
        raise ConfigError(f"temperature is {request.temperature}: give 0 (the likeliest token) or more")
    if not 0 <= request.seed < 2**63:
        raise ConfigError(f"seed is {request.seed}: legal are 0…2^63 − 1")
    if request.overlap not in SCHEDULES:
        raise ConfigError(f"overlap is {request.overlap!r}: legal are {', '.join(SCHEDULES)}")
    if not 0 <= request.draft_tokens <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"draft-tokens is {request.draft_tokens}: legal are 0…{MAX_DRAFT_TOKENS}")
    if not request.prompts:
        raise ConfigError("there is no prompt: give one or more")
    if request.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device is cuda, and torch sees no GPU here: use cpu (see `moelab doctor`)")


def _encode(tokenizer, text: str, max_tokens: int, config: ModelConfig) -> list[int]:
    if not text:
        raise ConfigError("a prompt is empty: give some text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"prompt {text!r} is not valid UTF-8") from None
    ids = tokenizer.encode(text)
    limit = config.max_position_embeddings
    if len(ids) + max_tokens > limit:
        raise ConfigError(
            f"{len(ids)} prompt tokens and max-tokens {max_tokens} exceed the model's {limit} positions: "
            "shorten the prompt, or give fewer max-tokens"
        )
    return ids


def _job(request: Request, folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    groups = [prompts[group :: request.dp] for group in range(request.dp)]
    q_len = 1 + request.draft_tokens
    per_group = [max(sum(len(ids) for ids in group), len(group) * q_len) for group in groups]
    return {
        "folder": str(folder.resolve()),
        "dp": request.dp,
        "tp": request.tp,
        "prompts": prompts,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "overlap": request.overlap,
        "draft_tokens": request.draft_tokens,
        "step_tokens": min(MAX_STEP_TOKENS, max(per_group)),  # the same on all ranks, as the exchange needs
    }
