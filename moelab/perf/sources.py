"""What others measured, as tables to interpolate in: the published CSV files, by op and GPU.

DeepGEMM as timed by alibaba/InferSim and in its README; TensorRT-LLM's MLA and SGLang's expert core as tabled by
ai-dynamo/aiconfigurator; FlashMLA as timed by InferSim; DeepSeek's own trace. Every row of the files has its source.
"""

from __future__ import annotations

import functools

from moelab.perf.tables import Curve, Grid, rows

SAME_DIE = ("H100", "H800")  # one compute die and memory; they differ in NVLink
INFERSIM, README, TRT, SGLANG = "DeepGEMM (InferSim benchmark)", "DeepGEMM", "TensorRT-LLM", "SGLang DeepEPMoE core"
FLASHMLA = "FlashMLA (InferSim benchmark)"
# InferSim timed q_a and kv_a apart. Merged they have 17 tiles of 128 columns where q_a has 12; either leaves most of
# 132 SMs idle, and the study saw 16.7 us merged against 15.4 for q_a.
STAND_IN = {(2112, 7168): (1536, 7168)}


@functools.cache
def published_linear() -> dict[tuple[int, int], Curve]:
    """{(n, k): rows -> us} on Hopper with 3.35 TB/s. InferSim's points where it has any, DeepGEMM's README beyond."""
    points: dict[tuple[int, int], dict[float, float]] = {}
    for library in (README, INFERSIM):  # the later one overwrites
        for r in rows("gemm"):
            if r["library"] == library and r["m"]:
                points.setdefault((int(r["n"]), int(r["k"])), {})[float(r["m"])] = float(r["time_us"])
    for shape, stand_in in STAND_IN.items():
        points[shape] = {m: us for m, us in points[shape].items() if m > 256} | points[stand_in]
    return {shape: Curve.of(p, "DeepGEMM on H800 (InferSim, README)", "published") for shape, p in points.items()}


@functools.cache
def published_grouped() -> dict[tuple[str, str], Grid]:
    """{(GPU, part): (experts with rows, rows of the GPU) -> us}; part is up, down, or core (both, and what is between).

    InferSim: H800. SGLang's core is "uniform" by turns, so min(rows, experts of the GPU) of its experts have rows."""
    points: dict[tuple[str, str], dict[tuple[float, float], float]] = {}
    for r in rows("grouped_gemm"):
        if r["layout"] != "masked" or not r["tokens_per_gpu"]:
            continue
        tokens, groups = float(r["tokens_per_gpu"]), float(r["groups"])
        if r["library"] == INFERSIM:
            points.setdefault((r["gpu"], r["proj"]), {})[groups, 8 * tokens] = float(r["time_us"])
        elif r["library"].startswith(SGLANG) and r["distribution"] == "uniform":
            points.setdefault((r["gpu"], "core"), {})[min(groups, 8 * tokens), 8 * tokens] = float(r["time_us"])
    for (_, part), grid in points.items():
        if part == "core":  # fewer rows than experts cannot wake them all: an upper bound fills the corner
            for g in {g for g, _ in grid}:
                grid.setdefault((g, 8.0), grid[g, 64.0])
    name = {"up": "DeepGEMM on H800 (InferSim)", "down": "DeepGEMM on H800 (InferSim)"}
    return {
        key: Grid.of(p, name.get(key[1], f"SGLang's expert core on {key[0]} (aiconfigurator)"), "published")
        for key, p in points.items()
    }


@functools.cache
def published_mla() -> dict[tuple[str, str], Grid]:
    """{(GPU, KV type): (batch of one query each, KV length) -> us} at 128 heads."""
    points: dict[tuple[str, str], dict[tuple[float, float], float]] = {}
    for r in rows("mla"):
        if r["scope"] == "attention kernel" and r["batch"] and r["heads"] == "128":
            points.setdefault((r["gpu"], r["kv_dtype"]), {})[float(r["batch"]), float(r["kv_len"])] = float(
                r["time_us"]
            )
    return {
        (gpu, kind): Grid.of(p, f"{'FlashMLA' if gpu == 'H800' else 'TensorRT-LLM'}'s MLA on {gpu}", "published")
        for (gpu, kind), p in points.items()
    }


# us for 128 and 256 tokens on H800: both absorbed BMMs, and everything between the GEMMs (norms, quantisation, RoPE,
# router, the routed activation). 128 from DeepSeek's own trace (deepseek_trace.csv), 256 an assumption of the checks.
BMM_PAIR = {128.0: 31.0, 256.0: 48.0}
GLUE = {128.0: 45.0, 256.0: 70.0}
GLUE_SPLIT = {"input_norm": 4.0, "qkv_norm": 4.0, "rope_append": 4.0}  # of S1, at any batch
SHARED_GLUE = 4.0  # quantisation and activation of the shared expert, beside its GEMMs
