"""The cut of MLA decode among groups: all of the work once, in order, balanced; and its buffer."""

from __future__ import annotations

import pytest
import torch

from moelab.ops.mla_plan import ITEM_COST, PlanBuffer, split


def draw(count, longest):
    tiles = torch.randint(0, longest + 1, (count,))
    tiles[torch.rand(count) < 0.2] = 0
    return tiles.tolist()


@pytest.mark.parametrize("groups", [1, 2, 5, 33, 132])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_every_tile_goes_to_one_item_and_every_part_to_its_slot(groups, count):
    for longest in (1, 3, 20, 300):
        tiles = draw(count, longest)
        plan = split(tiles, groups)
        assert len(plan.group_start) == groups + 1 and plan.group_start == sorted(plan.group_start)
        assert plan.group_start[0] == 0 and plan.group_start[-1] == len(plan.items) <= groups + count
        reached, slots = {}, []
        for sequence, first, end, slot in plan.items:
            assert first == reached.get(sequence, 0) and (end > first or tiles[sequence] == 0)
            assert (slot == -1) == (first == 0 and end == tiles[sequence])
            reached[sequence] = end
            slots += [(sequence, slot)] * (slot >= 0)
        assert list(reached) == list(range(count)) and list(reached.values()) == tiles
        assert [slot for _, slot in slots] == list(range(len(slots))) and len(slots) <= 2 * groups
        assert len(plan.merges) <= groups
        assert [(s, first + i) for s, first, parts in plan.merges for i in range(parts)] == slots
        assert all(parts > 1 for _, _, parts in plan.merges)


def costs(plan):
    for first, last in zip(plan.group_start, plan.group_start[1:], strict=False):
        yield sum(end - start + ITEM_COST for _, start, end, _ in plan.items[first:last])


@pytest.mark.parametrize(("tiles", "groups"), [([79] * 128, 33), ([256], 66), ([79] * 16, 33), ([300, 1, 1, 1], 16)])
def test_no_group_has_much_more_than_its_share(tiles, groups):
    plan = split(tiles, groups)
    whole = sum(tiles) + ITEM_COST * len(plan.items)
    assert max(costs(plan)) <= 1.05 * whole / groups + 1


def test_sequences_that_fit_are_not_cut():
    assert not split([79] * 128, 132).merges
    assert not split([5, 5, 5, 5], 4).merges


def test_a_plan_writes_the_whole_buffer():
    """What stood there before, on the host or the device, must not shine through."""
    buffer = PlanBuffer(4, 3, 6, torch.device("cpu"))
    table = torch.randint(100, (2, 5))
    left = []
    for rubbish in (0, 1 << 30):
        buffer.host.fill_(rubbish)
        buffer.device.fill_(rubbish)
        buffer.write(table, [300, 70], [2, 1], 64)
        left.append(buffer.device.clone())
    assert torch.equal(*left)
    views = buffer.views
    assert torch.equal(views["page_table"].view(3, 6)[:2, :5], table.int())
    plan = split([5, 2], 4)
    assert views["group_start"].tolist() == plan.group_start
    lengths = [(0, 2, 300, 0, 0), (2, 1, 70, 1, 0)]  # first token, q_len, kv_len, sequence
    items = [[*item[1:], *lengths[item[0]]] for item in plan.items]
    assert views["items"].view(-1, 8)[: len(items)].tolist() == items
    assert views["num_merges"].tolist() == [len(plan.merges)]
    merges = [[*merge[1:], *lengths[merge[0]][:2]] for merge in plan.merges]
    assert merges and views["merges"].view(-1, 4)[: len(merges)].tolist() == merges
