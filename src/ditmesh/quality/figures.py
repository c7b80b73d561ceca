"""Charts and pictures as pieces of HTML that need nothing from outside: SVG, and PNG inside the page.

Colours are CSS variables of `quality.report`, so that one figure serves light and dark pages. Lines differ in dashes
and marks as well as in colour. Every chart carries a title that screen readers read; the page puts its numbers in a
table beside it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Any

import numpy as np

from .curves import Grid, Series
from .pictures import as_picture

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 14, 44
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "10 4")
MARKS = ("circle", "square", "diamond", "triangle")
COLOURS = 6


@dataclass(frozen=True)
class Chart:
    """A drawn chart.

    Attributes:
        svg: the drawing.
        legend: HTML that explains colours; may be empty.
        header, rows: its numbers, for a table.
    """

    svg: str
    legend: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


# --------------------------------------------------------------------------------------------------
# Scales


@dataclass(frozen=True)
class _Scale:
    """Values to pixels, with ticks. On a logarithmic scale zero and less lie on the lowest line, marked 0."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    zero: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            value = log10(value) if value > 0 else self.low
        span = self.high - self.low
        return self.start + (self.stop - self.start) * ((value - self.low) / span if span else 0.5)

    def ticks(self, count: int = 6) -> Iterator[tuple[float, str]]:
        """Places in pixels and what stands there."""
        if self.log:
            if self.zero:
                yield self.start, "0"
            first = ceil(self.low + (1 if self.zero else 0))
            step = max(1, ceil((self.high - first) / count))
            for power in range(first, floor(self.high) + 1, step):
                yield self(10.0**power), f"1e{power}" if abs(power) > 3 else f"{10.0**power:g}"
            return
        step = _nice((self.high - self.low) / count)
        value = ceil(self.low / step - 1e-9) * step
        while value <= self.high + step * 1e-9:
            yield self(value), f"{0 if abs(value) < step / 1e6 else value:g}"
            value += step


def _nice(step: float) -> float:
    power = 10.0 ** floor(log10(step)) if step > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999) if step > 0 else 1.0


def _scale(values: Sequence[float], start: float, stop: float, log: bool, from_zero: bool = False) -> _Scale:
    finite = [value for value in values if isfinite(value)]
    if log:
        positive = [value for value in finite if value > 0]
        zero = len(positive) < len(finite) or not positive
        low = floor(log10(min(positive))) if positive else 0
        high = max(ceil(log10(max(positive))), low + 1) if positive else 1
        return _Scale(low - 1 if zero else low, high, start, stop, True, zero)
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    margin = (high - low) * 0.05 or abs(high) * 0.5 or 0.5
    return _Scale(low if from_zero and low == 0 else low - margin, high + margin, start, stop)


# --------------------------------------------------------------------------------------------------
# Charts


def line_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, log_y: bool = False, whole_x: bool = False
) -> Chart:
    """Lines through points, with error bars where the series have them.

    Args:
        series: one line each.
        title: read by screen readers; say what the chart shows.
        x_label, y_label: under and beside the axes, with units.
        log_y: logarithmic y axis; values of zero and less are drawn on its lowest line.
        whole_x: ticks at whole numbers only (steps).
    """
    xs = [x for line in series for x in line.x]
    ys = [y for line in series for y in (*line.y, *line.low, *line.high)]
    across = _scale(xs, LEFT, WIDTH - RIGHT, False)
    up = _scale(ys, HEIGHT - BOTTOM, TOP, log_y)
    parts = [_axes(across, up, x_label, y_label, whole_x)]
    barred = [line for line in series if line.low]
    for number, line in enumerate(series):
        colour, dash = f"s{number % COLOURS}", DASHES[number % len(DASHES)]
        # Bars of several lines stand beside one another.
        aside = 5 * (barred.index(line) - (len(barred) - 1) / 2) if line in barred else 0.0
        for run in _runs(line):
            path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in run)
            dashes = f' stroke-dasharray="{dash}"' if dash else ""
            parts.append(f'<polyline class="line {colour}" points="{path}"{dashes}/>')
        for index, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
            if not isfinite(y):
                continue
            spread = ""
            if line.low and isfinite(line.low[index]):
                low, high = up(line.low[index]), up(line.high[index])
                spread = f" ({line.low[index]:.3g} to {line.high[index]:.3g})"
                at = across(x) + aside
                parts.append(
                    f'<path class="bar-line {colour}" d="M{at:.1f} {low:.1f}V{high:.1f}'
                    f'm-2 0h4M{at - 2:.1f} {low:.1f}h4"/>'
                )
            tip = escape(f"{line.name}: {x_label} {x:g}, {y:.4g}{spread}")
            parts.append(_mark(MARKS[number % len(MARKS)], across(x), up(y), colour, tip))
    header = (x_label, *(line.name for line in series))
    by_x = [dict(zip(line.x, line.y, strict=True)) for line in series]
    rows = [(f"{x:g}", *(_number(points.get(x)) for points in by_x)) for x in sorted(set(xs))]
    return Chart(_svg("".join(parts), title), _legend([line.name for line in series]), header, tuple(rows))


def bar_chart(
    groups: Sequence[str], series: Sequence[Series], title: str, y_label: str, *, x_label: str = "", log_y: bool = False
) -> Chart:
    """Bars side by side: group g of a series is its ``y[g]``, with an error bar where it has one.

    ``x_label`` says what the groups are; one series alone has no legend.

    On a logarithmic axis bars stand on its lowest line; zero has no bar.
    """
    up = _scale([y for line in series for y in (*line.y, *line.low, *line.high)], HEIGHT - BOTTOM, TOP, log_y, True)
    across = _Scale(0, len(groups), LEFT, WIDTH - RIGHT)
    parts = [_axes(None, up, x_label, y_label)]
    floor_ = HEIGHT - BOTTOM if log_y else up(0)
    width = (across(1) - across(0)) * 0.8 / max(1, len(series))
    for number, line in enumerate(series):
        for group, y in enumerate(line.y):
            if not isfinite(y):
                continue
            left = across(group + 0.1) + number * width
            top, tall = min(up(y), floor_), abs(up(y) - floor_)
            tip = escape(f"{groups[group]}, {line.name}: {y:.4g}")
            parts.append(
                f'<rect class="bar s{number % COLOURS}" x="{left:.1f}" y="{top:.1f}" width="{width * 0.92:.1f}" '
                f'height="{tall:.1f}"><title>{tip}</title></rect>'
            )
            if line.low and isfinite(line.low[group]):
                middle = left + width * 0.46
                low, high = up(line.low[group]), up(line.high[group])
                parts.append(f'<path class="bar-line ink" d="M{middle:.1f} {low:.1f}V{high:.1f}"/>')
    for group, name in enumerate(groups):
        parts.append(_text(name, across(group + 0.5), HEIGHT - BOTTOM + 16, "middle"))
    header = (x_label, *(line.name for line in series))
    rows = tuple((name, *(_number(line.y[group]) for line in series)) for group, name in enumerate(groups))
    legend = _legend([line.name for line in series], bars=True) if len(series) > 1 else ""
    return Chart(_svg("".join(parts), title), legend, header, rows)


def heat_map(grid: Grid, title: str, x_label: str, y_label: str, *, log: bool = False) -> Chart:
    """Values as shades; every cell tells its value when pointed at. Rows run downwards.

    Args:
        grid: the values; cells that are not numbers stay empty.
        title: read by screen readers.
        x_label, y_label: what columns and rows are.
        log: shades follow the logarithm; zero gets the lightest one.
    """
    values = [value for row in grid.values for value in row if isfinite(value)]
    shade = _scale(values, 0, 1, log, from_zero=True)
    low, high = (shade.low, shade.high) if log else (min([0.0, *values]), max([0.0, *values]) or 1.0)
    if not log:
        shade = _Scale(low, high, 0, 1)
    left = 12 + 6.2 * max((len(name) for name in grid.rows), default=0)
    cell = min(28.0, max(9.0, 240 / max(1, len(grid.rows))))
    wide = (WIDTH - left - RIGHT) / max(1, len(grid.columns))
    height = TOP + cell * len(grid.rows) + 44
    parts = []
    for down, (name, row) in enumerate(zip(grid.rows, grid.values, strict=True)):
        y = TOP + down * cell
        if down % ceil(9 / cell) == 0:
            parts.append(_text(name, left - 4, y + cell / 2 + 4, "end"))
        for across, value in enumerate(row):
            if not isfinite(value):
                continue
            tip = escape(f"{name}, {x_label} {grid.columns[across]}: {value:.4g}")
            opacity = min(1.0, max(0.02, shade(value)))
            parts.append(
                f'<rect class="cell" x="{left + across * wide:.1f}" y="{y:.1f}" width="{wide + 0.3:.1f}" '
                f'height="{cell + 0.3:.1f}" fill-opacity="{opacity:.3f}"><title>{tip}</title></rect>'
            )
    every = ceil(26 / wide)
    for across in range(0, len(grid.columns), every):
        x, y = left + (across + 0.5) * wide, TOP + cell * len(grid.rows) + 15
        parts.append(_text(grid.columns[across], x, y, "middle"))
    parts.append(_text(x_label, left + (WIDTH - left - RIGHT) / 2, height - 8, "middle"))
    ends = [f"{10.0**low:.0e}" if low > -300 else "0", f"{10.0**high:.0e}"] if log else [f"{low:.3g}", f"{high:.3g}"]
    if log and shade.zero:
        ends[0] = "0"
    legend = f'<p class="legend"><span>{ends[0]}</span><span class="ramp"></span><span>{ends[1]}</span></p>'
    rows = tuple((name, *map(_number, row)) for name, row in zip(grid.rows, grid.values, strict=True))
    header = (f"{y_label} \\ {x_label}", *grid.columns)
    return Chart(_svg("".join(parts), title, height), legend, header, rows)


def _svg(content: str, title: str, height: float = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{content}</svg>"
    )


def _axes(across: _Scale | None, up: _Scale, x_label: str, y_label: str, whole_x: bool = False) -> str:
    parts = []
    for y, text in up.ticks():
        parts.append(f'<path class="rule" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(text, LEFT - 6, y + 4, "end"))
    if across is not None:
        for x, text in across.ticks(10):
            if not whole_x or float(text).is_integer():
                parts.append(_text(text, x, HEIGHT - BOTTOM + 16, "middle"))
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(_text(x_label, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f"translate(14 {middle:.0f}) rotate(-90)"
    parts.append(f'<text class="label" text-anchor="middle" transform="{turned}">{escape(y_label)}</text>')
    return "".join(parts)


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>' if text else ""


def _mark(kind: str, x: float, y: float, colour: str, tip: str) -> str:
    shapes = {
        "circle": f"M{x - 3.2:.1f} {y:.1f}a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0",
        "square": f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
        "diamond": f"M{x:.1f} {y - 4.2:.1f}l4.2 4.2l-4.2 4.2l-4.2-4.2z",
        "triangle": f"M{x:.1f} {y - 4:.1f}l4 7h-8z",
    }
    return f'<path class="mark {colour}" d="{shapes[kind]}"><title>{tip}</title></path>'


def _legend(names: Sequence[str], bars: bool = False) -> str:
    items = []
    for number, name in enumerate(names):
        colour, dash = f"s{number % COLOURS}", DASHES[number % len(DASHES)]
        if bars:
            key = f'<rect class="bar {colour}" width="12" height="12"/>'
        else:
            dashes = f' stroke-dasharray="{dash}"' if dash else ""
            key = f'<path class="line {colour}" d="M0 6H28"{dashes}/>' + _mark(
                MARKS[number % len(MARKS)], 14, 6, colour, ""
            )
        width = 12 if bars else 28
        items.append(
            f'<span><svg width="{width}" height="12" viewBox="0 0 {width} 12" aria-hidden="true">{key}</svg> '
            f"{escape(name)}</span>"
        )
    return f'<p class="legend">{"".join(items)}</p>'


def _runs(line: Series) -> Iterator[list[tuple[float, float]]]:
    """The stretches of a line between its gaps."""
    run: list[tuple[float, float]] = []
    for x, y in zip(line.x, line.y, strict=True):
        if isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _number(value: float | None) -> str:
    return "" if value is None or not isfinite(value) else f"{value:.4g}"


# --------------------------------------------------------------------------------------------------
# Pictures


def picture_source(image: Any) -> str:
    """A picture (as `as_picture` takes it) as the address of an ``<img>``: a PNG inside the page."""
    from PIL import Image

    values = (as_picture(image).clip(0, 1) * 255).round().astype(np.uint8)
    if values.shape[2] == 1:
        values = values[:, :, 0]
    data = io.BytesIO()
    Image.fromarray(values).save(data, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def amplified(picture: Any, reference: Any, factor: float | None = None) -> tuple[np.ndarray, float]:
    """The absolute difference of two pictures times a factor: black where they are equal.

    Args:
        picture, reference: as `as_picture` takes them.
        factor: None: the power of two that makes the largest difference as bright as it can be without being cut
            off; 1 for equal pictures.

    Returns:
        The values (H, W, C) from 0 to 1, and the factor.
    """
    apart = np.abs(as_picture(picture) - as_picture(reference))
    largest = float(apart.max())
    bright = 2.0 ** floor(-np.log2(largest)) if 0 < largest < 1 else 1.0
    times = bright if factor is None else factor
    return (apart * times).clip(0, 1), times
