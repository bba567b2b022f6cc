"""How good tinyseek is on the held-out files: bits per byte, MTP acceptance, expert load.

*Bits per byte.* Every byte of every file is predicted once. A file is `<|bos|>` and its bytes; windows of
`context` tokens start every `stride` tokens, and a window scores the bytes that no earlier window scored. So a
byte sees between `context - stride` and `context` tokens before it, fewer only near the file's start. The mean
of -log2 p over the bytes of all files is compared with `xz -9` (liblzma, xz container, preset 9) of the files'
concatenation in path order.

*MTP acceptance, greedy* (a draft of one token). A decode step at position i has the main model's own token t'
for i+1; the MTP head drafts i+2 from h_i and t'; the draft is accepted if it is what the main model then
chooses. Two readings:

* `mtp_acceptance`: as in a decode. Continuations of held-out prefixes are generated greedily by the main model
  alone; on such text t' is the text, so one pass over it gives exactly the drafts and choices of a speculative
  decode.
* `mtp_acceptance_text`: on the held-out text itself, at the positions where t' equals the text (elsewhere the
  draft is made from a token that the text does not continue). Exact at these positions; they are the easier
  ones.

*Expert load.* Tokens per expert and MoE layer over the held-out windows; max/mean is 1 when balanced.

    python experiments/tinyseek/evaluate.py --checkpoint DIR [--oracle] [--device cuda] [--records DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoint
import corpus
import torch
import torch.nn.functional as F
from model import TinySeek
from torch import Tensor
from tqdm import tqdm

from moelab.config import ModelConfig
from moelab.engine.routing import HELDOUT
from moelab.results import Record, Store, collect

Files = dict[str, bytes]


def xz_bits_per_byte(files: Files) -> float:
    """Bits per byte of `xz -9` of the concatenation in path order."""
    data = b"".join(files[name] for name in sorted(files))
    return 8 * len(lzma.compress(data, format=lzma.FORMAT_XZ, preset=9)) / len(data)


def windows(files: Files, context: int, stride: int, bos: int, eos: int) -> Iterator[tuple[list[int], int]]:
    """(tokens [context + 1], padded with eos; first, last): the window scores targets tokens[first:last]."""
    for name in sorted(files):
        stream = [bos, *files[name]]
        scored = 1
        for start in range(0, len(stream), stride):
            tokens = stream[start : start + context + 1]
            end = start + len(tokens)
            if end > scored:
                yield tokens + [eos] * (context + 1 - len(tokens)), scored - start, len(tokens)
                scored = end


def batches(
    files: Files, c: ModelConfig, context: int, stride: int, size: int, device: torch.device
) -> Iterator[tuple]:
    """(tokens [b, context + 1], scored bool [b, context + 1]) on the device."""
    rows = list(windows(files, context, stride, c.bos_token_id, c.eos_token_id))
    place = torch.arange(context + 1)
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        tokens = torch.tensor([row[0] for row in part])
        scored = torch.stack([(place >= row[1]) & (place < row[2]) for row in part])
        yield tokens.to(device), scored.to(device)


@torch.inference_mode()
def bits_per_byte(
    logits: Callable[[Tensor], Tensor], files: Files, c: ModelConfig, device: torch.device, *, context: int = 1024,
    stride: int = 512, size: int = 32, progress: bool = False,
) -> float:  # fmt: skip
    """Mean -log2 p of the bytes of the files; `logits` maps tokens [b, S] to [b, S, V]."""
    nats, count = 0.0, 0
    parts = list(batches(files, c, context, stride, size, device))
    for tokens, scored in tqdm(parts, disable=not progress, desc="bpb", mininterval=2):
        loss = F.cross_entropy(logits(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        nats += loss[scored[:, 1:].flatten()].double().sum().item()
        count += int(scored.sum())
    if count != sum(map(len, files.values())):
        raise AssertionError(f"scored {count} bytes of {sum(map(len, files.values()))}")
    return nats / count / math.log(2)


@torch.inference_mode()
def drafts(model: TinySeek, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [b, S] -> (greedy [b, S]: the main model's choice for i+1; draft [b, S-1]: the MTP head's for i+2)."""
    h, _ = model.trunk(tokens)
    u, _ = model.draft(h[:, :-1], tokens[:, 1:])
    return model.head(h).argmax(-1), model.head(u).argmax(-1)


def acceptance_on_text(
    model: TinySeek, files: Files, device: torch.device, context: int, stride: int
) -> tuple[int, int]:
    """(accepted, drafts) of `mtp_acceptance_text`."""
    accepted = total = 0
    for tokens, scored in batches(files, model.c, context, stride, 32, device):
        greedy, draft = drafts(model, tokens)
        # position i: the text has t' at i+1, and i+2 (the draft's place) is scored by this window
        valid = (greedy[:, :-2] == tokens[:, 1:-1]) & scored[:, 2:]
        accepted += int(((draft[:, :-1] == greedy[:, 1:-1]) & valid).sum())
        total += int(valid.sum())
    return accepted, total


@torch.inference_mode()
def acceptance_in_decode(
    model: TinySeek, files: Files, device: torch.device, *, prefix: int, new: int, prompts: int
) -> tuple[int, int]:
    """(accepted, drafts) of `mtp_acceptance`: `new` greedy tokens after each of `prompts` prefixes of `prefix` tokens,
    taken at even steps through the held-out bytes (cut inside files; each starts with bos)."""
    data = [files[name] for name in sorted(files) if len(files[name]) >= prefix]
    starts = [(d, at) for d in data for at in range(0, len(d) - prefix + 1, prefix)]
    chosen = starts[:: max(1, len(starts) // prompts)][:prompts]
    tokens = torch.tensor([[model.c.bos_token_id, *d[at : at + prefix - 1]] for d, at in chosen], device=device)
    for _ in tqdm(range(new), desc="greedy", mininterval=10):
        h, _ = model.trunk(tokens)
        tokens = torch.cat((tokens, model.head(h[:, -1:]).argmax(-1)), dim=1)
    greedy, draft = drafts(model, tokens)
    # The drafts for places prefix+1 … prefix+new-1, each made one step after a generated token.
    lo, hi = prefix - 1, prefix + new - 2
    alive = (tokens[:, prefix:-1] == model.c.eos_token_id).cumsum(1) == 0  # nothing after an end of text counts
    hits = (draft[:, lo:hi] == tokens[:, lo + 2 : hi + 2]) & alive
    return int(hits.sum()), int(alive.sum())


@torch.inference_mode()
def expert_load(model: TinySeek, files: Files, device: torch.device, context: int) -> list[list[float]]:
    """Share of the routed tokens per expert (mean 1), one row per MoE layer, the MTP layer's last."""
    total = None
    for tokens, _ in batches(files, model.c, context, context, 32, device):
        h, loads = model.trunk(tokens[:, :-1])
        loads = torch.stack([*loads, model.draft(h, tokens[:, 1:])[1]]).double()
        total = loads if total is None else total + loads
    return (total / total.mean(-1, keepdim=True)).tolist()


def evaluate(
    folder: Path, files: Files, device: torch.device, *, oracle: bool = False, context: int = 1024, prompts: int = 64,
    new: int = 128,
) -> dict:  # fmt: skip
    """All numbers of the exported checkpoint in `folder`, computed in fp32 from its dequantised weights."""
    model = checkpoint.load(folder).to(device)
    c = model.c
    stride = context // 2
    result = {
        "heldout_bits_per_byte": bits_per_byte(
            lambda t: model.head(model.trunk(t)[0]), files, c, device, context=context, stride=stride, progress=True
        ),
        "xz_bits_per_byte": xz_bits_per_byte(files),
        "heldout_bytes": sum(map(len, files.values())),
        "context": context,
        "stride": stride,
    }
    if oracle:
        hf = checkpoint.load_transformers(folder).to(device)
        result["heldout_bits_per_byte_transformers"] = bits_per_byte(
            lambda t: hf(t, use_cache=False).logits, files, c, device, context=context, stride=stride, size=8,
            progress=True,
        )  # fmt: skip
    accepted, count = acceptance_in_decode(model, files, device, prefix=context // 4, new=new, prompts=prompts)
    result |= {"mtp_acceptance": accepted / count, "mtp_drafts": count}
    accepted, count = acceptance_on_text(model, files, device, context, stride)
    result |= {"mtp_acceptance_text": accepted / max(count, 1), "mtp_drafts_text": count}
    result["expert_load"] = expert_load(model, files, device, context)
    result["expert_load_max_over_mean"] = max(max(row) for row in result["expert_load"])
    return result


def write_records(result: dict, folder: Path, device: torch.device, seed: int | None) -> None:
    """Append the result's numbers as records of bench "tinyseek"."""
    where = collect(device.type, gpu_count=1 if device.type == "cuda" else None)
    store = Store(folder, package=False)
    params = {"context": result["context"], "stride": result["stride"], "heldout_bytes": result["heldout_bytes"]}

    def put(metric: str, values: list[float], unit: str, backend: str = "training module", **extra) -> None:
        store.append(Record.from_samples(
            values, bench="tinyseek", backend=backend, params=params | extra, metric=metric, unit=unit, clock="none",
            provenance=where, seed=seed,
        ))  # fmt: skip

    put("heldout_bits_per_byte", [result["heldout_bits_per_byte"]], "bit/B")
    if value := result.get("heldout_bits_per_byte_transformers"):
        put("heldout_bits_per_byte", [value], "bit/B", backend="transformers")
    put("xz_bits_per_byte", [result["xz_bits_per_byte"]], "bit/B", backend="xz -9")
    put("mtp_acceptance", [result["mtp_acceptance"]], "1", text="own greedy", drafts=result["mtp_drafts"])
    put("mtp_acceptance", [result["mtp_acceptance_text"]], "1", text="held-out", drafts=result["mtp_drafts_text"])
    for i, row in enumerate(result["expert_load"]):
        name = "mtp" if i == len(result["expert_load"]) - 1 else str(i)
        put("expert_load_max_over_mean", [max(row)], "1", moe_layer=name)


def main() -> int:
    parser = argparse.ArgumentParser(description="evaluate a tinyseek checkpoint on the held-out files")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder in HF layout")
    parser.add_argument("--heldout", type=Path, default=HELDOUT, help="folder of the shipped held-out files")
    parser.add_argument("--oracle", action="store_true", help="also with transformers' DeepseekV3ForCausalLM")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, default=1024, help="longest context in tokens; the stride is half of it")
    parser.add_argument("--limit", type=int, help="only the first LIMIT bytes of each file (a look, never recorded)")
    parser.add_argument("--records", type=Path, help="append records below this folder")
    args = parser.parse_args()
    if args.limit and args.records:
        parser.error("--limit is a quick look: no records of it")
    files = corpus.read_heldout(args.heldout)
    if args.limit:
        files = {name: data[: args.limit] for name, data in files.items()}
    device = torch.device(args.device)
    result = evaluate(args.checkpoint, files, device, oracle=args.oracle, context=args.context)
    if args.records:
        summary = args.checkpoint / "training.json"
        with contextlib.suppress(FileNotFoundError):
            result["seed"] = json.loads(summary.read_text())["seed"]
        write_records(result, args.records, device, result.get("seed"))
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
