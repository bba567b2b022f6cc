"""Points other than whole deployments that the model is judged by: the study's layer, attention modules, kernels and
exchanges of sources that it was not fitted to, and the project's own Records.

    study      layer breakdown (H100, batch 128, q 2, KV 5000): totals and GroupGEMM, with the study's two rates
    claim      what the study says of whole deployments, where it has a number
    module     TensorRT-LLM's attention, qkv_a to o_proj: only its MLA kernel is in the tables
    kernel     DeepGEMM's README at 64 and 128 rows, SGLang's expert core on H100, DeepSeek's trace
    exchange   DeepEP as DeepSeek and as pplx-garden measured it, the pplx README at EP128
    recorded   Records of kernels, predicted as if they had not been made
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from moelab.config import ParallelConfig, preset
from moelab.hardware import gpu as find_gpu
from moelab.perf import costs, laws, sources, study
from moelab.perf.fabric import Exchange
from moelab.perf.kernels import Kernels, estimate_us
from moelab.perf.laws import published_points
from moelab.perf.prediction import UNMODELLED, Prediction, predict
from moelab.perf.sweeps import study_sweep, throughput_at
from moelab.perf.tables import NOTHING_RECORDED, Tables, rows
from moelab.perf.term import Term, combined
from moelab.perf.validate import Row, deployments

MODEL = preset("deepseek-v3")
STUDY = {"batch": 128, "kv_len": 5000, "draft_tokens": 1, "acceptance": 0.6, "alltoall": "pplx-2025"}
MODES = {"none": "NoOverlap", "dispatch": "DispatchOverlap", "microbatch": "MicroBatch"}


def every(tables: Tables) -> list[Row]:
    """All of them."""
    found = (
        *study_rows(tables),
        *study_claims(),
        *module_rows(),
        *kernel_rows(),
        *exchange_rows(),
        *recorded_rows(tables),
    )
    return list(found)


def study_layer(overlap: str, ep: int = 128, tables: Tables | None = None) -> Prediction:
    """The study's breakdown, by the same kernels: its rates between nodes, pplx-kernels' NVLink times within."""
    return predict("h100", ep, overlap=overlap, tables=tables or NOTHING_RECORDED, **STUDY)


def study_rows(tables: Tables) -> Iterator[Row]:
    source = "Lower latency and higher throughput with multi-node DeepSeek deployment (2025-04-18)"

    def row(name: str, measured: float, predicted: float, low: float, high: float, unit: str = "us") -> Row:
        return Row(name, "study", name, unit, measured, predicted, low, high, source=source)

    for ep, overlap in ((8, "none"), *((128, o) for o in MODES)):
        mode = MODES[overlap] if ep > 8 else ""
        p = study_layer(overlap, ep, tables)
        name = f"EP{ep} {mode}".strip()
        low, high = p.interval["layer_us"]
        measured = study.number("layer breakdown", "one MoE layer, total", ep=ep, mode=mode)
        yield row(f"{name}: layer", measured, p.layer_us["total"], low, high)
        if (ep, overlap) in ((8, "none"), (128, "microbatch")):
            us, error = p.layer_us["GroupGEMM"], p.origins["GroupGEMM"].error
            yield row(f"{name}: GroupGEMM", study.number("layer breakdown", "GroupGEMM", ep=ep, mode=mode),
                      us, us / (1 + error), us * (1 + error))  # fmt: skip


def study_claims() -> Iterator[Row]:
    """Its statements about whole deployments that have a number, by published tables alone (see `study_sweep`). Bounds
    count as reached from the right side."""
    source = "Lower latency and higher throughput with multi-node DeepSeek deployment (2025-04-18)"
    frame = study_sweep()
    small, large = (frame[frame["ep"] == ep] for ep in (8, 128))
    ratios = [
        throughput_at(large, speed) / throughput_at(small, speed)
        for speed in range(40, 81)
        if throughput_at(small, speed)
    ]
    at_64 = [part[(part["tp"] == 1) & (part["batch"] == 64)]["tok_s_per_node"].item() for part in (small, large)]
    alone = predict("h200", 1, 8, tables=NOTHING_RECORDED, **{**STUDY, "batch": 1})
    fits = predict("h200", 8, tables=NOTHING_RECORDED, **STUDY).largest_batch
    for name, unit, measured, found in (
        ("EP128 / EP8 throughput, most over 40-80 tok/s", "x", 5.0, max(ratios)),
        ("EP8 / EP128 throughput at batch 64, at least", "x", 1.0, min(at_64[0] / at_64[1], 1.0)),
        ("EP8 TP8 batch 1 speed, at least", "tok/s", 100.0, min(alone.tok_s_per_request, 100.0)),
        ("requests of 5,000 tokens on EP8", "requests", 100.0, fits),
    ):
        yield Row(name, "study claim", name, unit, measured, found, source=source)


def module_rows() -> Iterator[Row]:
    """S1 and S2 without the gate and what the glue holds for the routed experts."""
    for r in rows("mla"):
        if not r["scope"].startswith("module"):
            continue
        kernels = Kernels(find_gpu(r["gpu"]), MODEL, NOTHING_RECORDED)
        batch, kv = float(r["batch"]), float(r["kv_len"])
        terms = [kernels.linear(batch, n, k) for n, k in costs.attention_shapes(MODEL).values()]
        terms += [kernels.bmm(batch, 128, stage) for stage in ("bmm_k", "bmm_v")]
        terms += [kernels.mla(batch, 1, 128, kv)]
        glue = kernels.glue(batch)
        terms += [glue[stage] for stage in sources.GLUE_SPLIT if stage != "input_norm"]
        name = f"{r['gpu']} attention module, batch {batch:g}, KV {kv:g}"
        yield _row(name, "module", float(r["time_us"]), combined(terms), r["source"])


def kernel_rows() -> Iterator[Row]:
    h800, h100 = (Kernels(find_gpu(name), MODEL, NOTHING_RECORDED) for name in ("H800", "H100"))
    for r in rows("gemm"):
        shape = (int(r["n"] or 0), int(r["k"] or 0))
        if r["library"] == sources.README and r["m"] in ("64", "128") and shape in sources.published_linear():
            if shape[1] != 512:  # the only source of that shape
                term = h800.linear(float(r["m"]), *shape)
                yield _row(f"GEMM {r['m']} x {shape[0]} x {shape[1]}", "kernel", float(r["time_us"]), term, r["source"])
    for r in rows("grouped_gemm"):
        if r["library"].startswith(sources.SGLANG) and r["gpu"] == "H100" and r["distribution"] == "uniform":
            tokens, groups = float(r["tokens_per_gpu"]), float(r["groups"])
            parts = h100.grouped(8 * tokens, min(groups, 8 * tokens))
            term = combined([*parts.values(), h100.activation(8 * tokens, 2048)])
            name = f"expert core EP{r['ep']}, {tokens:g} tokens"
            yield _row(name, "kernel", float(r["time_us"]), term, r["source"])
    yield from _trace(h800)


def _trace(kernels: Kernels) -> Iterator[Row]:
    """Kernels of DeepSeek's trace that no table took from it: EP128, 64 requests of two tokens, KV 4096."""
    shapes = costs.attention_shapes(MODEL)
    routed = kernels.grouped(1024, 2)
    ours = {
        "qkv_a GEMM": kernels.linear(128, *shapes["qkv_a"]),
        "q_b GEMM": kernels.linear(128, *shapes["q_b"]),
        "o_proj GEMM": kernels.linear(128, *shapes["o_proj"]),
        "MLA decode": kernels.mla(64, 2, 128, 4096),
        "routed gate+up grouped GEMM": routed["gate_up"],
        "routed down grouped GEMM": routed["down"],
    }
    for r in rows("deepseek_trace"):
        if r["kernel"] in ours:
            yield _row(f"trace: {r['kernel']}", "kernel", float(r["time_us"]), ours[r["kernel"]], r["source"])


def exchange_rows() -> Iterator[Row]:
    sets = (
        ("DeepEP V1 low-latency", "RDMA", "H800", "deepep"),
        ("DeepEP (measured by pplx-garden)", "CX7", "H100", "deepep"),
        ("pplx-kernels", "IBGDA", "H100", "pplx-2025"),
    )
    for library, fabric, gpu, name in sets:
        for stage in ("dispatch", "combine"):
            for ep, tokens, us in published_points(library, fabric, stage):
                if ep == 8 or (name == "pplx-2025" and (ep, tokens) != (128, 128)):  # others of pplx are its law
                    continue
                road = "nvlink" if ep <= 8 else "ib400"
                exchange = Exchange(find_gpu(gpu), MODEL, ParallelConfig(ep), name, road, NOTHING_RECORDED)
                yield _row(f"{library} {stage}, EP{ep}, {tokens} tokens", "exchange", us, exchange.time(stage, tokens),
                           "alltoall_published.csv")  # fmt: skip


def recorded_rows(tables: Tables) -> Iterator[Row]:
    """The fastest backend of each recorded setting, against what published tables and estimates alone would have
    said of that GPU."""
    for (op, gpu), points in tables.recorded.items():
        best: dict[tuple, tuple[float, dict]] = {}
        for params, us, _ in points:
            key = tuple(sorted((k, v) for k, v in params.items() if k != "backend"))
            if key not in best or us < best[key][0]:
                best[key] = (us, dict(params))
        kernels = Kernels(find_gpu(gpu), MODEL, NOTHING_RECORDED)
        for us, params in best.values():
            term = _without_records(op, kernels, params)
            if term is not None:
                shown = " ".join(f"{k}={v}" for k, v in sorted(params.items()) if k not in ("backend", "bench", "gpus"))
                yield _row(f"{gpu} {op} {shown}", "recorded", us, term, "Records")


def _without_records(op: str, kernels: Kernels, p: dict) -> Term | None:
    """What the model says of one recorded setting; None for a kernel that no step has."""
    if op == "linear":
        return kernels.linear(p["m"], p["n"], p["k"])
    if op == "mla":
        return kernels.mla(p["batch"], p["q_len"], p["heads"], p["kv_len"], p["kv"])
    if op == "grouped_gemm" and p["layout"] == "padded":
        return kernels.grouped(p["rows"], p["active"])[p["projection"]]
    if op == "bmm":
        return kernels.bmm(p["tokens"], p["heads"], {"k_b": "bmm_k", "v_b": "bmm_v"}[p["projection"]])
    if op == "quantize":
        return kernels.stream(3 * p["m"] * p["k"])
    if op == "silu_mul" and p["layout"] == "padded":
        return kernels.stream(5 * p["populated"] * p["i"])
    return None


def _row(name: str, kind: str, measured: float, term: Term, source: str) -> Row:
    error = max(term.error, UNMODELLED)
    return Row(name, kind, name, "us", measured, term.us, term.us / (1 + error), term.us * (1 + error), source=source)


@dataclass(frozen=True)
class LeftOut:
    """What a rule or a fit says about `judged` when that was not among its inputs."""

    left_out: str
    judged: str
    points: int
    median: float
    worst: float


def leave_one_out() -> list[LeftOut]:
    """Every constant that was fitted, against a source that the fit did not see: DeepEP's law without each of its
    EPs; the rules that carry a table to another GPU, against that GPU's own table."""
    found = []
    name = "DeepEP low-latency (aiconfigurator table)"
    for stage in laws.STAGES:
        times = [(ep, t, us) for ep, t, us in published_points(name, "", stage) if ep > 8 and 32 <= t <= 256]
        for out in (16, 32, 64):
            size = laws.SIZE[stage]
            kept = [(t * size * (1 - 8 / ep), us) for ep, t, us in times if ep != out]
            alpha, beta, _ = laws.fit(kept)
            errors = [(alpha + t * size * (1 - 8 / ep) / beta / 1e3) / us - 1 for ep, t, us in times if ep == out]
            found.append(_left_out(f"EP{out}", f"law of {stage} between nodes", errors))
    for home, target in (("H100", "H200"), ("H200", "H100")):
        found.append(
            _left_out(f"TensorRT-LLM's MLA on {target}", f"table of {home}, scaled", _mla_errors(home, target))
        )
    found.append(_left_out("SGLang's expert core on H200", "InferSim's table of H800, scaled", _core_errors()))
    nameless = dataclasses.replace(find_gpu("H200"), name="H200 without tables")
    on_h200 = [r for r in rows("deployments") if r["gpu"] == "H200"]
    errors = [r.error for r in deployments(on_h200, NOTHING_RECORDED, {"H200": nameless}) if r.error is not None]
    found.append(_left_out("every table and law of H200", "deployments on H200", errors))
    return found


def _mla_errors(home: str, target: str) -> list[float]:
    tables = sources.published_mla()
    truth, base = tables[target, "bf16"], tables[home, "bf16"]
    errors = []
    for i, batch in enumerate(truth.x):
        for j, kv in enumerate(truth.y):
            cost = costs.mla(batch, 1, 128, kv, MODEL)
            ratio = estimate_us("mla", cost, find_gpu(target)) / estimate_us("mla", cost, find_gpu(home))
            errors.append(base.at(batch, kv) * ratio / truth.us[i, j] - 1)
    return errors


def _core_errors() -> list[float]:
    nameless = dataclasses.replace(find_gpu("H200"), name="H200 without its table")
    kernels, truth = Kernels(nameless, MODEL, NOTHING_RECORDED), sources.published_grouped()["H200", "core"]
    errors = []
    for i, active in enumerate(truth.x):
        for j, pairs in enumerate(truth.y):
            terms = [*kernels.grouped(pairs, active).values(), kernels.activation(pairs, 2048)]
            errors.append(combined(terms).us / truth.us[i, j] - 1)
    return errors


def _left_out(left_out: str, judged: str, errors: list[float]) -> LeftOut:
    size = sorted(abs(e) for e in errors)
    n = len(size)
    return LeftOut(left_out, judged, n, float((size[(n - 1) // 2] + size[n // 2]) / 2), float(max(errors, key=abs)))
