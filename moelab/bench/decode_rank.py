"""What one rank of `moelab bench decode` does: count, load, fill the cache, and time each batch.

Everything that must fit is counted before anything is allocated. The cache then holds `kv_len` rows of every request,
random numbers on shuffled pages, and every step is the one that writes the last q of them, again and again: nothing
that a step costs depends on what its tokens were.

    step           the step as the engine runs it, from tokens to the likeliest next ones: replays of its CUDA graph, or
                   calls by the host
    layers         all MoE layers, or all dense ones, without the rest of the step
    stage          decode_stages.py, by graphs; eagerly, from a timeline of whole steps
    draft          a pass of the MTP layer with its head, as the engine makes it: the first, and those after it
    engine_step    the engine's whole step, drafts and host included (decode_engine.py)
    construct      how long the engine took to be made, once: compiling what no run before left compiled, and capture
    rows, active   what a layer brings to this rank's experts, and how many of them get any; one sample a layer
"""

from __future__ import annotations

import functools
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from moelab.bench import decode_memory
from moelab.bench import decode_stages as stages
from moelab.bench.decode_engine import WARMUP, engine_steps
from moelab.bench.decode_setting import Setting
from moelab.bench.decode_timer import Ranks, as_graph, split_calls, time_calls
from moelab.bench.timer import BenchError, Samples
from moelab.comm.choice import default_group
from moelab.engine.batch import Piece
from moelab.engine.engine import Engine
from moelab.engine.executor import run_layer, run_moe_layers
from moelab.engine.kv_cache import PAGE_SIZE, LayerCaches, pages_for
from moelab.engine.memory import available_bytes
from moelab.engine.sequence import Sampling, Sequence
from moelab.engine.shadow import clear, shadow_rank, stood_in
from moelab.engine.timeline import Timeline
from moelab.model.block_fp8 import BlockFp8
from moelab.model.deepseek import DeepSeek
from moelab.model.random_weights import RandomWeights
from moelab.ops.fp8 import E4M3_MAX
from moelab.ops.mla_cache import Fp8Cache
from moelab.ops.multiprocessors import at_most

PART_SHARE = 0.1  # of a step's time, for each part of it
TIMELINES, TIMELINES_WARMUP = 8, 2  # steps whose stages are timed one by one
FILL_PAGES = 1024  # pages of an FP8 cache drawn at a time

Emit = Callable[..., None]


@torch.no_grad()
def measure(context, job: dict[str, Any]) -> None:
    """For `moelab.launch`, and for one rank in this process. Collective.

    Emits {progress: [what, done, total]}, {backend, max_tokens}, for every number {batch, metric, params, unit, clock,
    samples, warmup}, and {finished: batch}. Raises OutOfMemory before it allocates, BenchError for an exchange that
    cannot be captured."""
    setting, device = Setting(**job["setting"]), torch.device(context.device)
    with at_most(setting.compute_sms, device):
        _measure(context, setting, device)


def _measure(context, setting: Setting, device: torch.device) -> None:
    ranks = Ranks(device, context.world_size)
    sharing = 1 if device.type == "cuda" else context.world_size
    batches = decode_memory.fitting(setting, available_bytes(context.device, sharing))
    if not setting.batches:
        batches = (round(-ranks.most(-batches[0])),)  # what fits on all ranks
    need = decode_memory.foreseen(setting, max(batches))
    most = setting.max_tokens(max(batches))
    measured = decode_memory.Measured(device)
    model = _load(setting, most, context)
    measured.loaded(model, decode_memory.beside_rows(setting, most)[0])
    context.emit({"backend": model.all_to_all.backend, "max_tokens": most})
    if setting.graph and not model.all_to_all.on_device:
        raise BenchError(
            f"the exchange runs over {model.all_to_all.backend}, whose halves wait on the host, and no graph can hold "
            "them: moelab kernels build says what our kernels lack; or take --eager"
        )

    cache_tokens = max(batches) * pages_for(setting.kv_len) * PAGE_SIZE
    fp8 = torch.float8_e4m3fn if setting.kv_dtype == "fp8" else None
    ranks.align()
    start = time.perf_counter()
    engine = Engine(
        model, cache_tokens, setting.overlap, setting.draft_tokens, batch_sizes=batches, capture=setting.graph,
        cache_dtype=fp8, max_kv_len=setting.kv_len,
    )  # fmt: skip
    ranks.align()
    construct = Samples([1e6 * (time.perf_counter() - start)], 0)
    fill(engine.cache.rows, setting.seed)
    for batch in sorted(batches, reverse=True):
        run = _Run(setting, engine, batch, ranks, functools.partial(_emit, context, batch))
        run.time_step()
        if batch == max(batches):
            run.emit("construct", {"sizes": len(batches)}, "us", "wall", construct)
            measured.ran(engine.cache.rows)
            for source, found in (("foreseen", decode_memory.totals(need)), ("measured", measured.bytes)):
                for part, size in found.items():
                    run.emit("memory", {"part": part, "from": source}, "B", "none", Samples([size], 0))
        if setting.batches and decode_memory.room_for_parts(need, ranks):
            run.time_parts(lambda done, total, batch=batch: context.emit({"progress": [f"batch {batch}", done, total]}))
        context.emit({"finished": batch})
        del run
        gc.collect()
    model.close()


def fill(caches: LayerCaches, seed: int) -> None:
    """Random numbers of deviation about one in all rows of all layers."""
    if isinstance(caches, torch.Tensor):
        source = torch.Generator(caches.device).manual_seed(seed)
        for layer in caches:
            layer.normal_(generator=source)
        return
    for number, cache in enumerate(caches):
        _fill_fp8(cache, torch.Generator(cache.rope.device).manual_seed(seed + number))


def _fill_fp8(cache: Fp8Cache, source: torch.Generator) -> None:
    deviation = E4M3_MAX / 8  # beyond the maximum a cast makes NaN
    for part in cache.values.split(FILL_PAGES):
        drawn = torch.empty_like(part, dtype=torch.bfloat16).normal_(0, deviation, generator=source)
        part.copy_(drawn.clamp_(-E4M3_MAX, E4M3_MAX))
    cache.scales.fill_(1 / deviation)
    cache.rope.normal_(generator=source)


def requests(vocab_size: int, batch: int, setting: Setting) -> list[Piece]:
    """The last q_len of kv_len tokens of `batch` requests, random ones, on pages in no order."""
    source, each = torch.Generator().manual_seed(setting.seed), pages_for(setting.kv_len)
    pages = torch.randperm(batch * each, generator=source).view(batch, each).tolist()
    tokens = torch.randint(vocab_size, (batch, setting.q_len), generator=source).tolist()
    start = setting.kv_len - setting.q_len
    return [
        Piece(Sequence(i, mine, Sampling(1), pages=at), start, mine)
        for i, (mine, at) in enumerate(zip(tokens, pages, strict=True))
    ]


def _load(setting: Setting, max_tokens: int, context) -> DeepSeek:
    def progress(done: int, total: int) -> None:
        context.emit({"progress": ["loading", done, total]})

    config, parallel, device = setting.config, setting.parallel, context.device
    if setting.shadow:
        return shadow_rank(
            config, parallel, max_tokens=max_tokens, routing=setting.routing or "equal",
            fabric=setting.fabric or "none", device=device, seed=setting.seed,
            num_sms=setting.comm_sms, progress=progress,
        )  # fmt: skip
    return DeepSeek.load(
        setting.folder or RandomWeights(config, device, setting.seed), parallel, max_tokens, rank=context.rank,
        arithmetic=BlockFp8(), device=device,
        group=default_group(parallel.ep, device, setting.comm_sms), progress=progress,
    )  # fmt: skip


def _emit(context, batch: int, metric: str, params: dict[str, Any], unit: str, clock: str, samples: Samples) -> None:
    context.emit({
        "batch": batch, "metric": metric, "params": params, "unit": unit, "clock": clock, "samples": samples.us,
        "warmup": samples.warmup,
    })  # fmt: skip


class _Run:
    """One batch. Everything here is collective."""

    def __init__(self, setting: Setting, engine: Engine, batch: int, ranks: Ranks, emit: Emit) -> None:
        self.setting, self.engine, self.model = setting, engine, engine.model
        self.ranks, self.emit, self.clock = ranks, emit, setting.clock
        pieces = requests(self.model.config.vocab_size, batch, setting)
        self.step = engine.graphs.step(batch)
        self.step.fill(pieces)
        self.pieces = pieces
        self.drafts = dict(self._drafts(batch))

    def _drafts(self, batch: int):
        """The first pass, over as many tokens of a request as the step; and the ones after it, over one."""
        for of, q_len in (("first", self.setting.q_len), ("next", 1))[: self.setting.draft_tokens]:
            graphs = self.engine.drafter.graphs[q_len]
            graphs.inputs.hidden.normal_()
            step = graphs.step(batch)
            step.fill([piece._replace(tokens=piece.tokens[:q_len]) for piece in self.pieces])
            yield of, step

    def time_step(self) -> None:
        if self.setting.shadow:
            clear(self.model)
        self.emit("step", {}, "us", self.clock, time_calls(self.step.run, self.ranks))
        if self.setting.shadow:
            self._emit_stood_in()
        for of, step in self.drafts.items():
            self.emit("draft", {"of": of}, "us", self.clock, time_calls(step.run, self.ranks))
        if self.setting.graph:
            self._time_engine()

    def _time_engine(self) -> None:
        wall = engine_steps(self.engine, self.pieces, self.setting.kv_len)
        count = round(-self.ranks.most(-len(wall)))  # of all ranks
        if count:
            self.emit("engine_step", {}, "us", "wall", Samples(wall[:count], WARMUP))
        self.step.fill(self.pieces)

    def time_parts(self, progress: Callable[[int, int], None]) -> None:
        state = self._begin()
        seen = stages.watch(self.model, state, self.setting.overlap)
        self._emit_load(seen)
        layers = [(of, call, count) for of, call, count in self._layers(seen) if count]
        alone = self._alone(seen, state) if self.setting.graph else []
        for done, (of, call, count) in enumerate(layers):
            progress(done, len(layers) + len(alone))
            again = as_graph(call, self.ranks) if self.setting.graph else call
            self.emit("layer", {"of": of}, "us", self.clock, _each(time_calls(again, self.ranks, PART_SHARE), count))
        for done, part in enumerate(alone, len(layers)):
            progress(done, len(layers) + len(alone))
            self._time_part(part)
        if not self.setting.graph:
            self._time_line()
        progress(1, 1)

    def _begin(self):
        return self.model.begin(self.step.batch, self.engine.cache.rows)

    def _layers(self, seen: stages.Seen):
        """(kind, a call that runs all layers of the kind, how many they are)."""
        dense, moe, overlap = self.model.dense_layers, self.model.moe_layers, self.setting.overlap

        def run_dense() -> None:
            state = seen.enter("dense")
            for layer in dense:
                run_layer(layer, state)

        yield "dense", run_dense, len(dense)
        yield "moe", lambda: run_moe_layers(moe, seen.enter("moe"), overlap), len(moe)

    def _alone(self, seen: stages.Seen, state) -> list[stages.Part]:
        """The parts of the layers, and what a step has beside them; `state` is the one after the last layer."""
        model, hidden = self.model, self.model.finish(replace(state))
        once = {
            "embed": ("other", self._begin), "final_norm": ("norm", lambda: model.finish(replace(state))),
            "head": ("GEMM", lambda: model.logits(hidden).argmax(-1)),
        }  # fmt: skip
        beside = [stages.Part(name, kind, ("step",), 1, [call]) for name, (kind, call) in once.items()]
        return [*stages.parts(model, seen, self.setting.overlap), *beside]

    def _time_part(self, part: stages.Part) -> None:
        part.run()  # whatever its shapes compile is there before the capture
        samples = _each(time_calls(as_graph(part.run, self.ranks), self.ranks, PART_SHARE), part.layers)
        names = {part.name: (part.category, 1.0)}
        if part.name == stages.EXCHANGE:
            shares = split_calls(part.pairs, self.ranks, self.setting.graph)
            names = dict(zip(("dispatch", "combine"), zip(("Dispatch", "Combine"), shares, strict=True), strict=True))
        for name, (category, share) in names.items():
            us = Samples([share * x for x in samples.us], samples.warmup)
            for of in part.of:
                self.emit("stage", {"stage": name, "category": category, "of": of}, "us", self.clock, us)

    def _time_line(self) -> None:
        """Stages of whole steps. Sends and receives of a half count together."""
        timeline, found = Timeline(self.ranks.device), defaultdict(list)
        count = {"dense": len(self.model.dense_layers), "moe": len(self.model.moe_layers)}
        for repeat in range(TIMELINES_WARMUP + TIMELINES):
            self.ranks.align()
            timeline.begin()
            self.step.run(timeline)
            sums: dict[tuple[str, str], float] = defaultdict(float)
            for span in timeline.spans():
                of = "dense" if span.layer < 0 else "moe"
                sums[of, span.stage.removesuffix("_send").removesuffix("_recv")] += span.end_us - span.start_us
            for key, us in sums.items() if repeat >= TIMELINES_WARMUP else ():
                found[key].append(us / count[key[0]])
        for (of, name), us in found.items():
            params = {"stage": name, "category": stages.CATEGORY[name], "of": of}
            self.emit("stage", params, "us", self.clock, Samples(us, TIMELINES_WARMUP))

    def _emit_stood_in(self) -> None:
        """What the exchange's stand-ins moved and waited since they were cleared."""
        for thing in stood_in(self.model):
            if not thing.calls:
                continue
            for asked, held in thing.held_us.items():
                params = {"half": thing.what, "asked_us": round(asked, 3)}
                if len(held):
                    self.emit("held", params, "us", self.clock, Samples(held.tolist(), 0))
            one = {"sent": thing.sent_bytes, "received": thing.received_bytes, "sms": thing.num_sms}
            for metric, value in one.items():
                unit = "1" if metric == "sms" else "B"
                self.emit(metric, {"half": thing.what}, unit, "none", Samples([value], 0))
            exposed = Samples([thing.exposed_us], 0)
            self.emit("exposed", {"half": thing.what}, "us", self.clock, exposed)

    def _emit_load(self, seen: stages.Seen) -> None:
        counts = [sum(own) for own in seen.counts(len(self.model.moe_layers))]
        for metric, of in (("rows", lambda c: int(c.sum())), ("active", lambda c: int((c > 0).sum()))):
            if counts:
                self.emit(metric, {}, "1", "none", Samples([of(c) for c in counts], 0))


def _each(samples: Samples, count: int) -> Samples:
    return Samples([us / count for us in samples.us], samples.warmup)
