"""Partitions of dimensions: the elements of each part (a rank, a tile, a patch).

Every strategy that shares tokens, features, heads or rows out uses `Partition` and the functions below, so that a cut
is decided, taken and put together in one place. Parts that are not contiguous are PipeFusion's `Owners`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError


@dataclass(frozen=True)
class Partition:
    """The partition of one dimension: a sequence of blocks, of each of which every part holds a run.

    A block is a stream of a joint sequence, one of the three in a packed q|k|v, or all rows of a batch. A part is a
    rank, a tile, a patch or a virtual rank; what it holds are its runs, one after the other.

    Attributes:
        blocks: for every block the lengths of the parts' runs, in the order of the parts.
        replicated: numbers of the blocks that every part holds whole; then every length is the block's.
    """

    blocks: tuple[tuple[int, ...], ...]
    replicated: frozenset[int] = frozenset()
    names: tuple[str, ...] = ()
    # Results that were derived of it: the same few questions come from every block of a model.
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def beside(partitions: Sequence[Partition]) -> Partition:
        """The blocks of several partitions of as many parts, one after the other."""
        starts = offsets([len(partition.blocks) for partition in partitions])
        return Partition(
            tuple(block for partition in partitions for block in partition.blocks),
            frozenset(
                start + block
                for start, partition in zip(starts, partitions, strict=True)
                for block in partition.replicated
            ),
            tuple(name for partition in partitions for name in partition.names),
        )

    @cached_property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.blocks[0]) if self.blocks else 0

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Size of every block."""
        return tuple(
            lengths[0] if block in self.replicated else sum(lengths) for block, lengths in enumerate(self.blocks)
        )

    @cached_property
    def total(self) -> int:
        """Size of the whole dimension."""
        return sum(self.totals)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The size of every part."""
        return tuple(map(sum, zip(*self.blocks, strict=True)))

    @cached_property
    def all_replicated(self) -> bool:
        """True if every part holds everything."""
        return len(self.replicated) == len(self.blocks)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return offsets(self.totals)

    def sizes(self, part: int) -> list[int]:
        """Lengths of a part's runs, block by block."""
        return self._once(("sizes", part), lambda: [lengths[part] for lengths in self.blocks])

    def start(self, part: int, block: int = 0) -> int:
        """The place in the whole dimension at which a part's run of a block begins."""
        return self._starts[block] + (0 if block in self.replicated else sum(self.blocks[block][:part]))

    def places(self, parts: int | range) -> list[tuple[int, int]]:
        """``(start, length)`` of what a part, or consecutive ones, hold of every block, in the whole dimension."""
        parts = range(parts, parts + 1) if isinstance(parts, int) else parts
        return self._once(
            ("places", parts.start, parts.stop),
            lambda: [
                (self._starts[block], self.totals[block])
                if block in self.replicated
                else (self.start(parts.start, block), sum(lengths[parts.start : parts.stop]))
                for block, lengths in enumerate(self.blocks)
            ],
        )

    def runs(self, part: int) -> list[tuple[int, int]]:
        """``(start, stop)`` of the runs a part holds, in the whole dimension; neighbouring runs are one."""
        spans: list[tuple[int, int]] = []
        for start, length in self.places(part):
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], start + length)
            elif length:
                spans.append((start, start + length))
        return spans

    def take(self, whole: Tensor, dim: int, parts: int | range) -> Tensor:
        """The elements of one part, or consecutive ones, of a tensor that is whole along ``dim``, block by block.

        A view where there is one block, else a copy.
        """
        pieces = [whole.narrow(dim, start, length) for start, length in self.places(parts)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def copy(self, whole: Tensor, dim: int, part: int) -> Tensor:
        """A part's elements of a whole tensor, in memory of their own: a view would keep the whole one."""
        taken = self.take(whole, dim, part)
        return taken.clone(memory_format=torch.contiguous_format) if len(self.blocks) == 1 else taken

    def split(self, held: Tensor, dim: int, part: int) -> tuple[Tensor, ...]:
        """A part's elements, block by block."""
        return held.split(self.sizes(part), dim) if len(self.blocks) > 1 else (held,)

    def join(self, held: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor from all parts; of a replicated block the first part's."""
        if len(held) == 1:
            return held[0]
        by_part = [self.split(one, dim, part) for part, one in enumerate(held)]
        pieces = [
            split[block]
            for block in range(len(self.blocks))
            for split in (by_part[:1] if block in self.replicated else by_part)
        ]
        return torch.cat(pieces, dim)

    def first(self, count: int, part: int, block: int = 0) -> int:
        """The number of a block's first ``count`` elements that a part holds."""
        if block in self.replicated:
            return count
        length = self.blocks[block][part]
        return min(max(count - sum(self.blocks[block][:part]), 0), length)

    def of(self, parts: range) -> Partition:
        """The same blocks as some consecutive parts have them among themselves."""
        return self._once(
            ("of", parts.start, parts.stop),
            lambda: Partition(
                tuple(lengths[parts.start : parts.stop] for lengths in self.blocks), self.replicated, self.names
            ),
        )

    def regroup(self, groups: Sequence[range]) -> Partition:
        """The same blocks with groups of consecutive parts for parts."""
        return self._once(
            ("regroup", tuple(groups)),
            lambda: Partition(
                tuple(
                    (lengths[0],) * len(groups)
                    if block in self.replicated
                    else tuple(sum(lengths[group.start : group.stop]) for group in groups)
                    for block, lengths in enumerate(self.blocks)
                ),
                self.replicated,
                self.names,
            ),
        )

    def select(self, names: tuple[str, ...]) -> Partition:
        """The blocks of these names, as far as there are any, in this order."""

        def derived() -> Partition:
            numbers = [self.names.index(name) for name in names if name in self.names]
            return Partition(
                tuple(self.blocks[number] for number in numbers),
                frozenset(place for place, number in enumerate(numbers) if number in self.replicated),
                tuple(self.names[number] for number in numbers),
            )

        return self._once(("select", names), derived)

    def resized(self, name: str, length: int) -> Partition:
        """The same with another length of a replicated block, of which some elements take part only."""
        if name not in self.names:
            return self
        number = self.names.index(name)

        def derived() -> Partition:
            blocks = [(length,) * self.parts if block == number else b for block, b in enumerate(self.blocks)]
            return Partition(tuple(blocks), self.replicated, self.names)

        return self._once(("resized", name, length), derived)

    def _once(self, key: Any, derive: Any) -> Any:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = derive()
        return known


def even_cut(length: int, parts: int) -> tuple[int, ...]:
    """Cut ``length`` tokens into ``parts`` runs with lengths that differ by at most one, longer runs first.

    >>> even_cut(11, 3)
    (4, 4, 3)
    """
    if parts < 1:
        raise ConfigError(f"cannot cut {length} tokens into {parts} parts; use at least 1")
    base, extra = divmod(length, parts)
    return tuple(base + (1 if part < extra else 0) for part in range(parts))


def weighted_cut(length: int, weights: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Cut ``length`` into runs in proportion to ``weights``, each at least one unit, cut between units.

    The remainder after rounding down goes to the runs that lost most by it, the first of them on a tie. The last run
    also takes what is no whole unit; with fewer units than runs the unit is 1. `ConfigError`: fewer than one a run.

    >>> weighted_cut(100, (2, 1), unit=16)
    (64, 36)
    """
    parts = len(weights)
    if length < parts:
        raise ConfigError(f"{length} cannot be cut into {parts} runs of at least 1; use at most {length} ranks")
    if length < unit * parts:
        unit = 1
    units, rest = divmod(length, unit)
    if len(set(weights)) == 1:
        counts = list(even_cut(units, parts))
    else:
        # Every run has one unit for certain; the others are shared by weight.
        shares = [units * weight / sum(weights) for weight in weights]
        counts = [max(1, int(share)) for share in shares]
        while sum(counts) < units:
            counts[max(range(parts), key=lambda part: (shares[part] - counts[part], -part))] += 1
        while sum(counts) > units:
            richest = max((part for part in range(parts) if counts[part] > 1), key=lambda p: (counts[p] - shares[p], p))
            counts[richest] -= 1
    lengths = [count * unit for count in counts]
    lengths[-1] += rest
    return tuple(lengths)


def cut_by_cost(costs: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Cut elements with these costs into runs of at least one, whose costs are as the ``weights`` are, or nearly."""
    ends, parts = [0], len(weights)
    for part in range(1, parts):
        share = sum(costs) * sum(weights[:part]) / sum(weights)
        choices = range(ends[-1] + 1, len(costs) - parts + part + 1)
        ends.append(min(choices, key=lambda end, share=share: abs(sum(costs[:end]) - share)))
    return tuple(end - start for start, end in pairwise([*ends, len(costs)]))


def offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    """Start of every run."""
    return tuple(accumulate(lengths, initial=0))[:-1]
