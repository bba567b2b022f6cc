"""`moelab generate` at a terminal: what goes to which stream, and how it ends when it is told to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator

from moelab.launch.failure import LaunchError


def generate(
    model: str,
    prompts: list[str],
    max_tokens: int,
    dp: int,
    tp: int,
    temperature: float,
    seed: int,
    device: str,
    overlap: str,
    draft_tokens: int,
    as_json: bool,
) -> None:
    """The verb: text (or JSON) to standard output, everything else to standard error."""
    from moelab.launch.generate import Request, in_order
    from moelab.launch.generate import generate as start

    with _ending_cleanly():
        request = Request(model, prompts, max_tokens, dp, tp, temperature, seed, device, overlap, draft_tokens)
        pieces = start(request, _say, _loading_bar())
        try:
            with contextlib.closing(pieces):
                if as_json:
                    answers = {number: answer for number, _, answer in pieces}
                    _write(json.dumps([dataclasses.asdict(answers[n]) for n in sorted(answers)], indent=2) + "\n")
                else:
                    in_order(pieces, _write)
        except LaunchError as failure:
            if failure.report:
                print(failure.report, file=sys.stderr, flush=True)
            raise


def _loading_bar() -> Callable[[int, int], None]:
    """A bar for loading, on standard error; none where loading takes less than two seconds."""
    from tqdm import tqdm

    bar = None

    def loaded(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or tqdm(total=total, desc="loading", unit="layer", delay=2, leave=False)
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return loaded


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Exit status 130 after SIGINT, 143 after SIGTERM, 141 when nobody reads standard output any more."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # A shell starts what it puts in the background with SIGINT ignored; then Python sets no handler of its
    # own.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model's text may have any character
    try:
        yield
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go, and Python would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
