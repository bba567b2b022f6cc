"""Train tinyseek: one command from the packed corpus to a block-FP8 checkpoint with its numbers.

    python experiments/tinyseek/train.py --corpus corpus.xz --out DIR [--device cuda]

`DIR` receives the checkpoint in HF layout, `curve.csv` (the loss curve) and `training.json` (settings and final
numbers). Everything random comes from `--seed`; on a GPU two runs still differ in the last bits, since fused
attention adds up its gradients in no fixed order.

Schedule: warm-up, constant rate, linear decay to zero over the last `--decay` of the steps. FP8 rounding is in
the forward pass over the last `--fp8` of them, at a rate that is falling already. With `--max-minutes` the
number of steps is cut (and the cut reported) when the speed seen so far would not make it; since the rate is
constant until the decay, the run is then simply a shorter one.

`--smoke` runs all of it in under a minute on a CPU, with a small model, and proves nothing but that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import sys
import time
from pathlib import Path

import card
import checkpoint
import corpus
import evaluate
import torch
from model import SMOKE, TINYSEEK, TinySeek, run_layer
from optim import Optimiser
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from moelab.config import ModelConfig

LOG_EVERY = 50


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="train tinyseek", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--corpus", type=Path, required=True, help="the pack that corpus.py wrote")
    p.add_argument("--out", type=Path, required=True, help="folder for checkpoint, curve and numbers")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--steps", type=int, default=4234)
    p.add_argument("--batch", type=int, default=32, help="sequences per step")
    p.add_argument("--sequence", type=int, default=1024, help="tokens per sequence")
    p.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--weight-decay", type=float, default=0.3)
    p.add_argument("--dropout", type=float, default=0.2, help="on the embedding and on every residual branch")
    p.add_argument("--warmup", type=int, default=200, help="steps")
    p.add_argument("--decay", type=float, default=0.5, help="share of the steps with a falling rate")
    p.add_argument("--fp8", type=float, default=0.2, help="share of the steps with FP8 weights in the forward pass")
    p.add_argument("--mtp-weight", type=float, nargs=2, default=(0.3, 0.1), help="MTP loss weight, before and in decay")
    p.add_argument("--bias-rate", type=float, default=1e-3, help="step of the routing bias; falls with the rate")
    p.add_argument("--eval-every", type=int, default=500, help="steps between evaluations on valid and held-out files")
    p.add_argument("--max-minutes", type=float, help="cut the number of steps to stay below, evaluation not counted in")
    p.add_argument("--no-compile", action="store_true", help="without torch.compile")
    p.add_argument("--oracle", action="store_true", help="in the end, also evaluate with transformers")
    p.add_argument("--records", type=Path, help="append records of the final numbers below this folder")
    p.add_argument("--smoke", action="store_true", help="small model, few steps")
    args = p.parse_args(argv)
    if args.smoke:
        args.steps, args.batch, args.sequence, args.warmup = min(args.steps, 60), 8, 64, 10
        args.eval_every, args.no_compile = 30, True
    return args


class Chunks:
    """An endless, seeded stream of batches [batch, sequence + 2] (the last two tokens are targets only).

    Each epoch joins the files in a new order as bos + bytes + eos, and cuts the whole at a new phase into chunks, which
    come in random order. Half of the chunks with a bos inside start at it instead: a generation begins with bos, and
    should find what training has seen.
    """

    def __init__(
        self, files: dict[str, bytes], c: ModelConfig, batch: int, sequence: int, seed: int, device: torch.device
    ):
        ends = torch.tensor([c.eos_token_id]), torch.tensor([c.bos_token_id])
        self.documents = [
            torch.cat((ends[1], torch.frombuffer(bytearray(data), dtype=torch.uint8).long(), ends[0]))
            for data in files.values()
        ]
        self.bos, self.batch, self.length, self.device = c.bos_token_id, batch, sequence + 2, device
        self.step_length = sequence
        self.random = torch.Generator().manual_seed(seed)
        self.tokens_per_epoch = sum(map(len, self.documents))
        self.queue: list[Tensor] = []

    def _epoch(self) -> Tensor:
        order = torch.randperm(len(self.documents), generator=self.random).tolist()
        stream = torch.cat([self.documents[i] for i in order])
        phase = int(torch.randint(self.step_length, (), generator=self.random))
        starts = torch.arange(phase, len(stream) - self.length, self.step_length)
        beginnings = (stream == self.bos).nonzero().flatten()
        following = beginnings[torch.searchsorted(beginnings, starts).clamp_max(len(beginnings) - 1)]
        inside = (following >= starts) & (following < starts + self.step_length)
        inside &= (following + self.length <= len(stream)) & (torch.rand(len(starts), generator=self.random) < 0.5)
        starts = torch.where(inside, following, starts)[torch.randperm(len(starts), generator=self.random)]
        return stream.to(self.device)[starts.to(self.device)[:, None] + torch.arange(self.length, device=self.device)]

    def next(self) -> Tensor:
        if not self.queue:
            self.queue = [part for part in self._epoch().split(self.batch) if len(part) == self.batch]
        return self.queue.pop()


def rate(step: int, steps: int, args: argparse.Namespace) -> float:
    """The learning rate's share of its peak at `step` of `steps`."""
    return min(1.0, (step + 1) / args.warmup, (steps - step) / max(1.0, args.decay * steps))


class Budget:
    """Cuts the number of steps so that the training ends in time (see the module docstring)."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.start, self.steps = args, time.monotonic(), args.steps
        self.mark: tuple[float, int] | None = None

    def check(self, step: int) -> None:
        """To be called every LOG_EVERY steps, with the device idle."""
        now = time.monotonic()
        if self.mark is None:  # the first interval holds the compilation
            self.mark = (now, step)
            return
        if self.args.max_minutes is None or step >= (1 - self.args.decay) * self.steps:
            return
        per_step = (now - self.mark[0]) / (step - self.mark[1])
        left = self.args.max_minutes * 60 - (now - self.start)
        possible = max(step + LOG_EVERY, step + int(left / per_step))
        if possible < self.steps:
            tqdm.write(f"{per_step * 1e3:.1f} ms a step: cut from {self.steps} to {possible} steps", file=sys.stderr)
            self.steps = possible


@torch.inference_mode()
def quick_bits(model: TinySeek, files: dict[str, bytes], device: torch.device, context: int) -> float:
    """Bits per byte of the model as it stands (compute dtype, current weights)."""
    model.eval()
    bits = evaluate.bits_per_byte(
        lambda t: model.head(model.trunk(t)[0]), files, model.c, device, context=context, stride=context // 2
    )
    model.train()
    return bits


def train(args: argparse.Namespace, data: corpus.Corpus) -> tuple[TinySeek, dict]:
    """Train and write args.out/curve.csv; returns the model and what happened."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    c = SMOKE if args.smoke else TINYSEEK
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = TinySeek(c, dtype, args.dropout).to(device).train()
    gates = model.gates()
    optimiser = Optimiser(model, args.optimizer, args.weight_decay)
    if not args.no_compile:
        model.compiled = torch.compile(run_layer, dynamic=False, fullgraph=True)
    chunks = Chunks(data["train"], c, args.batch, args.sequence, args.seed, device)
    params = list(model.parameters())
    quick = {part: {k: v[:512] for k, v in data[part].items()} if args.smoke else data[part] for part in corpus.SPLITS}

    sums = torch.zeros(2, device=device)
    loads = torch.zeros(len(gates), c.n_routed_experts, device=device)
    budget = Budget(args)
    step = 0
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":  # never fall back to materialised scores without a word
            stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]))
        file = stack.enter_context(open(args.out / "curve.csv", "w", newline=""))
        bar = stack.enter_context(tqdm(total=args.steps, mininterval=0.5 if sys.stderr.isatty() else 10, unit="step"))
        curve = csv.writer(file)
        curve.writerow(
            ["step", "tokens", "lr", "fp8", "train_bits", "mtp_bits", "valid_bpb", "heldout_bpb", "load_max_over_mean"]
        )
        while step < budget.steps:
            share = rate(step, budget.steps, args)
            fp8 = step >= (1 - args.fp8) * budget.steps
            if fp8:
                model.refresh_fp8()
            main, mtp, load = model(chunks.next())
            weight = args.mtp_weight[0] if share == 1.0 or step < args.warmup else args.mtp_weight[1]
            (main + weight * mtp).backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimiser.step(args.lr * share)
            with torch.no_grad():
                for gate, tokens in zip(gates, load, strict=True):
                    gate.e_score_correction_bias += args.bias_rate * share * torch.sign(tokens.mean() - tokens)
                sums += torch.stack((main.detach(), mtp.detach()))
                loads += load
            step += 1
            bar.update()
            if step % LOG_EVERY == 0 or step == budget.steps:
                since = step - (step - 1) // LOG_EVERY * LOG_EVERY
                bits = (sums / since / math.log(2)).tolist()
                balance = (loads.amax(-1) / loads.mean(-1)).max().item()
                sums.zero_()
                loads.zero_()
                budget.check(step)
                bar.total = budget.steps
                valid = heldout = ""
                if step % args.eval_every == 0 or step == budget.steps:
                    if fp8:
                        model.refresh_fp8()
                    valid = round(quick_bits(model, quick["valid"], device, args.sequence), 5)
                    heldout = round(quick_bits(model, quick["heldout"], device, args.sequence), 5)
                row = [step, step * args.batch * args.sequence, f"{args.lr * share:.3e}", int(fp8)]
                curve.writerow([*row, *(f"{x:.5f}" for x in bits), valid, heldout, f"{balance:.3f}"])
                file.flush()
                bar.set_postfix(bits=f"{bits[0]:.3f}", mtp=f"{bits[1]:.3f}", valid=valid, load=f"{balance:.2f}")
                if not math.isfinite(bits[0]):
                    raise FloatingPointError(f"the loss is {bits[0]} at step {step}; try a lower --lr than {args.lr}")
    minutes = (time.monotonic() - budget.start) / 60
    return model, {
        "steps": step, "minutes": round(minutes, 2),
        "epochs": round(step * args.batch * args.sequence / chunks.tokens_per_epoch, 2),
        "parameters": sum(p.numel() for p in params), "train_bits": bits[0], "valid_bits_per_byte": valid,
    }  # fmt: skip


def main() -> int:
    args = parse_args()
    torch.set_float32_matmul_precision("highest")  # the router and the final evaluation are fp32
    args.out.mkdir(parents=True, exist_ok=True)
    data = corpus.read_pack(args.corpus)
    model, summary = train(args, data)
    checkpoint.save(model, args.out)
    del model
    files = {k: v[:512] for k, v in data["heldout"].items()} if args.smoke else data["heldout"]
    device = torch.device(args.device)
    small = {"context": 64, "prompts": 8, "new": 16} if args.smoke else {}
    result = evaluate.evaluate(args.out, files, device, oracle=args.oracle, **small)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    for key in ("corpus", "out", "records"):
        settings.pop(key)
    report = {"seed": args.seed, "settings": settings, **summary, **result, "torch": torch.__version__}
    report["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    card.write(args.out)
    print(json.dumps({k: v for k, v in report.items() if k not in ("settings", "expert_load")}, indent=2))
    if args.records:
        evaluate.write_records(result, args.records, device, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
