"""The data of charts: series of points, single points, and grids of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: what the legend calls it.
        x, y: its points; a y that is not finite leaves a gap.
        low, high: ends of every point's error bar; empty: no bars.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Point:
    """One point of a scatter chart: its name, a short form of it for the chart, the group that colours it."""

    name: str
    short: str
    group: str
    x: float
    y: float


@dataclass(frozen=True)
class ValueGrid:
    """Values over two axes, ``values[row][column]``; one that was not measured is not a number."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


def grid(
    values: Mapping[tuple[str, str], float], rows: Iterable[str] | None = None, columns: Iterable[str] | None = None
) -> ValueGrid:
    """A grid of values by (row, column); rows and columns in the order given, else in that of the mapping."""
    down = tuple(dict.fromkeys(row for row, _ in values) if rows is None else rows)
    across = tuple(dict.fromkeys(column for _, column in values) if columns is None else columns)
    return ValueGrid(down, across, tuple(tuple(values.get((row, column), nan) for column in across) for row in down))
