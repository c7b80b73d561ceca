"""Bands of rows: arithmetic of cuts, without tensors.

An image's rows are cut into *bands*, runs of neighbouring rows, one for each rank. What a layer does to the shape of a
tensor it does to the cut: a band of 5 rows has 10 behind an upsampling by 2, and 5 x 16 elements where rows of 16 are
flattened. A cut that would break up bands has no counterpart, and None says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ..core.partition import Partition, even_cut, offsets

# Rows of an image are cut at multiples of a power of two, if each rank has that many of them: levels of an encoder,
# which halve the rows, are cut at whole rows then.
_UNITS_PER_RANK = 4
_LARGEST_UNIT = 64


@dataclass(frozen=True)
class Band:
    """The cut of one dimension ``dim`` of a tensor.

    Attributes:
        rows: elements of every rank, in the order of the ranks; some may have none.
        runs: how often that repeats along the dimension: once for every frame, where frames and rows are flattened.
    """

    dim: int
    rows: tuple[int, ...]
    runs: int = 1

    @cached_property
    def partition(self) -> Partition:
        """The cut dimension as a whole."""
        return Partition((self.rows,) * self.runs)

    @property
    def total(self) -> int:
        """Size of the whole dimension."""
        return self.runs * sum(self.rows)

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of a rank's part of a tensor of this shape."""
        return (*whole[: self.dim], self.runs * self.rows[rank], *whole[self.dim + 1 :])

    def at(self, dim: int) -> Band:
        """The same cut of another dimension."""
        return self if dim == self.dim else replace(self, dim=dim)

    def scaled(self, factor: int, divisor: int = 1) -> Band:
        """Every row has become several, or several neighbouring rows, all of them on one rank, have become one."""
        return replace(self, rows=tuple(rows * factor // divisor for rows in self.rows))

    def rounded(self, multiple: int) -> Band | None:
        """The cut with borders moved down to the next multiple; None: the whole is none. For a single run."""
        if self.runs > 1 or self.total % multiple:
            return None
        bounds = [-(-stop // multiple) * multiple for _, stop in self.spans()]
        return replace(self, rows=tuple(stop - start for start, stop in zip([0, *bounds], bounds, strict=False)))

    def margins(self, rank: int, before: int, after: int) -> tuple[int, int]:
        """A rank's share of rows that are put before the first and behind the last one."""
        holders = [holder for holder, rows in enumerate(self.rows) if rows]
        return before * (rank == holders[0]), after * (rank == holders[-1])

    def extended(self, before: int, after: int) -> Band:
        """The cut with rows put before the first and behind the last one. For a single run."""
        rows = tuple(rows + sum(self.margins(rank, before, after)) for rank, rows in enumerate(self.rows))
        return replace(self, rows=rows)

    def kept(self, start: int, stop: int) -> Band:
        """Rows from ``start`` to ``stop`` alone are left. For a single run."""
        return replace(self, rows=tuple(max(0, min(stop, b) - max(start, a)) for a, b in self.spans()))

    def spans(self) -> list[tuple[int, int]]:
        """``(start, stop)`` of every rank's rows within a run."""
        return [(start, start + length) for start, length in zip(offsets(self.rows), self.rows, strict=True)]

    def viewed(self, before: Sequence[int], after: Sequence[int]) -> Band | None:
        """The cut of a tensor of the shape ``before`` that is seen, in the same order of elements, as ``after``."""
        row, repeats = prod(before[self.dim + 1 :]), prod(before[: self.dim]) * self.runs
        if not prod(before):
            return None
        # The innermost dimension that can be cut: of those that can, it has the fewest runs.
        for dim in reversed(range(len(after))):
            outer, inner = prod(after[:dim]), prod(after[dim + 1 :])
            if repeats % outer or after[dim] % (repeats // outer) or any(rows * row % inner for rows in self.rows):
                continue
            return Band(dim, tuple(rows * row // inner for rows in self.rows), repeats // outer)
        return None

    def windowed(self, total: int, kernel: int, stride: int, padding: int, dilation: int) -> Band:
        """The cut behind a layer that looks at windows of rows, such as a convolution, and has ``total`` rows.

        A window is where its middle is, so that rows stay where they are in a layer that keeps their number.
        """
        middle = padding - dilation * (kernel - 1) // 2
        bounds = [min(max(-(-(stop + middle) // stride), 0), total) for _, stop in self.spans()]
        bounds[-1] = total
        return replace(self, rows=tuple(stop - start for start, stop in zip([0, *bounds], bounds, strict=False)))


def bands_of(rows: int, ranks: int) -> tuple[int, ...]:
    """The rows of every rank, as even as cuts at multiples of a power of two allow; see `_UNITS_PER_RANK`.

    >>> bands_of(64, 3)
    (24, 20, 20)
    """
    unit = _LARGEST_UNIT
    while unit > 1 and (rows % unit or rows < unit * ranks * _UNITS_PER_RANK):
        unit //= 2
    return tuple(length * unit for length in even_cut(rows // unit, ranks))
