"""The model against published deployments and measured kernels: an error for every point.

Nothing is tuned here. A row's inputs come from its own columns, by the rules below, which are the same for all rows;
what the model was fitted to (tables of kernels, laws of fabrics) is never judged with its own numbers.

Rules for deployments (deployments_published.csv, or a table of the same columns):

 * batch of a DP group = batch per GPU · tp. Where a nominal and a mean batch are given the step is predicted at both;
   their middle is compared and the interval covers both: the step ends with the fullest group.
 * no batch stated, but tok/s per GPU and per user: their ratio is the number of requests per GPU.
 * kv_len missing: isl + osl/2. Drafts missing: none. EP that does not divide: the fewest redundant experts that do.
 * overlap: "two …-batch" is microbatch, "single-batch" and "combine with …" are dispatch, else none.
 * precision that names KV (or MLA and KV) as FP8, or NVFP4 experts, is taken as such.
 * a row that lacks batch or whose GPU is unknown is passed over, with the reason.

Causes are terms for a class of rows, applied to every row of the class, with the error before and after:

    early DeepEP          deployments over NICs from before July 2025: DeepEP's low-latency kernels then sent every
                          copy by NIC, also inside the node
    host-driven exchange  TensorRT-LLM between nodes: NCCL, whose threads on the host post the messages
    prefill in between    engines that prefill themselves ("aggregated"): batch/osl prefills of isl tokens per step
    uneven groups         requests that arrive on several DP groups: the step ends with the fullest of them, which at
                          random holds B + c·sqrt(B·(1 − 1/dp)) where the mean is B (c: expected maximum of dp normal
                          draws, 1.43 of 8), and never more than a recipe's cap

The study's rows are claims of a figure and stand in `moelab.perf.points`.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

from moelab.config import ConfigError
from moelab.hardware import GPU
from moelab.perf.prediction import Prediction, predict
from moelab.perf.prefill import prefill
from moelab.perf.tables import Tables, load, rows

# Every constant that was fitted or assumed, and what to. No deployment is among the sources.
FITTED = (
    ("tables of kernels", "InferSim, DeepGEMM's README, aiconfigurator (SGLang, TensorRT-LLM); read, not fitted"),
    ("t0, f, b of linear", "InferSim's and the README's GEMMs on H800"),
    ("t0, f of mla; b", "TensorRT-LLM's kernel on H100 and H200, FlashMLA's on H800; FlashMLA's memory-bound rate"),
    ("t0, f, b of grouped", "InferSim's grouped GEMMs on H800, SGLang's expert core on H100 and H200"),
    ("BMM and glue, 128 tokens; 256", "DeepSeek's trace; an assumption of the checks"),
    ("law of deepep on 400G", "aiconfigurator's DeepEP table, EP16-64, 32 to 256 tokens, rounded"),
    ("law of deepep over NVLink", "aiconfigurator's table of 2026-07, EP8, from 64 tokens, per GPU"),
    ("law of deepep-2025", "DeepEP of early 2025 as pplx-kernels quotes it, EP8-128 at 128 tokens"),
    ("law of pplx-2025", "pplx-kernels README, one and 128 tokens; at EP128 the study's two rates"),
    ("latency of cpu-proxy", "pplx-kernels over IBRC, one token"),
    ("attention and exchange of prefill", "FlashAttention-3's paper; README files of DeepEP and UCCL-EP"),
    ("host 1.5 ms, graphs 0.5 GB, reserve 7 %", "assumptions"),
    ("12 % that no term holds", "aiconfigurator's published error of TPOT (arXiv 2601.06288)"),
)
LENGTHS = 0.9  # InferenceX draws lengths from 0.8-1.0 of nominal


@dataclass(frozen=True)
class Row:
    """One point. `error` = predicted / measured − 1 (None: passed over); `before`: without `causes`."""

    id: str
    kind: str  # deployment, study, module, kernel, exchange
    quantity: str
    unit: str
    measured: float | None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    causes: tuple[str, ...] = ()
    before: float | None = None
    reason: str = ""  # why it was passed over
    inputs: Mapping[str, object] = field(default_factory=dict)
    source: str = ""

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1

    @property
    def inside(self) -> bool | None:
        return None if self.low is None else self.low <= self.measured <= self.high

    @property
    def half_width(self) -> float | None:
        return None if self.low is None else (self.high - self.low) / (self.high + self.low)


@dataclass(frozen=True)
class Inputs:
    """Arguments of `predict` for one row: at one batch or two, without and with the causes of its class."""

    batches: tuple[float, ...]
    settings: dict
    causes: dict[str, dict]  # name -> changed settings
    prefill: tuple[float, float] | None = None  # (isl, osl) where the engine prefills itself
    fullest: float | None = None  # batch of the fullest of several groups that serve arrivals


def read(path: str | Path) -> list[dict[str, str]]:
    """A table of deployments in a file. Raises ConfigError without its columns."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            found = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    needed = {"id", "gpu", "tp", "kv_len", "batch_per_gpu"}
    missing = needed - set(found[0] if found else ())
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}: columns are those of deployments_published.csv")
    return found


def deployments(
    table: Sequence[Mapping[str, str]] | None = None,
    tables: Tables | None = None,
    instead: Mapping[str, GPU] | None = None,
) -> list[Row]:
    """All rows of the published table, or of another one with its columns. `instead`: {name in the table: a GPU}."""
    tables = load() if tables is None else tables
    return [deployment_row(r, tables, instead) for r in (rows("deployments") if table is None else table)]


def deployment_row(r: Mapping[str, str], tables: Tables, instead: Mapping[str, GPU] | None = None) -> Row:
    common = {"id": r["id"], "kind": "deployment", "source": r.get("source") or ""}
    if r.get("engine") == "study":
        return Row(**common, quantity="", unit="", measured=None, reason="a claim of the study, judged as one")
    measured, quantity = _measured(r)
    if measured is None:
        return Row(**common, quantity="step", unit="ms", measured=None, reason="neither step time nor speed published")
    try:
        given = inputs(r)
        if instead and r["gpu"] in instead:
            given.settings["gpu"] = instead[r["gpu"]]
        changed = {k: v for settings in given.causes.values() for k, v in settings.items()}
        plain = _range(given, {}, tables)
        mended = _range(given, changed, tables, causes=True) if given.causes else plain
    except ConfigError as error:
        return Row(**common, quantity=quantity, unit="ms", measured=measured, reason=str(error))
    middle, low, high = mended
    return Row(
        **common, quantity=quantity, unit="ms", measured=measured, predicted=middle, low=low, high=high,
        causes=tuple(given.causes), before=plain[0] / measured - 1 if given.causes else None,
        inputs={"batch": list(given.batches), **given.settings, **changed},
    )  # fmt: skip


def inputs(r: Mapping[str, str]) -> Inputs:
    """The rules of the module's text. Raises ConfigError for a row that cannot be predicted."""
    tp = int(_float(r, "tp") or 1)
    nominal, mean = _float(r, "batch_per_gpu"), _float(r, "batch_per_gpu_mean_est")
    if nominal is None and mean is None:
        per_gpu, per_user = _float(r, "tok_s_per_gpu"), _float(r, "tok_s_per_user")
        if per_gpu is None or per_user is None or not _float(r, "kv_len"):
            raise ConfigError("batch not stated")
        nominal = per_gpu / per_user
    batches = tuple(dict.fromkeys(b * tp for b in (nominal, mean) if b is not None))
    kv_len = _float(r, "kv_len") or (_float(r, "isl") or 0) + (_float(r, "osl") or 0) / 2
    ep, dp = int(_float(r, "ep") or tp), int(_float(r, "dp") or 1)
    precision, note, drafts = r.get("precision") or "", r.get("note") or "", int(_float(r, "draft_tokens") or 0)
    settings = {
        "gpu": r["gpu"], "dp": dp, "tp": tp, "kv_len": kv_len, "draft_tokens": drafts,
        "acceptance": _float(r, "acceptance") or 0.0, "overlap": _overlap(r.get("overlap") or ""),
        "kv_dtype": "fp8" if re.search(r"FP8[^;]*\bKV", precision) else "bf16",
        "expert_dtype": "fp4" if "NVFP4 MoE" in precision else "fp8",
    }  # fmt: skip
    if ep == 1 and tp > 1:
        settings["ep"] = 1
    else:
        settings["redundant_experts"] = -256 % (dp * tp)
    causes: dict[str, dict] = {}
    engine, gpus = r.get("engine") or "", dp * tp
    if gpus > 8 and "NVL72" not in (r.get("interconnect") or ""):
        if "TensorRT-LLM" in engine:
            causes["host-driven exchange"] = {"alltoall": "cpu-proxy"}
        elif _date(r.get("source") or "") < "2025-07":
            causes["early DeepEP"] = {"alltoall": "deepep-2025"}
    aggregated = "ggregated serving" in note and _float(r, "isl") and _float(r, "osl")
    if aggregated:
        causes["prefill in between"] = {}
    fullest = None
    if mean is not None and _float(r, "concurrency") and dp > 1:
        causes["uneven groups"] = {}
        fullest = _fullest(mean, dp) if "is the cap" not in note else min(_fullest(mean, dp), nominal)
    return Inputs(batches, settings, causes, (float(r["isl"]), float(r["osl"])) if aggregated else None, fullest)


def summary(found: Sequence[Row]) -> dict[str, dict]:
    """Per kind: rows judged, median and worst absolute error, share inside the interval, its median half-width."""
    result = {}
    for kind in dict.fromkeys(row.kind for row in found):
        judged = [row for row in found if row.kind == kind and row.error is not None]
        if not judged:
            continue
        errors = sorted(abs(row.error) for row in judged)
        ranged = [row for row in judged if row.low is not None]
        worst = max(judged, key=lambda row: abs(row.error))
        result[kind] = {
            "rows": len(judged),
            "median_abs_error": _median(errors),
            "worst_error": worst.error,
            "worst_row": worst.id,
            "beyond_25_percent": [row.id for row in judged if abs(row.error) > 0.25],
            "inside_interval": sum(bool(row.inside) for row in ranged) / len(ranged) if ranged else None,
            "median_half_width": _median(sorted(row.half_width for row in ranged)) if ranged else None,
            "passed_over": sum(row.kind == kind and row.error is None for row in found),
        }
    return result


def _range(given: Inputs, changed: Mapping, tables: Tables, causes: bool = False) -> tuple[float, float, float]:
    """(prediction, low, high) of the step in ms: the middle and the whole range of the row's batches, or with `causes`
    the fullest group's, where there is one, its range widened to the steps at the other batches."""
    found = {}
    for batch in (*given.batches, *([given.fullest] if causes and given.fullest else [])):
        p = predict(batch=batch, tables=tables, **given.settings | changed)
        extra = _prefill_ms(p, *given.prefill, tables) if causes and given.prefill else 0.0
        found[batch] = [ms + extra for ms in (p.step_ms, *p.interval["step_ms"])]
    if causes and given.fullest:
        middle, low, high = found[given.fullest]
        steps = [x[0] for x in found.values()]
        return middle, min(low, *steps), max(high, *steps)
    middle = sum(found[b][0] for b in given.batches) / len(given.batches)
    return middle, min(x[1] for x in found.values()), max(x[2] for x in found.values())


def _fullest(mean: float, groups: int) -> float:
    """Expected batch of the fullest of `groups` that share requests at random; Blom's estimate of the maximum."""
    chance = NormalDist().inv_cdf((groups - 0.375) / (groups + 0.25))
    return mean + chance * math.sqrt(mean * (1 - 1 / groups))


def _prefill_ms(p: Prediction, isl: float, osl: float, tables: Tables) -> float:
    """What other requests' prefills add to a step: each of `batch` requests makes way for one per osl tokens."""
    d = p.deployment
    one = prefill(
        d.gpu, d.parallel.dp, d.parallel.tp, ep=1 if d.expert_tp else None, prompt_len=LENGTHS * isl,
        tables=tables, redundant_experts=d.redundant, fabric=d.fabric, alltoall=d.alltoall,
    )  # fmt: skip
    return d.batch * one.ttft_ms / (LENGTHS * osl)


def _measured(r: Mapping[str, str]) -> tuple[float | None, str]:
    step, speed = _float(r, "step_ms"), _float(r, "tok_s_per_user")
    if step is not None:
        return step, "step"
    if speed is None:
        return None, ""
    drafts, a = int(_float(r, "draft_tokens") or 0), _float(r, "acceptance") or 0.0
    return 1e3 * sum(a**i for i in range(drafts + 1)) / speed, "step, from tok/s per user"


def _overlap(text: str) -> str:
    if re.search(r"\btwo\b.*batch", text) and "off" not in text:
        return "microbatch"
    return "dispatch" if text.startswith(("single-batch", "combine with")) else "none"


def _date(source: str) -> str:
    """The last year-month of a source's text; late if there is none."""
    return max(re.findall(r"20\d\d-\d\d", source), default="9999")


def _float(r: Mapping[str, str], name: str) -> float | None:
    text = r.get(name)
    try:
        value = float(text) if text not in (None, "") else None
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {text!r}, not a number") from None
    return None if value is None or math.isnan(value) else value


def _median(values: Sequence[float]) -> float:
    n = len(values)
    return (values[(n - 1) // 2] + values[n // 2]) / 2
