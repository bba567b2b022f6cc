"""How MLA decode is cut among a fixed number of programs, and the buffer that brings the cut to the GPU.

A sequence's work is its tiles of 64 cached rows, a page each. Its queries make rows, q_len · heads, of which a program
takes one tile; the programs for the row tiles of one sequence read the same pages and should do so together, so that
all but one find them in the L2. So `row_tiles` programs form a *group*, and the groups share the tiles of all sequences
(the same walk for every row tile):

- an *item* is a range of tiles of one sequence; a group walks its items one after another;
- a group may take a cost of `cap`, an item costs its tiles and ITEM_COST for its start and end. Sequences go to groups
  in order; one that does not fit is cut. `cap` is the smallest, within some tiles, with which the groups suffice;
- the items of a cut sequence leave partial sums in *slots*, at most two of a group, and a second kernel merges them in
  the order of the tiles. So the result depends on the lengths and on the number of groups, and on nothing else.

Grid and buffers have one size for all plans, hence a captured graph follows a new plan. Every plan writes the whole
buffer: nothing of an earlier one survives in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

ITEM_COST = 2  # in tiles
LEAST_TILES = 1  # of a part of a cut sequence
# As they stand in the buffer. A kernel waits for each number that leads to the next, so all of an item are together.
ITEM_FIELDS = 8  # first tile, end tile, slot (−1: not cut), first token, q_len, kv_len, sequence, 0
MERGE_FIELDS = 4  # first slot, slots, first token, q_len


@dataclass(frozen=True)
class Split:
    items: list[tuple[int, int, int, int]]  # sequence, first tile, end tile, slot (−1: not cut)
    group_start: list[int]  # [groups + 1], into items
    merges: list[tuple[int, int, int]]  # sequence, first slot, slots; at most one a group


def split(tiles: Sequence[int], groups: int) -> Split:
    """tiles: of each sequence, 0 included. Every sequence gets at least one item, every tile exactly one."""
    cap = max(-(-(sum(tiles) + ITEM_COST * len(tiles)) // groups), ITEM_COST + LEAST_TILES)
    while True:
        plan = _fill(tiles, groups, cap)
        if plan is not None:
            return plan
        cap += max(1, cap // 64)


def _fill(tiles: Sequence[int], groups: int, cap: int) -> Split | None:
    """In order, with at most `cap` a group; None if the groups do not suffice."""
    items: list[tuple[int, int, int, int]] = []
    group_start, merges = [0], []
    left, slot = cap, 0
    for sequence, end in enumerate(tiles):
        first, first_slot = 0, slot
        while True:
            rest = end - first
            fits = rest + ITEM_COST <= left
            take = rest if fits else min(left - ITEM_COST, rest - LEAST_TILES)
            # Nothing of worth fits; an empty group takes a sequence that cannot be cut whatever it costs.
            if take < LEAST_TILES and not fits and left < cap:
                group_start.append(len(items))
                left = cap
                if len(group_start) > groups:
                    return None
                continue
            if take < LEAST_TILES and not fits:
                take = rest
            whole = first == 0 and take == end
            items.append((sequence, first, first + take, -1 if whole else slot))
            slot += not whole
            first += take
            left = max(0, left - take - ITEM_COST)
            if first == end:
                break
        if slot > first_slot:
            merges.append((sequence, first_slot, slot - first_slot))
    group_start += [len(items)] * (groups + 1 - len(group_start))
    return Split(items, group_start, merges)


class PlanBuffer:
    """What the kernels read of a plan, in one int32 tensor on the device; `views` names its parts."""

    def __init__(self, groups: int, max_batch: int, max_pages: int, device: torch.device):
        self.groups, self.max_batch, self.max_pages = groups, max_batch, max_pages
        self.sizes = {
            "group_start": groups + 1,
            "items": ITEM_FIELDS * (groups + max_batch),
            "num_merges": 1,
            "merges": MERGE_FIELDS * groups,
            "page_table": max_batch * max_pages,
        }
        total = sum(self.sizes.values())
        self.host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = torch.zeros(total, dtype=torch.int32, device=device)
        self.views = dict(zip(self.sizes, self.device.split(list(self.sizes.values())), strict=True))
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def write(self, page_table: Tensor, kv_lens: Sequence[int], q_lens: Sequence[int], page_size: int) -> Split:
        """Plan, and copy to the device on the current stream. page_table int [B, P] on the CPU."""
        plan = split([-(-n // page_size) for n in kv_lens], self.groups)
        if self._copied is not None:
            self._copied.synchronize()  # else the copy of the plan before might take this one's numbers
        parts = dict(zip(self.sizes, self.host.split(list(self.sizes.values())), strict=True))
        self.host.zero_()
        token = [0, *accumulate(q_lens)]
        put: dict[str, list[int]] = {
            "group_start": plan.group_start,
            "items": [n for s, *tiles_slot in plan.items for n in (*tiles_slot, token[s], q_lens[s], kv_lens[s], s, 0)],
            "num_merges": [len(plan.merges)],
            "merges": [n for s, *slots in plan.merges for n in (*slots, token[s], q_lens[s])],
        }
        for name, values in put.items():
            parts[name][: len(values)] = torch.tensor(values, dtype=torch.int32)
        width = min(page_table.shape[1], self.max_pages)
        parts["page_table"].view(self.max_batch, self.max_pages)[: len(kv_lens), :width] = page_table[:, :width]
        self.device.copy_(self.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return plan
