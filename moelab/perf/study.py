"""The study's statements, one by one, against what follows from the model's shapes and its own numbers.

Each `Statement` has the study's number (looked up in the published table where the table has it), ours, and a
verdict that follows from both and a tolerance, not from an opinion:

    holds      ours lies within the tolerance
    depends    it holds under an assumption that the statement leaves out; the note names it
    differs    it does not
    open       it needs times, which counting cannot give

Source: "Lower latency and higher throughput with multi-node DeepSeek deployment", 2025-04-18.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

from moelab.config import ParallelConfig, preset
from moelab.perf import experts, memory, params
from moelab.results import published

HOLDS, DEPENDS, DIFFERS, OPEN = "holds", "depends", "differs", "open"


@dataclass(frozen=True)
class Statement:
    """`study` and `ours` in `unit`; `ours` is None where the verdict is open."""

    text: str
    study: float
    ours: float | None
    unit: str
    verdict: str
    note: str = ""


def number(section: str, quantity: str, **setting: float | str) -> float:
    """The value of one row of the study's table: `quantity` by its beginning, `setting` by column. Raises KeyError
    unless exactly one value matches."""
    with open(published.path("study"), encoding="utf-8", newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["section"] == section and r["quantity"].startswith(quantity)]
    values = {
        float(r["value"])
        for r in rows
        if all(r[name] == (value if isinstance(value, str) else f"{value:g}") for name, value in setting.items())
    }
    if len(values) != 1:
        raise KeyError(f"{section} / {quantity} {setting}: {len(values)} values in the study's table, not one")
    return values.pop()


def statements() -> list[Statement]:
    """All of them, in the study's order. Takes no arguments: the study's settings are the question."""
    return [*_model(), *_memory(), *_experts(), *_layer_times(), *_open()]


def _within(text: str, study: float, ours: float, unit: str, tolerance: float, note: str = "") -> Statement:
    ok = abs(ours - study) <= tolerance * abs(study)
    return Statement(text, study, ours, unit, HOLDS if ok else DIFFERS, note)


def _true(text: str, study: float, ours: float, unit: str, ok: bool, note: str = "") -> Statement:
    return Statement(text, study, ours, unit, HOLDS if ok else DIFFERS, note)


def _model() -> list[Statement]:
    v3, example = preset("deepseek-v3"), ParallelConfig(32, 4)
    total, active = params.total_params(v3), params.touched_params(v3, v3.num_experts_per_tok)
    nodes = example.ep // example.gpus_per_node
    said = number("deployment", "nodes in the example")
    return [
        _within("parameters in all", number("model", "parameters, total") / 1e9, total / 1e9, "B", 0.005),
        _within("parameters active per token", number("model", "parameters active") / 1e9, active / 1e9, "B", 0.02,
                "without the input embedding, of which a token reads one row"),
        _within("EP128 DP32 TP4 takes this many nodes", said, nodes, "nodes", 0, "EP = DP × TP"),
    ]  # fmt: skip


def _memory() -> list[Statement]:
    v3, one_node = preset("deepseek-v3"), ParallelConfig(8, 1)
    weights = memory.weight_bytes(v3, one_node) / 1e9
    whole = params.total_params(v3) / 1e9
    kv_len = int(number("memory", "tokens per request"))
    fits = {
        (gb, reserve): memory.fit(v3, one_node, kv_len, gb * 1e9, reserve).batch
        for gb, reserve in ((141, 0.07), (141, 0.0), (150, 0.07))
    }
    said = number("memory", "requests that fit")
    return [
        _true("671 GB in FP8 do not fit 8 × 80 GB", 640, whole, "GB", whole > 640),
        _true("they do fit 8 × 141 GB", 1128, 8 * weights, "GB", 8 * weights < 1128,
              "with what every GPU repeats, and the MTP layer"),
        _within("EP8 DP8 TP1: weights per GPU", number("memory", "weights per GPU"), weights, "GB", 0.05,
                "with the MTP layer"),
        _within("leaves for KV and activations", number("memory", "left for KV"), 141 - weights, "GB", 0.05),
        _within("KV cache per token", number("model", "KV cache per token"), memory.kv_bytes_per_token(v3), "B", 0),
        Statement(f"requests of {kv_len:,} tokens per GPU", said, fits[141, 0.07], "requests", DEPENDS,
                  f"141e9 B and 7 % reserve: {fits[141, 0.07]}; no reserve: {fits[141, 0.0]}; "
                  f"150e9 B and 7 %: {fits[150, 0.07]}"),
        _true("so batch 128 does not fit EP8 DP8 TP1", 128, max(fits.values()), "requests",
              max(fits.values()) < 128, "the largest of the three readings above"),
    ]  # fmt: skip


def _experts() -> list[Statement]:
    v3 = preset("deepseek-v3")
    tp8, ep8, ep128 = ParallelConfig(1, 8), ParallelConfig(8, 1), ParallelConfig(128, 1)
    tokens = experts.total_tokens(1, 2, tp8)
    many = experts.total_tokens(128, 2, ep8)
    all_tp8 = experts.active_experts(tokens, v3, tp8) * 8
    busy = experts.active_experts(many, v3, ep8)
    local = v3.n_routed_experts / ep128.ep
    shapes = {c.name: c.params for c in params.components(v3) if c.part == "attention" and not c.mtp}
    found = [
        _within("EP8 DP1 TP8, batch 1: tokens in all", number("pareto", "tokens in the whole batch"), tokens,
                "tokens", 0, "so a batch counts one DP group, not one GPU"),
        _true("which touch at most this many experts", number("pareto", "experts touched"), all_tp8,
              "experts", all_tp8 <= 16, "expected, of independent uniform routing"),
        _within("and at most this many parameters", number("pareto", "parameters touched") / 1e9,
                params.touched_params(v3, 16) / 1e9, "B", 0.01, "16 experts in each MoE layer"),
        _within("EP8, batch 1: active experts per GPU", number("pareto", "mean active experts per GPU"),
                experts.active_experts(tokens, v3, tp8), "experts", 0.05, "two tokens may share an expert"),
        _within("EP8, large batch: active experts per GPU", number("pareto", "active experts per GPU, large"),
                busy, "experts", 0.01, "at batch 128"),
        _within("EP128: experts per GPU", number("pareto", "experts per GPU"), local, "experts", 0),
        Statement("TP repeats kv_a and kv_b (and the latent cache)", (shapes["kv_a"] + shapes["kv_b"]) / 1e6,
                  (shapes["kv_a"] + shapes["q_a"]) / 1e6, "M", DIFFERS,
                  "parameters a layer. kv_b, split in k and v, is cut by heads; q_a is repeated, and so is the cache"),
    ]  # fmt: skip
    for parallel in (ep8, ep128):
        said = number("roofline", "mean tokens per expert m, figure text", ep=parallel.ep)
        rows = experts.tokens_per_expert(128, 2, v3, parallel)
        note = "the figure's text; the study's own formula gives ours"
        found.append(_within(f"EP{parallel.ep}, batch 128: tokens per expert", said, rows, "tokens", 0, note))
    return found


def _layer_times() -> list[Statement]:
    """The breakdown's own arithmetic: what its bars say against what its text says of them."""
    section = "layer breakdown"

    def bar(quantity: str, mode: str = "", ep: int = 128) -> float:
        return number(section, quantity, ep=ep, mode=mode)

    total = "one MoE layer, total"
    none, overlap, micro = (bar(total, mode) for mode in ("NoOverlap", "DispatchOverlap", "MicroBatch"))
    moved = {mode: bar("Dispatch", mode) + bar("Combine", mode) for mode in ("NoOverlap", "MicroBatch")}
    ep8_moved = moved["MicroBatch"] - number(section, "communication of EP128 MicroBatch above EP8")
    rest = bar(total, ep=8) - bar("GroupGEMM", ep=8) - ep8_moved
    whole_gemm = none - moved["NoOverlap"] - rest
    # 256 tokens × 8 copies of 7,408 and 14,336 bytes, of which 15/16 leave the node.
    rates = {name: 256 * size * 15 / 16 / bar(name, "NoOverlap") / 1e3
             for name, size in (("Dispatch", 59_264), ("Combine", 114_688))}  # fmt: skip
    slow, fast = sorted(rates.values())
    return [
        _within("DispatchOverlap saves", number(section, "DispatchOverlap saving", unit="us"), none - overlap, "µs", 0),
        _within("MicroBatch saves, of the time", number(section, "MicroBatch saving"), 100 * (none - micro) / none,
                "%", 0.02),
        _within("overlap makes it faster by up to", number("overlap", "speed-up from overlap"),
                100 * (none / micro - 1), "%", 0.02, "as a speed; as a time it is the 29 % above"),
        _within("MicroBatch saves of communication", number(section, "communication saved"),
                moved["NoOverlap"] - moved["MicroBatch"], "µs", 0),
        Statement("EP8 → EP128 GroupGEMM, like for like", bar("GroupGEMM", "MicroBatch"), whole_gemm, "µs", DIFFERS,
                  "270 µs are two half batches; one whole batch, by the bars' difference, is ours"),
        _within("share of InfiniBand reached", number(section, "share of InfiniBand", value="0.5") * 100,
                100 * slow / 50, "%", 0.1,
                f"{slow:.1f} and {fast:.1f} of 50 GB/s off the node; elsewhere the study says a third"),
        Statement("the EP8 bar ran on H100 (80 GB) at batch 128", 80, memory.weight_bytes(
            preset("deepseek-v3"), ParallelConfig(8)) / 1e9, "GB", DIFFERS,
            "weights alone exceed the GPU: a layer's benchmark, no deployment"),
    ]  # fmt: skip


def _open() -> list[Statement]:
    ratio = number("pareto", "throughput ratio EP128 / EP8")
    later = "needs measured times: the performance model's question"
    return [
        Statement("EP128 / EP8 throughput at 40–80 tok/s", ratio, None, "×", OPEN, later),
        Statement("batch below which EP128's speed hardly changes", 64, None, "requests", OPEN, later),
        Statement("batch from which MicroBatch gains", number("overlap", "batch from which"), None, "requests",
                  OPEN, later),
    ]  # fmt: skip
