"""How long a kernel takes on a GPU, from the nearest thing that was measured.

For each op, in this order:

 1. a Record on this GPU (the user's own before the package's), interpolated between its points;
 2. a published table of this GPU or of one with the same die and memory (H100 and H800), interpolated;
 3. a Record or a published table of another GPU, times the ratio of both GPUs' estimates (below): extrapolated;
 4. the estimate alone: extrapolated.

Beyond the end of a table the time at its end is carried on by the ratio of estimates, and is extrapolated too.

The *estimate* of a kernel is a roofline that pays to start and never reaches the roofs,

    K = t0 + max(FLOP / (f·peak), bytes / (b·bandwidth)),

with t0, f and b per op in ESTIMATES. Those of `linear` are fitted to InferSim's and DeepGEMM's rows on H800, of `mla`
to TensorRT-LLM's on H100 and H200 (but for b, which 128 heads do not show: FlashMLA's memory-bound rate), of `grouped`
to InferSim's and SGLang's, of `bmm` to the two points of 128 and 256 tokens. The tests hold their median residual under
10 % and eight in ten under 20 %. Nothing is fitted to a deployment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moelab.config import ModelConfig
from moelab.hardware import GPU
from moelab.hardware import gpu as find_gpu
from moelab.perf import costs
from moelab.perf.costs import Cost
from moelab.perf.sources import (
    BMM_PAIR,
    GLUE,
    GLUE_SPLIT,
    SAME_DIE,
    published_grouped,
    published_linear,
    published_mla,
)
from moelab.perf.tables import Curve, Grid, Tables
from moelab.perf.term import Term, combined

ESTIMATES = {  # t0 us, share of peak, share of bandwidth
    "linear": (6.0, 0.58, 0.82),
    "grouped": (11.0, 0.54, 0.78),
    "mla": (20.0, 0.56, 0.85),
    "bmm": (4.0, 0.60, 0.70),
    "elementwise": (2.0, 1.0, 0.80),
}
# f is of the nominal peak, which H100, H200 and H800 do not hold under load (865 of 989 TFLOP/s: FlashMLA's notes). H20
# has a seventh of it at the same power and need not slow down.
UNTHROTTLED = {"H20": 989 / 865}
# Half-widths of 80 %. A table's own error is what two sources differ by at the same shape: DeepGEMM's README and
# InferSim's timing of it by 10-20 % at 64 and 128 rows; FlashMLA and TensorRT-LLM by 5-10 %; each point of InferSim's
# grouped GEMMs is one draw of 0.7-1.3 rows.
TABLE_ERROR = {"linear": 0.20, "grouped": 0.15, "mla": 0.08, "bmm": 0.25, "elementwise": 0.30}
RECORD_ERROR = 0.05  # the same kernel on another day, clock and temperature
BEYOND_ERROR = 0.10  # past the end of a table
OTHER_GPU_ERROR = 0.10  # scaled between GPUs
ESTIMATE_ERROR = 0.25  # the estimate alone


def estimate_us(op: str, cost: Cost, gpu: GPU) -> float:
    """K of the module's text, in us."""
    t0, f, b = ESTIMATES[op]
    f *= UNTHROTTLED.get(gpu.name, 1.0)
    return t0 + max(
        cost.flops / (f * costs.peak_tflops(gpu, cost.precision)) / 1e6, cost.bytes / (b * gpu.hbm_gb_s) / 1e3
    )


@dataclass(frozen=True)
class Kernels:
    """Times of kernels on one GPU for one model."""

    gpu: GPU
    model: ModelConfig
    tables: Tables

    def linear(self, m: float, n: int, k: int, precision: str = "fp8") -> Term:
        """[m, k] × [k, n]."""

        def cost(rows: float) -> Cost:
            return costs.linear(rows, n, k, precision)

        if precision != "fp8":
            return self._estimate("linear", cost(m))
        found = self._curve("linear", "m", published_linear().get((n, k)), n=n, k=k)
        like = (
            self._like(n, k) if found is None or (found[0] != self.gpu.name and self.gpu.name not in SAME_DIE) else None
        )
        if like is None:
            return self._read("linear", found, m, cost)
        term = self.linear(m, *like)
        ratio = estimate_us("linear", cost(m), self.gpu) / estimate_us("linear", costs.linear(m, *like), self.gpu)
        return term.moved(ratio, BEYOND_ERROR, f"shape {n} x {k} as {like[0]} x {like[1]}")

    def bmm(self, t: float, heads: int, stage: str) -> Term:
        """One of the absorbed projections, `stage` bmm_k or bmm_v, of `heads` heads."""
        n, k = costs.bmm_shapes(self.model)[stage]

        def cost(tokens: float, of_heads: int = heads) -> Cost:
            return costs.bmm(tokens, of_heads, n, k)

        half = {m: us / 2 for m, us in BMM_PAIR.items()}
        table = Curve.of(half, "DeepSeek's trace on H800, half of the pair", "published") if heads == 128 else None
        name = {"bmm_k": "k_b", "bmm_v": "v_b"}[stage]
        found = self._curve("bmm", "tokens", table, heads=heads, projection=name)
        if found is not None:
            return self._read("bmm", found, t, cost)
        ratio = estimate_us("bmm", cost(t), self.gpu) / estimate_us("bmm", cost(t, 128), self.gpu)
        return self.bmm(t, 128, stage).moved(ratio, BEYOND_ERROR, f"{heads} heads of 128")

    def mla(self, batch: float, q_len: float, heads: int, kv_len: float, kv_dtype: str = "bf16") -> Term:
        """Decode attention. q·heads rows share a read of the latent. Published tables have one query and 128 heads:
        more rows count as more requests, as in the checks; fewer are scaled by the estimate, in tiles of 64 rows.

        Of a kernel that the package recorded and one that was published for this GPU the faster counts, since both
        can be had; one that the user measured always counts."""
        itemsize = {"bf16": 2, "fp8": 1}[kv_dtype]

        def cost(b: float, q: float, h: int, kv: float) -> Cost:
            rows = max(q * h, 64)
            return costs.mla(b, rows / 128, 128, kv, self.model, itemsize)

        exact = self._grid_of_records("mla", ("batch", "kv_len"), heads=heads, q_len=q_len, kv=kv_dtype)
        known = None
        if exact is not None:
            known = self._read_grid(
                "mla", (self.gpu.name, exact), batch, kv_len, lambda b, kv: cost(b, q_len, heads, kv)
            )
            if exact.origin == "measured" or (self.gpu.name, kv_dtype) not in published_mla():
                return known
        home = self.gpu.name if (self.gpu.name, kv_dtype) in published_mla() else "H100"
        grid = published_mla()[home, kv_dtype]
        rows = q_len * heads
        same = batch * max(rows / 128, 1.0)
        term = self._read_grid("mla", (home, grid), same, kv_len, lambda b, kv: cost(b, 1, 128, kv))
        if rows < 128:
            ratio = estimate_us("mla", cost(batch, q_len, heads, kv_len), self.gpu) / estimate_us(
                "mla", cost(batch, 1, 128, kv_len), self.gpu
            )
            term = term.moved(ratio, BEYOND_ERROR, f"{heads} heads x {q_len:g} queries")
        return term if known is None or (term.us < known.us and rows >= 128) else known

    def grouped(self, rows: float, active: float, cut: int = 1, precision: str = "fp8") -> dict[str, Term]:
        """{gate_up, silu_mul_quant, down} for `rows` (token, expert) pairs of one GPU over `active` experts."""

        def cost(experts: float, pairs: float, part: str) -> Cost:
            whole = costs.grouped_gemm(pairs, experts, self.model, cut, precision)
            share = {"up": 2 / 3, "down": 1 / 3, "core": 1.0}[part]
            return Cost(share * whole.flops, share * whole.bytes, precision)

        recorded = [
            self._grid_of_records("grouped_gemm", ("active", "rows"), n=n, k=k, layout="padded")
            for n, k in costs.mlp_shapes(self.model, self.model.moe_intermediate_size).values()
        ]
        if cut > 1 and precision == "fp8" and all(r is not None for r in recorded):
            # As many whole experts and rows as have the same weights and FLOP.
            why = f"experts cut in {cut}, as whole ones of the same size"
            whole = self.grouped(rows / cut, active / cut)
            return {name: term.moved(1.0, BEYOND_ERROR, why) for name, term in whole.items()}
        if cut > 1 or precision != "fp8":
            term = self._estimate("grouped", cost(active, rows, "core"))
            return {"gate_up": term.scaled(2 / 3), "silu_mul_quant": self._silu(rows, cut), "down": term.scaled(1 / 3)}
        if all(r is not None for r in recorded):
            up, down = (
                self._read_grid("grouped", (self.gpu.name, grid), active, rows, lambda g, r, p=part: cost(g, r, p))
                for part, grid in zip(("up", "down"), recorded, strict=True)
            )
            return {"gate_up": up, "silu_mul_quant": self._silu(rows), "down": down}
        tables = published_grouped()
        if self.gpu.name not in SAME_DIE and (self.gpu.name, "core") in tables:
            grid = tables[self.gpu.name, "core"]
            core = self._read_grid("grouped", (self.gpu.name, grid), active, rows, lambda g, r: cost(g, r, "core"))
            silu = self._silu(rows)
            rest = core.scaled(max(core.us - silu.us, 0.0) / core.us)
            return {"gate_up": rest.scaled(2 / 3), "silu_mul_quant": silu, "down": rest.scaled(1 / 3)}
        up, down = (
            self._read_grid("grouped", ("H800", tables["H800", part]), active, rows, lambda g, r, p=part: cost(g, r, p))
            for part in ("up", "down")
        )
        silu = self._silu(rows) if self._has_records("silu_mul") else Term(0.0, "published", 0.0, "in the glue of gate")
        return {"gate_up": up, "silu_mul_quant": silu, "down": down}

    def glue(self, t: float, heads: int = 128) -> dict[str, Term]:
        """{stage: time} of what stands between the GEMMs. From Records of the GPU, else GLUE, of which S1 has 12 us
        and S2 the rest (it holds the routed activation and the quantisation before o_proj as well)."""
        if self._has_records("rms_norm") and self._has_records("router"):
            return self._glue_of_records(t, heads)
        whole = self._line(GLUE, t, "elementwise kernels of DeepSeek's trace on H800")
        rest = max(whole.us - sum(GLUE_SPLIT.values()), 0.0)
        found = {stage: Term(us, whole.origin, whole.error, whole.source) for stage, us in GLUE_SPLIT.items()}
        found["post_norm"] = whole.scaled(rest / 3 / whole.us)
        found["gate"] = whole.scaled(rest * 2 / 3 / whole.us)
        return found

    def activation(self, t: float, width: int) -> Term:
        """SiLU·mul and quantisation of `t` rows, a kernel of its own in dense MLPs."""
        return self._estimate("elementwise", Cost(0, t * 5 * width))

    def stream(self, moved_bytes: float) -> Term:
        """A memory-bound kernel that reads and writes so much."""
        return self._estimate("elementwise", Cost(0, moved_bytes))

    def _glue_of_records(self, t: float, heads: int) -> dict[str, Term]:
        """From the ops' own records, where there are some of the op, else of the same bytes; the gate's GEMM by the
        estimate. Attention's output is quantised for o_proj in a kernel of its own, counted with the norm after it."""
        model = self.model
        hidden, q_lora, latent = model.hidden_size, model.q_lora_rank, model.kv_lora_rank
        norm = self._stream("rms_norm", "m", t, 7 * hidden, h=hidden, form="add_quantize")
        q_norm = self._stream("rms_norm", "m", t, 3 * q_lora, h=q_lora, form="quantize")
        kv_norm = self._stream("rms_norm", "m", t, 4 * latent, h=latent, form="plain")
        append = self._stream("rope_append", "tokens", t, 4 * 64 * heads + 2304, heads=heads, cache="bf16")
        wide = heads * model.v_head_dim
        quantize = self._stream("quantize", "m", t * wide / hidden, 3 * hidden, k=hidden, scales="column_tma")
        experts = model.n_routed_experts
        router = self._stream("router", "tokens", t, 4 * experts, experts=experts, gather=0)
        return {
            "input_norm": norm,
            "qkv_norm": combined([q_norm, kv_norm]),
            "rope_append": append,
            "post_norm": combined([quantize, norm]),
            "gate": combined([self._estimate("linear", costs.gate(t, model)), router]),
        }

    def _silu(self, rows: float, cut: int = 1) -> Term:
        """The routed experts' activation with its quantisation, by counts on the device."""
        width = self.model.moe_intermediate_size
        term = self._stream("silu_mul", "populated", rows, 5 * width, layout="padded", i=width)
        return term if cut == 1 else self.activation(rows, width // cut)

    def _stream(self, op: str, axis: str, x: float, bytes_per_row: float, **exact) -> Term:
        """A memory-bound kernel of `x` rows, from its records or by the estimate."""
        return self._read("elementwise", self._curve(op, axis, None, **exact), x, lambda r: Cost(0, r * bytes_per_row))

    # --- reading -----------------------------------------------------------------------------------------------------

    def _has_records(self, op: str) -> bool:
        return (op, self.gpu.name) in self.tables.recorded

    def _curve(self, op: str, axis: str, table: Curve | None, **exact) -> tuple[str, Curve] | None:
        """(GPU it was measured on, table): records of this GPU, the published table where it is of this die, records
        of another GPU, the published table."""
        own = self.tables.curve(op, self.gpu.name, axis, **exact)
        if own is not None:
            return self.gpu.name, own
        if table is not None and self.gpu.name in SAME_DIE:
            return self.gpu.name, table
        for name in sorted({g for o, g in self.tables.recorded if o == op}):
            other = self.tables.curve(op, name, axis, **exact)
            if other is not None:
                return name, other
        return None if table is None else ("H800", table)

    def _like(self, n: int, k: int) -> tuple[int, int] | None:
        """The recorded shape of a GEMM on this GPU whose weight is nearest in size."""
        shapes = self.tables.shapes("linear", self.gpu.name, ("n", "k"), "m")
        return min(shapes, key=lambda s: abs(math.log(s[0] * s[1] / (n * k))), default=None)

    def _grid_of_records(self, op: str, axes: tuple[str, str], **exact) -> Grid | None:
        return self.tables.grid(op, self.gpu.name, axes, **exact)

    def _estimate(self, op: str, cost: Cost) -> Term:
        _, f, b = ESTIMATES[op]
        source = f"roofline of {self.gpu.name} at {f:.0%} of peak, {b:.0%} of bandwidth"
        return Term(estimate_us(op, cost, self.gpu), "extrapolated", ESTIMATE_ERROR, source)

    def _read(self, op: str, found: tuple[str, Curve] | None, x: float, cost: Callable[[float], Cost]) -> Term:
        if found is None:
            return self._estimate(op, cost(x))
        home, curve = found
        return self._carry(op, home, curve, curve.at(x), cost(x), cost(curve.nearest(x)), curve.inside(x))

    def _read_grid(self, op: str, found: tuple[str, Grid], x: float, y: float, cost: Callable) -> Term:
        home, grid = found
        edge = grid.nearest(x, y)
        return self._carry(op, home, grid, grid.at(x, y), cost(x, y), cost(*edge), grid.inside(x, y))

    def _carry(self, op: str, home: str, table: Curve | Grid, us: float, cost: Cost, edge: Cost, inside: bool) -> Term:
        """`us` of the table's point `edge`, carried to `cost` and to this GPU by ratios of estimates."""
        error = TABLE_ERROR[op] if table.origin == "published" else RECORD_ERROR
        term = Term(us, table.origin, error, table.source)
        there = find_gpu(home)
        if not inside:
            ratio = estimate_us(op, cost, there) / estimate_us(op, edge, there)
            term = term.moved(ratio, BEYOND_ERROR, "beyond its end")
        if home != self.gpu.name and {home, self.gpu.name} != set(SAME_DIE):
            ratio = estimate_us(op, cost, self.gpu) / estimate_us(op, cost, there)
            term = term.moved(ratio, OTHER_GPU_ERROR, f"scaled to {self.gpu.name}")
        return term

    def _line(self, points: dict[float, float], t: float, source: str) -> Term:
        """The straight line through two points; extrapolated outside them."""
        (x0, y0), (x1, y1) = sorted(points.items())
        term = Term(y0 + (y1 - y0) * (t - x0) / (x1 - x0), "published", TABLE_ERROR["elementwise"], source)
        return (
            term
            if x0 <= t <= x1 and self.gpu.name in SAME_DIE
            else term.moved(1.0, BEYOND_ERROR, f"line to {t:g} tokens")
        )
