"""Many exchanges of changing data, each checked byte for byte where it arrives, without the host ever waiting for one:

    torchrun --nproc-per-node 2 -m tests.comm.stress --rounds 100000 [--flags] [--puts] [--returns bf16]

Inputs are drawn beforehand, a few hundred of them, with what they must give; each round takes one at random. Batches
have 0 to 8 tokens, so that most of the time is protocol. Exchanges are fused, split, or two at once; now and then a
rank dawdles. Bytes that differ are counted on the device.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moelab.comm import AllToAll, Nvshmem
from moelab.comm.spec import ExchangeSpec
from moelab.config import ParallelConfig
from tests.comm import oracle
from tests.comm.oracle import Inputs


@dataclass
class Wanted:
    """One input, and what it gives on this rank."""

    arguments: tuple[Tensor, Tensor, Tensor, Tensor | None]
    rows: Tensor  # [L, dp·M, H·bytes] uint8
    scales: Tensor | None
    used: Tensor  # [L, dp·M, 1] which rows there are
    counts: Tensor
    out: Tensor  # [T, H] float32, set by the first exchange, which is compared with the exact sum


def draw(spec: ExchangeSpec, rank: int, seed: int, device: torch.device) -> tuple[Inputs, int, Wanted]:
    parallel, choose = spec.parallel, random.Random(seed)
    inputs = oracle.draw(spec, spec.max_tokens, seed, device, masked=choose.choice([0.0, 0.1, 0.6]))
    tokens = [
        choose.choice([0, 1, 2, spec.max_tokens, choose.randrange(spec.max_tokens + 1)]) for _ in range(parallel.dp)
    ]
    if choose.random() < 0.3:  # everything to one rank, nothing to the others
        inputs.ids.copy_(inputs.ids % spec.local_experts + choose.randrange(parallel.ep) * spec.local_experts)
    for group, n in enumerate(tokens):
        inputs.ids[group, n:] = -1
    rows = torch.zeros(*spec.rows_shape[:2], spec.row_bytes, dtype=torch.uint8, device=device)
    scales = torch.zeros(*spec.rows_shape[:2], spec.num_scales, device=device) if spec.num_scales else None
    used = torch.zeros(*spec.rows_shape[:2], 1, dtype=torch.bool, device=device)
    wanted = oracle.rows_of(spec, rank, inputs)
    for e, flat in enumerate(wanted):
        rows[e, : len(flat)] = inputs.x.flatten(0, 1).view(torch.uint8)[flat]
        if scales is not None:
            scales[e, : len(flat)] = inputs.scales.flatten(0, 1)[flat]
        used[e, : len(flat)] = True
    counts = torch.tensor([len(w) for w in wanted], dtype=torch.int32, device=device)
    group = rank // parallel.tp
    arguments = tuple(None if t is None else t[: tokens[group]] for t in inputs.of(group))
    return inputs, group, Wanted(arguments, rows, scales, used, counts, torch.empty(0))


class Stress:
    """One rank's part."""

    def __init__(self, a2a: AllToAll, inputs: int, seed: int) -> None:
        self.a2a, self.spec, self.rank, device = a2a, a2a.spec, a2a.rank, a2a.device
        first = self.rank * self.spec.local_experts
        experts = torch.arange(first, first + self.spec.local_experts, device=device)
        self.factors = oracle.factor(experts)[:, None, None]
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.inputs = []
        for i in range(inputs):
            drawn, group, wanted = draw(self.spec, self.rank, seed * 100_003 + i, device)
            h, rows, _, _ = a2a.dispatch(*wanted.arguments)
            wanted.out = a2a.combine(h, self.outputs(rows), self.empty(wanted))
            exact, magnitude = oracle.expected(drawn, group)
            n = len(wanted.out)
            # Of any return mode; what is looked for here is data of another exchange.
            assert ((wanted.out - exact[:n]).abs() <= 2.0**-7 * magnitude[:n]).all(), f"input {i} was wrong at first"
            self.inputs.append(wanted)
        a2a.check()

    def empty(self, wanted: Wanted) -> Tensor:
        return torch.full(wanted.arguments[0].shape, torch.nan, device=self.a2a.device)

    def outputs(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16) * self.factors

    def received(self, wanted: Wanted, rows: Tensor, scales: Tensor | None, counts: Tensor) -> Tensor:
        """Counts what differs, spoils the slot, and gives the experts' outputs."""
        y = self.outputs(rows)
        self.wrong += ((rows.view(torch.uint8) != wanted.rows) & wanted.used).sum() + (counts != wanted.counts).sum()
        if scales is not None:
            self.wrong += ((scales != wanted.scales) & wanted.used).sum()
            scales.fill_(torch.nan)
        rows.view(torch.uint8).fill_(0x7F)
        return y

    def finished(self, wanted: Wanted, out: Tensor) -> None:
        self.wrong += (out.view(torch.int32) != wanted.out.view(torch.int32)).sum()

    def fused(self, wanted: Wanted) -> None:
        h, *received = self.a2a.dispatch(*wanted.arguments)
        self.finished(wanted, self.a2a.combine(h, self.received(wanted, *received), self.empty(wanted)))

    def split(self, *several: Wanted) -> None:
        """One or two at once; the later one's receives first."""
        handles = [self.a2a.dispatch_send(*wanted.arguments) for wanted in several]
        for h, wanted in reversed(list(zip(handles, several, strict=True))):
            self.a2a.combine_send(h, self.received(wanted, *self.a2a.dispatch_recv(h)))
        for h, wanted in zip(handles, several, strict=True):
            self.finished(wanted, self.a2a.combine_recv(h, self.empty(wanted)))

    def run(self, rounds: int, seed: int) -> int:
        """How many bytes or numbers differed on this rank."""
        together, alone = random.Random(seed), random.Random(f"{seed} {self.rank}")
        for round_ in range(rounds):
            some = together.choices(self.inputs, k=2)
            if alone.random() < 0.05:
                self.dawdle(alone.random())
            (self.fused, self.split, lambda wanted: self.split(*some))[together.randrange(3)](some[0])  # noqa: B023
            if round_ % 1000 == 999:
                self.a2a.check()
        self.a2a.check()
        return int(self.wrong)

    def dawdle(self, share: float) -> None:
        if self.a2a.device.type == "cuda":
            torch.cuda._sleep(int(share * 200_000))  # up to 0.1 ms
        else:
            time.sleep(share * 1e-3)


def spec(parallel: ParallelConfig) -> ExchangeSpec:
    """For few and small data, since every round's is looked at."""
    return ExchangeSpec(parallel, 8 * parallel.ep, 4, 512, 8, "fp8")


def arguments(spec: ExchangeSpec) -> dict:
    names = ("num_experts", "top_k", "hidden", "max_tokens", "payload", "slots", "layout", "scales")
    return {"parallel": spec.parallel, **{name: getattr(spec, name) for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--inputs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--flags", action="store_true", help="flags instead of packets")
    parser.add_argument("--puts", action="store_true", help="NVSHMEM's puts to all peers")
    parser.add_argument("--returns", default="rows", choices=["rows", "f32", "bf16"])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    puts_to = tuple(peer for peer in range(size) if peer != rank) if args.puts else ()
    group = Nvshmem(returns=args.returns, packets=not args.flags, puts_to=puts_to)
    with AllToAll(**arguments(spec(ParallelConfig(size // args.tp, args.tp))), group=group, timeout_s=30) as a2a:
        stress = Stress(a2a, args.inputs, args.seed)
        start = time.monotonic()
        wrong = stress.run(args.rounds, args.seed)
        seconds = time.monotonic() - start
    print(f"rank {rank}: {args.rounds} rounds in {seconds:.0f} s, {wrong} differences", flush=True)
    dist.destroy_process_group()
    raise SystemExit(wrong != 0)


if __name__ == "__main__":
    main()
