"""Sums along a tree whose bits do not depend on who has which addends."""

from __future__ import annotations

import random

import pytest
import torch

from ditmesh.core.ordered import OrderedSum, nodes_of


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 12, 13])
def test_any_sharing_out_gives_the_same_bits(count):
    generator = torch.Generator().manual_seed(count)
    addends = torch.randn(count, 50, generator=generator) * 10 ** torch.randn(count, 1, generator=generator)
    alone = OrderedSum(count)
    for number, addend in enumerate(addends):
        alone.add((number, number + 1), addend)
    shuffled = random.Random(count)
    in_another_order = sum(addends[number] for number in range(count - 1, -1, -1))
    for parts in range(1, count + 1):
        numbers = list(range(count))
        shuffled.shuffle(numbers)
        total = OrderedSum(count)
        for part in range(parts):
            mine = OrderedSum(count)
            held = set(numbers[part::parts])
            for number in sorted(held, reverse=True):
                mine.add((number, number + 1), addends[number])
            # What a rank can add up by itself, it has.
            assert sorted(mine.nodes) == nodes_of(held, (0, count))
            for node, value in mine.nodes.items():
                total.add(node, value)
        assert torch.equal(total.total, alone.total)
    if count > 4:
        # Such addends do not add up to the same in any order.
        assert not torch.equal(in_another_order, alone.total)


def test_an_addend_counts_once():
    total = OrderedSum(3)
    total.add((1, 2), torch.ones(1))
    with pytest.raises(ValueError, match="given twice"):
        total.add((1, 2), torch.ones(1))
