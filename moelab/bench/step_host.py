"""A decode step by what is done for it: laid out anew, or written into a step of fixed shape.

    choose    which requests take part, and their tokens
    lay out   anew: tensors of tokens, positions and slots, and each request's pages. Fixed: the same numbers into
              tensors that are there already, by one copy
    plan      attention's, fixed only; anew, attention looks at each request's pages as it comes to them
    run       the layers, the head, the likeliest tokens

`choose`, `lay out` and `plan` are the host's on a GPU as well, before a replay or between eager calls. `run` is not: of
a captured step it is one call. Here all of it is the CPU's, in one process and float32, so `run` says nothing of a GPU.

    metric     unit   params: model, layers, batch, kv_len, shape (anew, fixed), part
    part       us     each part, of every repetition
    launches   1      of `run`; `moelab.bench.launches` says what is counted. of: attention (its core alone), rest
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moelab.bench.decode_rank import fill
from moelab.bench.launches import Counter
from moelab.engine.attention import decode_for
from moelab.engine.batch import choose, lay_out, pieces_of
from moelab.engine.decode import Output, decode_body
from moelab.engine.executor import Observe
from moelab.engine.graphs import DecodeGraphs, places_for
from moelab.engine.kv_cache import PAGE_SIZE, PagedCache, pages_for
from moelab.engine.places import Inputs
from moelab.engine.sequence import Sampling
from moelab.engine.sequence import Sequence as Request
from moelab.model.deepseek import DeepSeek
from moelab.results import Provenance, Record

BENCH = "step_host"
PARTS = ("choose", "lay out", "plan", "run")
SHAPES = ("anew", "fixed")
WARMUP = 2


class _Timed:
    """Attention whose planning is on a clock."""

    def __init__(self, decode: Any) -> None:
        self._decode, self.plan_us = decode, 0.0

    def plan(self, *arguments) -> None:
        start = time.perf_counter()
        self._decode.plan(*arguments)
        self.plan_us = 1e6 * (time.perf_counter() - start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decode, name)


class _Steps:
    """`batch` requests with `kv_len` rows each, this step's included, on shuffled pages."""

    def __init__(self, model: DeepSeek, batch: int, kv_len: int, seed: int) -> None:
        self.model, each = model, pages_for(kv_len)
        self.cache = PagedCache(
            model.num_caches, batch * each, model.config.latent_dim, model.arithmetic.dtype, model.embed_w.device
        )
        fill(self.cache.rows, seed)
        self.body = decode_body(model, self.cache.rows, "none")
        source = torch.Generator().manual_seed(seed)
        pages = torch.randperm(batch * each, generator=source).view(batch, each).tolist()
        tokens = torch.randint(model.config.vocab_size, (batch, kv_len), generator=source).tolist()
        self.running = [
            Request(i, mine, Sampling(1), num_cached=kv_len - 1, pages=at)
            for i, (mine, at) in enumerate(zip(tokens, pages, strict=True))
        ]
        self.timed: list[_Timed] = []
        make = decode_for(model, each * PAGE_SIZE, 1)

        def decode(requests: int) -> _Timed:
            self.timed.append(_Timed(make(requests)))
            return self.timed[-1]

        self.graphs = DecodeGraphs(
            self.body, places_for(Inputs(batch, 1, model.embed_w.device), [batch], False, decode), False
        )

    def prepared(self, shape: str) -> tuple[dict[str, float], Callable[[Observe | None], Output]]:
        """us of PARTS but the last, which is the second."""
        start = time.perf_counter()
        pieces = pieces_of(choose(self.running, len(self.running)))
        chosen = time.perf_counter()
        if shape == "fixed":
            step = self.graphs.step(len(pieces))
            step.fill(pieces)
            run = step.run
        else:
            batch = lay_out(pieces, self.model.embed_w.device, True)

            def run(observe: Observe | None = None) -> Output:
                return self.body(batch, observe)

        us = {"choose": 1e6 * (chosen - start), "lay out": 1e6 * (time.perf_counter() - chosen)}
        if shape == "fixed":
            us["plan"] = sum(timed.plan_us for timed in self.timed)
            us["lay out"] -= us["plan"]
        return us, run

    def launches(self, shape: str) -> dict[str, int]:
        """Launches of `run` in attention's core, and in all the rest."""
        _, run = self.prepared(shape)
        before, found = 0, {"attention": 0, "rest": 0}
        with Counter() as counter:

            def observe(launch, state) -> None:
                nonlocal before
                found["attention" if launch.stage.name == "mla" else "rest"] += counter.count - before
                before = counter.count

            run(observe)
        found["rest"] += counter.count - before
        return found


@torch.no_grad()
def records(
    model: DeepSeek, name: str, batches: Sequence[int], kv_len: int, repeats: int, here: Provenance, seed: int = 0
) -> list[Record]:
    """Of a model that is alone in this process, on the CPU; `name`: the model's. The two shapes take turns."""
    made = []
    for batch in batches:
        steps = _Steps(model, batch, kv_len, seed)
        taken: dict[tuple[str, str], list[float]] = {}
        for repeat in range(WARMUP + repeats):
            for shape in SHAPES:
                us, run = steps.prepared(shape)
                start = time.perf_counter()
                run()
                us["run"] = 1e6 * (time.perf_counter() - start)
                for part, value in us.items() if repeat >= WARMUP else ():
                    taken.setdefault((shape, part), []).append(value)
        numbers = {(s, "part", ("part", part)): (us, "us", "wall", WARMUP) for (s, part), us in taken.items()}
        for shape in SHAPES:
            for of, count in steps.launches(shape).items():
                numbers[shape, "launches", ("of", of)] = [count], "1", "none", 0
        common = {"model": name, "layers": model.config.num_hidden_layers, "batch": batch, "kv_len": kv_len}
        for (shape, metric, (key, what)), (samples, unit, clock, warmup) in numbers.items():
            params = common | {"shape": shape, key: what}
            made.append(
                Record.from_samples(
                    samples, bench=BENCH, backend="torch", params=params, metric=metric, unit=unit, clock=clock,
                    warmup=warmup, provenance=here, seed=seed,
                )
            )  # fmt: skip
    return made


def table(found: Sequence[Record]) -> dict[int, dict[str, dict[str, Record]]]:
    """{batch: {shape: {part: Record}}}."""
    by_batch: dict[int, dict[str, dict[str, Record]]] = {}
    for record in found:
        if record.metric == "part":
            at = record.params
            by_batch.setdefault(at["batch"], {}).setdefault(at["shape"], {})[at["part"]] = record
    return by_batch


def counted(found: Sequence[Record], batch: int, shape: str) -> dict[str, int]:
    """{attention, rest: launches} of a step's `run`."""
    mine = [r for r in found if r.metric == "launches" and (r.params["batch"], r.params["shape"]) == (batch, shape)]
    return {record.params["of"]: int(record.p50) for record in mine}


def lessons(found: Sequence[Record]) -> list[str]:
    """What the records say, in sentences with their numbers."""
    by_batch, said = table(found), []
    for batch in sorted({min(by_batch), max(by_batch)}):
        anew, fixed = (
            {part: record.p50 for part, record in by_batch[batch][shape].items() if part != "run"} for shape in SHAPES
        )
        said.append(
            f"{batch} request{'s' * (batch > 1)} take{'s' * (batch == 1)} **{sum(fixed.values()):,.0f} µs** in fixed "
            f"shape ({fixed['plan']:,.0f} to plan attention) and {sum(anew.values()):,.0f} µs laid out anew"
        )
    return [f"Before the first layer this CPU is busy with a step, which no graph removes: {'; '.join(said)}."]
