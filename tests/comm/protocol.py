"""The protocol of the exchange kernels as a transition system small enough to try every interleaving.

`Model` is a few ranks, each with a few blocks, which run the four halves exchange after exchange with any routing;
`search` (search.py) visits every reachable state. What is checked:

- a reader takes no value of another exchange: none that is stale, none that was overwritten before it was read;
- no state is without a next step unless every rank is through (no deadlock);
- memory that a put reads from is not rewritten before the put was delivered.

**What is assumed of the machine**, and nothing more:

1. *Stores to a window land at any time and in any order*, also those to one address: the search asserts that there are
   never two of these on their way. Nothing orders them: no later store, no block barrier, no end of a kernel.
2. *`packets`*: 16 bytes land at once and are loaded at once. A header is 12 bytes and the number of the exchange,
   counted modulo `wrap`; it is rewritten in every exchange. All else is read by one block, and never zero: its reader
   waits until it is not, and writes zero again before its kernel ends.
3. *`flags`*: a store with release lands after every earlier store of its block (cumulativity over the block's
   barrier); whoever loads it with acquire sees those. *`puts`*: a signal lands after the data of its own put; data is
   read from the outbox at any time between the call and the landing. A signal by itself is ordered with nothing.
4. *Between two kernels of a stream* (also behind griddepcontrol.wait) the earlier one's loads have returned and its
   stores to its own memory are performed. Blocks of one kernel are not ordered with each other at all.
5. *No store is issued before the branch that leads to it is decided.* Hence a line that has been seen to carry the
   number of an exchange orders the reader's next stores after it, also where the load is relaxed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

ALONE = ("send", "enter", "return", "advance")  # steps that always can be and commute with all others
# number, exchange, and what else: "released" for a flag, "unit" for what has no number, the outbox for data that is put
NEVER = (0, 0, None)


class Wrong(Exception):
    """A step that must not be possible was."""


@dataclass(frozen=True)
class Model:
    """`tokens`: the most a rank sends itself (a group of tp ranks has tp times as many). `routes`: destinations that a
    rank chooses from in each exchange, a tuple of sets, one for each token; None: all there are. `broken`: what is
    taken out, see test_protocol.py."""

    ranks: int = 2
    tp: int = 1
    blocks: int = 1
    tokens: int = 1
    exchanges: int = 3
    slots: int = 1
    fused: bool = True
    protocol: str = "packets"  # "packets", "flags", "puts"
    remote: frozenset[tuple[int, int]] = frozenset()  # with puts: (from, to) that are not mapped
    routes: tuple | None = None
    wrap: int = 1 << 10
    broken: str | None = None
    places: dict = field(default_factory=dict, compare=False)  # address -> index in a state's memory

    def __post_init__(self) -> None:
        R, own, group = range(self.ranks), range(self.tokens), range(self.tokens * self.tp)
        kinds = [("entered", d, q) for d in R for q in R] + [("header", d, s) for d in R for s in R]
        kinds += [("entries", d, s, j) for d in R for s in R for j in own]
        kinds += [("token", d, s, j) for d in R for s in R for j in own]
        kinds += [("output", d, t, e) for d in R for t in group for e in R]
        for slot in range(self.slots):
            for key in kinds:
                self.places[slot, *key] = len(self.places)
                if self.protocol != "packets" and key[0] != "entered":
                    self.places[slot, f"{key[0]} flag", *key[1:]] = len(self.places)

    # ---- what a rank runs

    def kernels(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """(exchange, slot, halves) of each launch of the one stream. With two slots the halves of two exchanges
        interleave, the later one's receives first."""
        dispatch, combine = ("dispatch_send", "dispatch_recv"), ("combine_send", "combine_recv")
        launches = []
        for first in range(1, self.exchanges + 1, self.slots):
            flight = [(x, (x - first)) for x in range(first, min(first + self.slots, self.exchanges + 1))]
            if self.fused:
                launches += [(x, slot, h) for h in (dispatch, combine) for x, slot in flight]
            else:
                for half in (*dispatch, *combine):
                    order = reversed(flight) if half.endswith("recv") else flight
                    launches += [(x, slot, (half,)) for x, slot in order]
        return launches

    def items(self, block: int) -> list[tuple[int, int]]:
        """The (source, token) pairs of a block."""
        pairs = itertools.product(range(self.tokens), range(self.ranks))
        return [(s, j) for i, (j, s) in enumerate(pairs) if i % self.blocks == block]

    def steps(self, rank: int, block: int, halves: tuple[str, ...]) -> list[tuple]:
        """What a block does in a launch; steps that the routing makes idle are skipped when they come up."""
        steps: list[tuple] = []
        for half in halves:
            if half == "dispatch_send":
                steps += [("choose",)] * (block == 0)
                if self.broken != "no barrier" and not (self.broken == "barrier in one block" and block):
                    steps.append(("barrier",))
                steps.append(("send",))
            elif half == "dispatch_recv":
                if self.broken == "entered early" and block == 0:
                    steps.append(("enter",))
                lines: list[tuple] = [
                    ("header", rank, s)
                    for s in range(self.ranks)
                    if not (self.broken == "headers of first ranks" and s % self.tp)
                ]
                for s, j in self.items(block):
                    lines += [("entries", rank, s, j), ("token", rank, s, j)]
                steps += self.reads(lines)
                if self.broken != "tokens cleared late":
                    steps += self.clears(lines)
            elif half == "combine_send":
                if block == 0 and self.broken != "entered early":
                    steps.append(("enter",))
                steps.append(("return",))
            else:
                group = range(block, self.tokens * self.tp, self.blocks)
                lines = [("output", rank, t, e) for t in group for e in range(self.ranks)]
                steps += self.reads(lines) + self.clears(lines)
                if self.broken == "tokens cleared late":
                    steps += self.clears([("token", rank, s, j) for s, j in self.items(block)])
                steps.append(("advance",))
        return steps

    def reads(self, lines: list[tuple]) -> list[tuple]:
        """Wait for lines, or for flags and then look at the data."""
        waits = [line for line in lines if self.broken != f"no wait for {line[0]}s"]
        looks = lines
        if self.protocol == "packets":
            looks = [line for line in lines if line not in waits]
        else:
            waits = [(f"{line[0]} flag", *line[1:]) for line in waits]
        return [("wait", *waits)] + [("look", *looks)] * bool(looks)

    def clears(self, lines: list[tuple]) -> list[tuple]:
        if self.protocol != "packets" or self.broken == "nothing cleared":
            return []
        return [("clear", *(line for line in lines if self.is_unit(line[0])))]

    # ---- states: (position of each rank: (launch, step of each block)), epochs, routes, memory

    def start(self) -> tuple:
        position = tuple((0, (0,) * self.blocks) for _ in range(self.ranks))
        epochs = tuple(((0,) * self.blocks,) * self.slots for _ in range(self.ranks))
        return position, epochs, ((None,) * (self.exchanges + 1),) * self.ranks, ((NEVER,),) * len(self.places)

    def number(self, epoch: int) -> int:
        return epoch % self.wrap

    def choices(self) -> list[tuple]:
        if self.routes is not None:
            return list(self.routes)
        subsets = [frozenset(c) for n in range(self.ranks + 1) for c in itertools.combinations(range(self.ranks), n)]
        return [r for n in range(self.tokens + 1) for r in itertools.product(subsets, repeat=n)]

    def used(self, routes: tuple, exchange: int, kind: str, rank: int, *where: int) -> bool:
        """Whether something is sent to this address in this exchange."""
        kind = kind.removesuffix(" flag")
        if kind == "header":
            return True
        route = routes[self.source_of((kind, rank, *where))][exchange] or ()
        if kind == "output":
            t, e = where
            return t // self.tp < len(route) and e in route[t // self.tp]
        j = where[1]
        return j < len(route) and (kind == "entries" or rank in route[j])

    def source_of(self, line: tuple) -> int:
        """The rank whose routing decides whether something is sent there."""
        kind, rank, first, *_ = line
        return rank // self.tp * self.tp + first % self.tp if kind.startswith("output") else first

    def enabled(self, state: tuple) -> list[tuple[int, int, tuple]]:
        """(rank, block, step) of what may come next; of steps that commute with all others, one alone."""
        todo = []
        for rank, (at, steps) in enumerate(state[0]):
            if at == len(self._launches):
                continue
            for block, step in enumerate(steps):
                program = self._programs[rank, block, self._launches[at][2]]
                if step < len(program):
                    if program[step][0] in (*ALONE, "choose"):
                        return [(rank, block, program[step])]  # nobody can tell when it happens: now, before all else
                    todo.append((rank, block, program[step]))
        return todo

    def take(self, state: tuple, rank: int, block: int, step: tuple) -> Iterator[tuple]:
        """The states after a step; none if it has to wait. Raises `Wrong`."""
        position, epochs, routes, memory = state
        at, steps = position[rank]
        exchange, slot, halves = self._launches[at]
        epoch = epochs[rank][slot][block] + 1
        number, kind = self.number(epoch), step[0]
        steps = (*steps[:block], steps[block] + 1, *steps[block + 1 :])
        if all(n == len(self._programs[rank, b, halves]) for b, n in enumerate(steps)):
            at, steps = at + 1, (0,) * self.blocks
        position = (*position[:rank], (at, steps), *position[rank + 1 :])
        new = list(memory)

        if kind == "choose":
            if routes[rank][exchange] is not None:  # another rank of the group, which has the same tokens, has chosen
                yield position, epochs, routes, memory
                return
            first = rank // self.tp * self.tp
            for group in itertools.product(self.choices(), repeat=self.tp):
                lengths = [len(route) for route in group]
                if lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1:
                    new_routes = list(routes)
                    for i, route in enumerate(group, first):
                        new_routes[i] = (*routes[i][:exchange], route, *routes[i][exchange + 1 :])
                    yield position, epochs, tuple(new_routes), memory
            return
        if kind == "barrier":
            peers = range(self.ranks)
            if self.broken == "barrier of destinations":
                peers = sorted(set().union(*routes[rank][exchange]))
            for q in peers:
                i = self.places[slot, "entered", rank, q]
                here = [n for n, entry in enumerate(memory[i]) if self.reached(entry[0], epoch - 1)]
                if not here:
                    return
                if not self.reached(memory[i][-1][0], epoch - 1):
                    raise Wrong(f"`entered` {epoch - 1} of rank {q} may be overwritten before it is seen")
                new[i] = memory[i][here[0] :]
        elif kind == "send":
            if block == 0:
                for d in range(self.ranks):
                    self.store(new, rank, d, slot, number, exchange, "header", d, rank)
            for j in range(block, len(routes[rank][exchange]), self.blocks):
                for d in range(self.ranks):
                    self.store(new, rank, d, slot, number, exchange, "entries", d, rank, j)
                for d in sorted(routes[rank][exchange][j]):
                    self.store(new, rank, d, slot, number, exchange, "token", d, rank, j)
        elif kind == "enter":
            for q in range(self.ranks):
                self.append(new, self.places[slot, "entered", q, rank], (epoch, exchange, None))
        elif kind == "return":
            for s, j in self.items(block):
                route = routes[s][exchange]
                if j < len(route) and rank in route[j]:
                    home = s // self.tp * self.tp
                    for q in range(home, home + self.tp):
                        where = q, j * self.tp + s % self.tp, rank
                        self.store(new, rank, q, slot, number, exchange, "output", *where)
        elif kind == "clear":
            for line in step[1:]:
                if self.used(routes, exchange, *line):
                    i = self.places[slot, *line]
                    if len(memory[i]) > 1:
                        raise Wrong(f"{line} is cleared while a store of exchange {memory[i][-1][1]} is on its way")
                    new[i] = (NEVER,)
        elif kind == "advance":
            if self.broken != "epoch stands still" and not (self.broken == "epoch of block 0 only" and block):
                mine = epochs[rank][slot]
                mine = (*mine[:block], epoch, *mine[block + 1 :])
                mine = (*epochs[rank][:slot], mine, *epochs[rank][slot + 1 :])
                epochs = (*epochs[:rank], mine, *epochs[rank + 1 :])
            routes, new = self.forget(position, epochs, routes, new)
        else:
            for line in step[1:]:
                if self.used(routes, exchange, *line):
                    i = self.places[slot, *line]
                    if kind == "look":  # at data behind a flag, or at what it did not wait for
                        for _, x, _ in new[i]:
                            if x != exchange:
                                raise Wrong(f"takes {line} of exchange {x} in exchange {exchange}")
                    elif not self.see(new, i, 1 if self.is_unit(line[0]) else number, exchange, line):
                        return
                elif routes[self.source_of(line)][exchange] is None:
                    return  # it is not known yet
        yield position, epochs, routes, tuple(new)

    def see(self, memory: list, i: int, number: int, exchange: int, line: tuple) -> bool:
        """A line or flag of this number, if it may have landed; the reader then has seen it."""
        seen = memory[i]
        for n, (theirs, x, what) in enumerate(seen):
            if theirs != number:
                continue
            if x != exchange:
                raise Wrong(f"takes {line} of exchange {x} in exchange {exchange}")
            if n + 1 < len(seen):
                raise Wrong(f"{line} of exchange {x} may be overwritten by {seen[-1][1]} before it is seen")
            memory[i] = seen[n:]
            if what == "released":  # its data has landed before it
                data = memory[i - 1]
                landed = max(m for m, entry in enumerate(data) if entry[1] <= x)
                memory[i - 1] = data[landed:]
            return True
        return False

    def store(self, memory: list, rank: int, to: int, slot: int, number: int, exchange: int, *address) -> None:
        """A line; or data and then its flag, straight or from the outbox."""
        i = self.places[slot, *address]
        if self.protocol == "packets":
            self.append(memory, i, (1, exchange, "unit") if self.is_unit(address[0]) else (number, exchange, None))
            return
        box = None
        if (rank, to) in self.remote:
            # A token is put to several ranks from one place, a header is made for each.
            box = (rank, slot, *address[:1], *(address[3:] if address[0] in ("token", "entries") else address[1:]))
            for lane in memory:
                if any(entry[2] == box and entry[1] != exchange for entry in lane[1:]):
                    raise Wrong(f"the outbox of {address} is rewritten before exchange {lane[-1][1]} was delivered")
        self.append(memory, i, (number, exchange, box))
        released = None if self.broken in ("no release", "signal before data") else "released"
        self.append(memory, i + 1, (number, exchange, released))

    def is_unit(self, kind: str) -> bool:
        return self.protocol == "packets" and kind != "header"

    def append(self, memory: list, i: int, entry: tuple) -> None:
        if len(memory[i]) > 1 and self.broken is None:
            raise Wrong(f"address {i} has two stores on their way, of exchanges {memory[i][-1][1]} and {entry[1]}")
        memory[i] += (entry,)

    def reached(self, seen: int, last: int) -> bool:
        if self.broken == "barrier compares for equality":
            return seen == last
        return seen >= last

    def forget(self, position: tuple, epochs: tuple, routes: tuple, memory: list) -> tuple[tuple, list]:
        """Without the routing of exchanges that all are through with, and without lines that cannot be asked for."""
        through = min(self._launches[at][0] if at < len(self._launches) else self.exchanges + 1 for at, _ in position)
        through = max(0, through - self.slots + 1)
        if self.wrap > self.exchanges:
            asked = [min(min(e[slot]) for e in epochs) for slot in range(self.slots)]
            per_slot = len(memory) // self.slots
            for i, lane in enumerate(memory):
                # `entered` is asked for by the number of the exchange before; what is there without one stays.
                if 0 < lane[0][0] < asked[i // per_slot] and lane[0][2] != "unit":
                    memory[i] = (NEVER, *lane[1:])
        return tuple(((None,) * through + r[through:]) for r in routes), memory

    @property
    def _launches(self) -> list:
        return self.places.setdefault("launches", self.kernels())

    @property
    def _programs(self) -> dict:
        if "programs" not in self.places:
            self.places["programs"] = {
                (r, b, halves): self.steps(r, b, halves)
                for r in range(self.ranks) for b in range(self.blocks) for halves in {h for _, _, h in self._launches}
            }  # fmt: skip
        return self.places["programs"]
