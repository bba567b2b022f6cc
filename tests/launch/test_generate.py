"""Prompts in, text out: refusals before anything starts, order, whole characters, and the same tokens anywhere."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess

import pytest
import torch

from moelab.config import MoelabError
from moelab.launch import generate as module
from moelab.launch.generate import Answer, Request, find_model, generate, in_order
from tests.launch.conftest import BOS, EOS


def answers(request: Request) -> list[Answer]:
    last = {number: answer for number, _, answer in generate(request)}
    return [last[number] for number in sorted(last)]


def test_the_same_tokens_from_one_process_four_ranks_and_transformers(traces, checkpoint, oracle):
    prompts = ["def f(x):", "import", "naïve"]
    one = Request(str(checkpoint), prompts, max_tokens=12)
    alone = answers(one)
    spread = answers(dataclasses.replace(one, dp=2, tp=2))
    assert alone == spread == answers(dataclasses.replace(one, dp=2, overlap="microbatch"))
    for answer in alone:
        ids = [BOS, *answer.prompt.encode()]
        start = len(ids)
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(oracle(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == EOS:
                break
        assert answer.tokens == ids[start:]
        assert answer.finish_reason == ("stop" if ids[-1] == EOS else "length")
        assert answer.text == bytes(t for t in answer.tokens if t < 256).decode("utf-8", "replace")
    traces.assert_none()


def test_drafts_change_no_text_and_their_acceptance_is_told():
    """tinyseek over two ranks; one prompt is shorter than the drafts that follow it."""
    one, lines = Request("tinyseek", ["d", "import os"], max_tokens=16), []
    plain, found = answers(one), {}
    for number, _, answer in generate(dataclasses.replace(one, dp=2, draft_tokens=2), lines.append):
        found[number] = answer
    assert [found[number] for number in sorted(found)] == plain
    assert re.fullmatch(r"drafts accepted, by depth, of those whose forerunners were: \d+ %, \d+ %", lines[-1])


def say(number: int, text: bytes) -> list[dict]:
    return [{"prompt": number, "token": byte, "last": i == len(text) - 1} for i, byte in enumerate(text)]


def test_characters_are_whole_whatever_tokens_they_are_cut_into(scripted, checkpoint):
    events, _ = scripted
    text = "naïve → 🎉 ﬁn"
    events += say(0, text.encode())
    pieces = [piece for _, piece, _ in generate(Request(str(checkpoint), ["x"], 64))]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces.count("") == len(text.encode()) - len(text)  # each character comes with its last byte


def test_a_character_that_is_never_completed_shows_at_the_end(scripted, checkpoint):
    events, _ = scripted
    events += say(0, "a🎉".encode()[:-1])
    pieces = [piece for _, piece, _ in generate(Request(str(checkpoint), ["x"], 64))]
    assert pieces[0] == "a" and set(pieces[1:-1]) == {""}
    assert set(pieces[-1]) == {"\ufffd"}


def test_the_end_of_sequence_stops_and_is_no_text(scripted, checkpoint):
    events, _ = scripted
    events += say(0, b"ab")
    events[-1]["last"] = False
    events.append({"prompt": 0, "token": EOS, "last": True})
    lines = []
    ((*_, answer),) = list(generate(Request(str(checkpoint), ["x"], 64), lines.append))[-1:]
    assert answer == Answer("x", "ab", [*b"ab", EOS], "stop")
    assert "3 tokens" in lines[-1]


def test_what_the_ranks_are_told(scripted, checkpoint):
    events, jobs = scripted
    prompts = ["a", "bb" * 400, "ccc", "dddd", "e"]
    for number in range(5):
        events += say(number, b"x")
    answers(Request(str(checkpoint), prompts, 5, dp=2, tp=2, temperature=0.5, seed=7, overlap="dispatch"))
    ((function, job, ranks, device),) = jobs
    assert function == "moelab.launch.generate_rank:generate"
    assert (ranks, device) == (4, "cpu")
    assert job["prompts"] == [[BOS, *text.encode()] for text in prompts]
    assert (job["dp"], job["tp"], job["max_tokens"], job["temperature"], job["seed"]) == (2, 2, 5, 0.5, 7)
    assert (job["overlap"], job["draft_tokens"]) == ("dispatch", 0)
    assert job["step_tokens"] == module.MAX_STEP_TOKENS  # the second group has 801 + 5
    jobs.clear()
    answers(Request(str(checkpoint), ["a", "bb", "ccc", "dddd", "e"], 5, dp=2))
    assert jobs[0][1]["step_tokens"] == 8  # the second group's two prompts: 3 + 5; the first's three: 2 + 4 + 2


def test_texts_come_in_the_order_of_their_prompts():
    def piece(number, text, last=False):
        return number, text, Answer("", finish_reason="length" if last else None)

    written = []
    arriving = iter([
        piece(1, "B1"), piece(0, "A1"), piece(2, "C1"), piece(0, ""), piece(0, "A2"), piece(2, "C2", last=True),
        piece(0, "A3", last=True), piece(1, "B2"), piece(1, "B3", last=True), piece(3, "D", last=True),
    ])  # fmt: skip

    def watched():
        for number, text, answer in arriving:
            yield number, text, answer
            written.append("|")

    in_order(watched(), written.append)
    assert "".join(written) == "|A1||" + "|" + "A2|" + "|" + "A3\nB1|" + "B2|" + "B3\nC1C2\n|" + "D\n|"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dp": 3}, r"ep = dp·tp is 3.*\[1, 2, 4, 8, 16\]"),
        ({"dp": 0}, "dp is 0"),
        ({"tp": 4}, r"tp is 4: legal for 4 heads are \[1, 2\]"),
        ({"dp": -1, "tp": -2}, "dp is -1"),
        ({"max_tokens": 0}, "max-tokens is 0: give 1 or more"),
        ({"max_tokens": 1030}, r"2 prompt tokens and max-tokens 1030 exceed the model's 1024"),
        ({"prompts": ["fine", ""]}, "a prompt is empty"),
        ({"prompts": []}, "no prompt"),
        ({"prompts": ["y" * 1020]}, "1021 prompt tokens"),
        ({"prompts": ["\udcff"]}, "not valid UTF-8"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"overlap": "best"}, "overlap is 'best': legal are none, dispatch, microbatch"),
        ({"draft_tokens": 64}, "draft-tokens is 64: legal are 0…63"),
        ({"model": "no/such/folder"}, "no such folder"),
    ],
)
def test_refused_before_anything_starts(monkeypatch, checkpoint, changes, says):
    monkeypatch.setattr(subprocess, "Popen", None)
    request = dataclasses.replace(Request(str(checkpoint), ["x"], 8), **changes)
    with pytest.raises(MoelabError, match=says) as caught:
        next(generate(request))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_gpu(monkeypatch, checkpoint):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(MoelabError, match="no GPU"):
        next(generate(Request(str(checkpoint), ["x"], 8, device="cuda")))


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_folder_without(monkeypatch, checkpoint, tmp_path, missing):
    monkeypatch.setattr(subprocess, "Popen", None)
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / missing).unlink()
    with pytest.raises(MoelabError, match=missing):
        next(generate(Request(str(folder), ["x"], 8)))


def test_tinyseek_is_the_packages_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tinyseek").mkdir()
    assert find_model("tinyseek").parts[-3:] == ("moelab", "data", "tinyseek")
    assert find_model("./tinyseek").resolve() == (tmp_path / "tinyseek").resolve()
