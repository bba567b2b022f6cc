"""The model card of a trained tinyseek: README.md beside the checkpoint, every number from its training.json.

python experiments/tinyseek/card.py --checkpoint DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

CARD = """\
---
license: apache-2.0
library_name: transformers
tags: [deepseek_v3, byte-level, fp8]
---
# tinyseek

A small model of exactly DeepSeek-V3's architecture, trained for real: multi-head latent attention (latent 512 +
64 rotary, YaRN always on), sigmoid group-limited routing with bias-based balancing over 16 experts (top-4, 2 of
4 groups), a shared expert, one dense and four MoE layers, one multi-token-prediction layer. {parameters:,}
parameters, block-FP8 weights (e4m3, one scale per 128 x 128) in the hub's layout. It reads and writes bytes:
token id = byte value, `<|bos|>` 256, `<|eos|>` 257.

It exists to put real weights, real routing and real draft acceptance under kernels, engines and performance
models. It writes Python that looks right; do not expect more of it.

## Numbers ({device}, torch {torch}, seed {seed})
| | |
|---|---|
| held-out files, bits per byte | **{heldout_bits_per_byte:.4f}**{oracle} |
| `xz -9` of their concatenation | {xz_bits_per_byte:.4f} |
| MTP head, greedy acceptance in a decode | {mtp_acceptance:.3f} of {mtp_drafts:,} drafts |
| the same on held-out text, where the main model is right | {mtp_acceptance_text:.3f} of {mtp_drafts_text:,} drafts |
| expert load on the held-out text, max / mean, worst layer | {expert_load_max_over_mean:.2f} |
| training | {steps:,} steps, {epochs} epochs, {minutes} minutes |

Bits per byte: context {context}, windows every {stride} tokens, each of {heldout_bytes:,} bytes predicted once
from the dequantised checkpoint in fp32. The recipe, one command, is `experiments/tinyseek/` of the moelab
repository; `training.json` holds its settings, `curve.csv` the loss curve.

## Data and licence
Trained on the standard library of CPython 3.13.0 (`Lib` without tests, IDLE and generated tables; the recipe
pins it by SHA-256), which is under the PSF licence. The held-out files in `heldout/` are parts of it, unmodified,
with its licence text in `heldout/LICENSE`. The weights and the recipe are under Apache-2.0.
"""


def write(folder: Path) -> None:
    """Write folder/README.md from folder/training.json."""
    report = json.loads((folder / "training.json").read_text())
    value = report.get("heldout_bits_per_byte_transformers")
    oracle = f" ({value:.4f} with transformers' DeepseekV3ForCausalLM)" if value else ""
    (folder / "README.md").write_text(CARD.format(**report, oracle=oracle))


def main() -> int:
    parser = argparse.ArgumentParser(description="write the model card of a trained tinyseek")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder with training.json")
    write(parser.parse_args().checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
