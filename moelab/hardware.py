"""What GPUs, links and nodes can do at best, each figure with its source. Peaks, not measurements.

Peaks of the tensor cores are dense (without 2:4 sparsity) and assume the boost clock, which a GPU under load
does not hold: Hopper's BF16 peak of 989 TFLOP/s is about 865 in long kernels. A measured roof (a Record)
always beats these.

Links are counted per GPU and per direction, in GB/s = 1e9 bytes/s: NVLink 4 is sold as "900 GB/s", both
directions.

Memory: "80 GB" and "141 GB" are nearer to GiB. `memory_bytes` holds what a device or a published table
reports; where a GPU is at hand, read the capacity from it (`Provenance`'s nvidia-smi query, or torch), for
EP8 on H200 fits 81 requests of 5,000 tokens or 105 depending on which number is taken.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from moelab.config import ConfigError


@dataclass(frozen=True)
class GPU:
    """One GPU's peaks."""

    name: str  # short; `aliases` match the names that drivers and tables use
    memory_bytes: int
    hbm_gb_s: float
    fp8_tflops: float  # dense
    bf16_tflops: float  # dense
    sms: int
    source: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fabric:
    """A link between GPUs: line rate per GPU and direction. What a kernel gets out of it is a Record, or a
    law fitted to one; never this number."""

    name: str
    gb_s: float
    spans_nodes: bool
    source: str


@dataclass(frozen=True)
class Node:
    """`gpus` GPUs that share `inside`; nodes are joined by `between`."""

    name: str
    gpu: GPU
    gpus: int
    inside: Fabric
    between: Fabric
    source: str


_GPUS = (
    GPU(
        "H100",
        85_899_345_920,
        3350,
        1979,
        989,
        132,
        "NVIDIA H100 SXM5 data sheet (80 GB, 3.35 TB/s, dense halves of the sparse peaks); memory 80 GiB as "
        "in ai-dynamo/aiconfigurator h100_sxm",
        ("H100 80GB HBM3", "H100 SXM", "H100-SXM5"),
    ),
    GPU(
        "H200",
        150_754_820_096,
        4800,
        1979,
        989,
        132,
        "NVIDIA H200 SXM data sheet (4.8 TB/s; compute die of H100); memory 143771 MiB and 132 SMs "
        "as read from a device, driver 580.159, 2026-11-30",
        ("H200 SXM", "H200-SXM5"),
    ),
    GPU(
        "H800",
        85_899_345_920,
        3350,
        1979,
        989,
        132,
        "Compute die and memory of H100 SXM5, NVLink cut "
        "(deepseek-ai/FlashMLA README: 3000 GB/s and 660 TFLOPS reached)",
        ("H800 SXM", "H800-SXM5", "H800 80GB HBM3"),
    ),
    GPU(
        "GB200",
        186_000_000_000,
        8000,
        5000,
        2500,
        148,
        "NVIDIA GB200 NVL72 data sheet, a 72nd of the rack (13.4 TB, 576 TB/s, dense halves of 720 and 360 "
        "PFLOPS); 148 SMs per B200; nothing of it was measured here",
    ),
    GPU(
        "H20",
        103_079_215_104,
        4000,
        296,
        148,
        78,
        "NVIDIA H20: 96 GB of HBM3 at 4.0 TB/s, 296 TFLOP/s FP8, 148 BF16 (data sheet as reported in SemiAnalysis, "
        "2023-11); nothing of it was measured here",
        ("H20 96GB", "H20-SXM", "H20 SXM"),
    ),
    GPU(
        "B200",
        180_000_000_000,
        7700,
        4500,
        2250,
        148,
        "NVIDIA HGX B200 data sheet, an eighth of it (1.44 TB, 62 TB/s, dense halves of 72 and 36 PFLOPS); nothing of "
        "it was measured here",
        ("B200 SXM", "B200-SXM6"),
    ),
)

_FABRICS = (
    Fabric("nvlink4", 450, False, "NVIDIA H100/H200 SXM: 18 links, 900 GB/s counted both ways"),
    Fabric(
        "nvlink-h800",
        200,
        False,
        "H800 SXM: 8 links, 400 GB/s counted both ways (deepseek-ai/DeepEP README: about 160 GB/s reached)",
    ),
    Fabric("nvlink5", 900, True, "NVIDIA GB200 NVL72: 18 links, 1.8 TB/s counted both ways, across 72 GPUs"),
    Fabric("cx7-400g", 50, True, "NVIDIA ConnectX-7: 400 Gb/s InfiniBand or RoCE, one per GPU"),
    Fabric("efa-p5", 50, True, "AWS p5.48xlarge, p5en.48xlarge: 3200 Gb/s of EFA per 8 GPUs"),
)


def gpus() -> list[GPU]:
    return list(_GPUS)


def fabrics() -> list[Fabric]:
    return list(_FABRICS)


def nodes() -> list[Node]:
    return list(_NODES)


def gpu(name: str) -> GPU:
    """By short name, or by a name as the driver gives it ("NVIDIA H100 80GB HBM3"). PCIe and NVL cards have
    other peaks than the SXM ones here and are refused. Raises ConfigError, which lists the known ones."""
    wanted = name.upper().removeprefix("NVIDIA ").strip()
    for candidate in _GPUS:
        if wanted in (candidate.name.upper(), *(alias.upper() for alias in candidate.aliases)):
            return candidate
    raise unknown("GPU", name, [g.name for g in _GPUS])


def fabric(name: str) -> Fabric:
    return _by_name("fabric", name, _FABRICS)


def node(name: str) -> Node:
    return _by_name("node", name, _NODES)


def _by_name(kind, name, candidates):
    for candidate in candidates:
        if candidate.name == name.lower():
            return candidate
    raise unknown(kind, name, [c.name for c in candidates])


def unknown(kind: str, name: str, legal: list[str]) -> ConfigError:
    """For the caller to raise: names the nearest of `legal`, and all of them."""
    by_lower = {x.lower(): x for x in legal}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.3)
    hint = f"did you mean {by_lower[close[0]]}? " if close else ""
    return ConfigError(f"unknown {kind} {name!r}; {hint}known: {', '.join(legal)}")


_NODES = (
    Node(
        "hgx-h100",
        gpu("H100"),
        8,
        fabric("nvlink4"),
        fabric("cx7-400g"),
        "8 H100 SXM5 on NVSwitch, a NIC per GPU",
    ),
    Node(
        "hgx-h200",
        gpu("H200"),
        8,
        fabric("nvlink4"),
        fabric("cx7-400g"),
        "8 H200 SXM on NVSwitch, a NIC per GPU",
    ),
    Node(
        "hgx-h800",
        gpu("H800"),
        8,
        fabric("nvlink-h800"),
        fabric("cx7-400g"),
        "8 H800 SXM on NVSwitch, a NIC per GPU: DeepSeek's own (arXiv 2505.09343)",
    ),
    Node("p5-h100", gpu("H100"), 8, fabric("nvlink4"), fabric("efa-p5"), "AWS p5.48xlarge"),
    Node("p5en-h200", gpu("H200"), 8, fabric("nvlink4"), fabric("efa-p5"), "AWS p5en.48xlarge"),
    Node(
        "nvl72",
        gpu("GB200"),
        72,
        fabric("nvlink5"),
        fabric("cx7-400g"),
        "GB200 NVL72: one NVLink domain of 72 GPUs",
    ),
)
