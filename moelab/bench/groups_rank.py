"""What one rank of `moelab bench groups` does.

All sizes that occur are made ready first, as an engine does. Then the ways of a case take turns, a step each, so that a
clock that drifts favours none. Nothing but what a step itself brings holds the ranks together meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moelab.bench import decode_memory
from moelab.bench.decode_rank import fill, requests
from moelab.bench.decode_setting import Setting
from moelab.bench.decode_timer import Ranks
from moelab.bench.groups import WAYS
from moelab.bench.launches import launches
from moelab.bench.timer import BenchError
from moelab.comm.choice import default_group
from moelab.engine.attention import decode_for
from moelab.engine.decode import decode_body
from moelab.engine.graphs import DecodeGraphs, places_for
from moelab.engine.kv_cache import PAGE_SIZE, PagedCache, pages_for
from moelab.engine.memory import available_bytes
from moelab.engine.places import Inputs
from moelab.engine.timeline import Timeline
from moelab.model.arithmetic import Plain
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from moelab.model.random_weights import RandomWeights

TIMED_US = 400e3  # of a way
WARMUP = {"cuda": 5, "cpu": 2}
STEPS = {"cuda": (20, 200), "cpu": (9, 25)}
TIMELINES = 5  # steps whose stages are timed, on the CPU


@torch.no_grad()
def measure(context, job: dict[str, Any]) -> None:
    """For `moelab.launch`. Emits {backend, max_tokens}, and for every number {batches, way, agree, metric, unit, clock,
    samples, warmup}; on the CPU {batches, way, group, requests, places, repeat, lane} of each group's first rank.
    Collective. Raises OutOfMemory before it allocates."""
    setting, device = Setting(**job["setting"]), torch.device(context.device)
    sharing = 1 if device.type == "cuda" else context.world_size
    decode_memory.fitting(setting, available_bytes(context.device, sharing))
    model = _load(setting, context)
    context.emit({"backend": model.all_to_all.backend, "max_tokens": model.all_to_all.spec.max_tokens})
    if setting.graph and not model.all_to_all.on_device:
        raise BenchError(
            f"the exchange runs over {model.all_to_all.backend}, whose halves wait on the host, and no graph can hold "
            "them: moelab kernels build says what our kernels lack; or take --eager"
        )
    graphs = _graphs(setting, model)
    ranks = Ranks(device, context.world_size)
    agreements = {"none": lambda own: own, "host": Agreement(torch.device("cpu"))}
    if dist.get_backend() == "nccl":
        agreements["device"] = Agreement(device)
    cases = [_Case(setting, model, graphs, ranks, context, case) for case in job["cases"]]
    for case in cases:
        case.time(agreements)
    for case in cases:
        case.count(agreements)
    model.close()


class Agreement:
    """The largest of all groups' numbers. Construction and calls are collective."""

    def __init__(self, device: torch.device) -> None:
        """Numbers are compared on `device`: over gloo on the CPU, over NCCL on a GPU."""
        self._device = device
        self._group = dist.new_group(backend="gloo") if device.type == "cpu" else None

    def __call__(self, own: int) -> int:
        """Waits for all groups, and for the device."""
        largest = torch.tensor([own], device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return int(largest)


class _Case:
    """Some requests of each group. Everything here is collective."""

    def __init__(
        self, setting: Setting, model: DeepSeek, graphs: DecodeGraphs, ranks: Ranks, context, batches: Sequence[int]
    ) -> None:
        self.setting, self.graphs, self.ranks, self.context, self.batches = setting, graphs, ranks, context, batches
        self.model, self.group = model, setting.parallel.dp_group(context.rank)
        self.first_of_group, self.own = context.rank % setting.tp == 0, batches[self.group]
        self.pieces = requests(model.config.vocab_size, self.own, setting)

    def time(self, agreements: dict[str, Any]) -> None:
        ways, kind = _ways(agreements), self.ranks.device.type
        warmup, (least, most) = WARMUP[kind], STEPS[kind]
        for _ in range(warmup):
            slow = max([self.step(agreements[how])[0] for _, how in ways])
        steps = int(min(most, max(least, TIMED_US / self.ranks.most(slow))))
        taken = {way: [] for way in ways}
        self.ranks.align()
        for _ in range(steps):
            for way, how in ways:
                taken[way, how].append(self.step(agreements[how]))
        for way, how in ways:
            for metric, us in zip(("step", "agree", "fill", "run"), zip(*taken[way, how], strict=True), strict=True):
                if metric != "agree" or how != "none":
                    self._emit(way, how, metric, "us", "wall", list(us), warmup)
            if kind == "cpu":
                self._time_lane(way, agreements[how])

    def count(self, agreements: dict[str, Any]) -> None:
        for way, how in _ways(agreements):
            for metric, number in self._numbers(agreements[how]).items():
                self._emit(way, how, metric, "1", "none", [number], 0)

    def step(self, agree) -> tuple[float, float, float, float]:
        """us of a step, and of its parts: agreeing, laying out, running."""
        start = time.perf_counter()
        size = agree(self.own)
        agreed = time.perf_counter()
        step = self.graphs.step(size)
        step.fill(self.pieces)
        filled = time.perf_counter()
        step.run()
        if self.ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        end = time.perf_counter()
        return tuple(1e6 * (b - a) for a, b in ((start, end), (start, agreed), (agreed, filled), (filled, end)))

    def _numbers(self, agree) -> dict[str, int]:
        """This rank's part of what all compute and receive, and its launches."""
        step, arrived = self.graphs.step(agree(self.own)), []
        step.fill(self.pieces)

        def observe(launch, state) -> None:
            if launch.stage.name == "dispatch_recv":
                arrived.append(state.counts.sum())

        step.run(observe)
        tokens = step.size * self.setting.q_len if self.first_of_group else 0
        counted = launches(lambda: step.body(step.batch, None), self.ranks.device, self.ranks.align)
        self.ranks.align()
        numbers = {"tokens": tokens, "rows": int(sum(arrived))}
        return numbers | ({"launches": counted} if counted else {})

    def _time_lane(self, way: str, agree) -> None:
        timeline = Timeline(self.ranks.device)
        for repeat in range(TIMELINES):
            self.ranks.align()
            marks = [time.perf_counter()]
            step = self.graphs.step(agree(self.own))
            marks.append(time.perf_counter())
            step.fill(self.pieces)
            marks.append(time.perf_counter())
            timeline.begin()
            step.run(timeline)
            marks.append(time.perf_counter())
            start, agreed, filled, end = (1e6 * mark for mark in marks)
            spans = timeline.spans()
            blocks = [("agree", start, agreed)] if way == "padded" else []
            blocks += [("fill", agreed, filled)]
            blocks += [(span.stage, filled + span.start_us, filled + span.end_us) for span in spans]
            blocks += [("head", blocks[-1][2], end)]
            if self.first_of_group:
                self.context.emit({
                    "batches": list(self.batches), "way": way, "group": self.group, "requests": self.own,
                    "places": step.size, "repeat": repeat, "lane": blocks,
                })  # fmt: skip

    def _emit(self, way: str, agree: str, metric: str, unit: str, clock: str, samples: list, warmup: int) -> None:
        self.context.emit({
            "batches": list(self.batches), "way": way, "agree": agree, "metric": metric, "unit": unit, "clock": clock,
            "samples": samples, "warmup": warmup,
        })  # fmt: skip


def _ways(agreements: dict[str, Any]) -> list[tuple[str, str]]:
    return [(way, how) for way, by in WAYS.items() for how in by if how in agreements]


def _load(setting: Setting, context) -> DeepSeek:
    config, parallel, device = setting.config, setting.parallel, context.device
    return DeepSeek.load(
        setting.folder or RandomWeights(config, device, setting.seed), parallel,
        setting.max_tokens(max(setting.batches)), rank=context.rank,
        arithmetic=BlockFp8() if setting.device == "cuda" else Plain(torch.float32), device=device,
        group=default_group(parallel.ep, device),
    )  # fmt: skip


def _graphs(setting: Setting, model: DeepSeek) -> DecodeGraphs:
    """Steps of all sizes that occur, over a cache that is full of anything."""
    config, device, pages = model.config, model.embed_w.device, max(setting.batches) * pages_for(setting.kv_len)
    fp8 = setting.kv_dtype == "fp8"
    cache = PagedCache(
        model.num_caches, pages, config.latent_dim, torch.float8_e4m3fn if fp8 else model.arithmetic.dtype, device
    )
    fill(cache.rows, setting.seed)

    decode = decode_for(model, pages_for(setting.kv_len) * PAGE_SIZE, setting.q_len, fp8)
    inputs = Inputs(max(setting.batches), setting.q_len, device)
    step = decode_body(model, cache.rows, setting.overlap)
    places = places_for(inputs, setting.batches, setting.overlap == "microbatch", decode)
    return DecodeGraphs(step, places, setting.graph)
