"""Measurements to what a figure draws: series of points, and grids of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt


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
class Grid:
    """Values over two axes, ``values[row][column]``; one that was not measured is not a number."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


def per_step(name: str, errors: Mapping[int, float]) -> Series:
    """The error of every step, in the order of the steps (which count from 1)."""
    steps = sorted(errors)
    return Series(name, tuple(map(float, steps)), tuple(errors[step] for step in steps))


def mean_of_runs(name: str, x: Sequence[float], runs: Sequence[Sequence[float]]) -> Series:
    """The mean of several runs at every x, with bars of one standard deviation (of a sample) to both sides.

    Args:
        name: of the series.
        x: where the runs were measured.
        runs: one sequence of values for each run, as long as ``x``. A single run has no bars.
    """
    mean, low, high = [], [], []
    for values in zip(*runs, strict=True):
        finite = [value for value in values if isfinite(value)]
        middle = sum(finite) / len(finite) if finite else nan
        spread = sqrt(sum((v - middle) ** 2 for v in finite) / (len(finite) - 1)) if len(finite) > 1 else 0.0
        mean.append(middle)
        low.append(middle - spread)
        high.append(middle + spread)
    bars = len(runs) > 1
    return Series(name, tuple(x), tuple(mean), tuple(low) if bars else (), tuple(high) if bars else ())


def grid(
    values: Mapping[tuple[str, str], float], rows: Iterable[str] | None = None, columns: Iterable[str] | None = None
) -> Grid:
    """A grid of values by (row, column); rows and columns in the order given, else in that of the mapping."""
    down = tuple(dict.fromkeys(row for row, _ in values)) if rows is None else tuple(rows)
    across = tuple(dict.fromkeys(column for _, column in values)) if columns is None else tuple(columns)
    return Grid(down, across, tuple(tuple(values.get((row, column), nan) for column in across) for row in down))
