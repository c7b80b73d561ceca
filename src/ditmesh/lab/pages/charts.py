"""Charts and images as pieces of HTML that need nothing from outside: SVG, and PNG inside the page.

Colours are CSS variables of `report.html`, so that one figure serves light and dark pages. Lines differ in dashes
and marks as well as in colour. Every chart carries a title that screen readers read; the page puts its numbers in a
table beside it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise, repeat
from math import ceil, floor, isfinite, log10, nan
from typing import Any

import numpy as np

from ...quality.pictures import as_picture, eight_bits
from .curves import Point, Series, ValueGrid

# In pixels of a drawing that stays legible on a phone's screen, where it is scaled down to four fifths.
WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 14, 46
# Width of a label's letter, and its height.
LETTER, LINE = 6.4, 13.0
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "10 4")
MARKS = ("circle", "square", "diamond", "triangle")
NUM_COLOURS = 6
# Points of a line that have room for a mark and a bar each.
CROWDED = 20
# Colours of a difference, from none to the largest; lightness rises all the way, so that they are told apart in grey.
RAMP = ((0, 0, 0), (58, 15, 110), (150, 30, 115), (225, 75, 60), (250, 165, 45), (255, 250, 205))
# The line between the ranks' parts of an image, (red, green, blue) from 0 to 1.
BORDER = (0.0, 0.75, 0.75)
# Letters of a row's name; of a longer one the end is shown.
MAX_LABEL = 24


@dataclass(frozen=True)
class Chart:
    """A chart as SVG, its legend as HTML (may be empty), and its numbers for a table."""

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
            first = ceil(self.low + self.zero)
            step = max(1, ceil((self.high - first) / count))
            for power in range(first, floor(self.high) + 1, step):
                yield self(10.0**power), _power_text(power)
            return
        rough = (self.high - self.low) / count
        power = 10.0 ** floor(log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        value = ceil(self.low / step - 1e-9) * step
        while value <= self.high + step * 1e-9:
            yield self(value), f"{0 if abs(value) < step / 1e6 else value:g}"
            value += step


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


def line_chart(series: Sequence[Series], title: str, x_label: str, y_label: str, *, log_y: bool = False) -> Chart:
    """Lines through points over whole numbers (steps), with error bars where the series have them.

    Lines of more than `CROWDED` points have a band in place of bars, and show a mark only where they are pointed at.
    Screen readers read the title. Labels are those of the axes, with units. On a logarithmic y axis values of zero and
    less are drawn on a line of their own below a break in the axis, and no line crosses the break.
    """
    xs = [x for line in series for x in line.x]
    ys = [y for line in series for y in (*line.y, *line.low, *line.high)]
    across = _scale(xs, LEFT, WIDTH - RIGHT, False)
    up = _scale(ys, HEIGHT - BOTTOM, TOP, log_y)
    parts = [_axes(across, up, x_label, y_label)]

    for number, line in enumerate(series):
        parts += _drawn(line, number, across, up, x_label)
    header = (x_label, *(line.name for line in series))
    by_x = [dict(zip(line.x, line.y, strict=True)) for line in series]
    rows = [(f"{x:g}", *(_number(points.get(x)) for points in by_x)) for x in sorted(set(xs))]
    return Chart(_svg("".join(parts), title), _legend([line.name for line in series]), header, tuple(rows))


def _stretches(points: Sequence[tuple[float, float, float, float]], log: bool) -> Iterator[list[Any]]:
    """Points that a line joins: lines end in gaps, and at the break of a logarithmic axis."""

    def stretch(point: tuple[float, float, float, float]) -> int:
        return 0 if not isfinite(point[1]) else 1 if point[1] > 0 or not log else 2

    return (list(run) for kind, run in groupby(points, stretch) if kind)


def _drawn(line: Series, number: int, across: _Scale, up: _Scale, x_label: str) -> Iterator[str]:
    colour, crowded = f"s{number % NUM_COLOURS}", len(line.x) > CROWDED
    bars = zip(line.low, line.high, strict=True) if line.low else repeat((nan, nan), len(line.x))
    points = [(x, y, *ends) for x, y, ends in zip(line.x, line.y, bars, strict=True)]
    for places in _stretches(points, up.log):
        banded = [point for point in places if isfinite(point[2])]
        if crowded and banded:
            edge = [(x, high) for x, _, _, high in banded] + [(x, low) for x, _, low, _ in reversed(banded)]
            yield f'<polygon class="band {colour}" points="{_path(edge, across, up)}"/>'
        path = _path([(x, y) for x, y, _, _ in places], across, up)
        yield f'<polyline class="line {colour}" points="{path}"{_dashes(number)}/>'
    for x, y, low, high in points:
        if not isfinite(y):
            continue
        spread = f" ({low:.3g} to {high:.3g})" if isfinite(low) else ""
        if spread and not crowded:
            at, foot = across(x), up(low)
            path = f"M{at:.1f} {foot:.1f}V{up(high):.1f}m-2 0h4M{at - 2:.1f} {foot:.1f}h4"
            yield f'<path class="bar-line {colour}" d="{path}"/>'
        tip = escape(f"{line.name}: {x_label} {x:g}, {y:.4g}{spread}")
        yield _mark(MARKS[number % len(MARKS)], across(x), up(y), f"{colour} pointed" if crowded else colour, tip)


def _path(points: Sequence[tuple[float, float]], across: _Scale, up: _Scale) -> str:
    return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)


def scatter_chart(points: Sequence[Point], title: str, x_label: str, y_label: str) -> Chart:
    """Labelled points of what costs x and is worth y, with the Pareto front: those that no other point beats.

    Points stand in the colour and mark of their group. Each has its number beside it, and its name where there is
    room; the table has all of them. Points of the front are ringed and joined by steps. Screen readers read the
    title.
    """
    front = pareto_front(points)
    groups = list(dict.fromkeys(point.group for point in points))
    across = _scale([point.x for point in points], LEFT, WIDTH - RIGHT, False, from_zero=True)
    up = _scale([point.y for point in points], HEIGHT - BOTTOM, TOP, False)
    places = [(across(point.x), up(point.y)) for point in points]
    parts = [_axes(across, up, x_label, y_label, whole=False)]
    steps = [places[number] for number in front[:1]]
    for number in front[1:]:
        steps += [(places[number][0], steps[-1][1]), places[number]]
    if front:
        parts.append(f'<polyline class="front" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in steps)}"/>')
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    # Names keep clear of the front, too.
    taken += [(min(x, u), min(y, v) - 1, max(x, u) + 1, max(y, v) + 1) for (x, y), (u, v) in pairwise(steps)]
    # The front's names come first.
    for number in [*front, *(n for n in range(len(points)) if n not in front)]:
        point, (x, y) = points[number], places[number]
        group = groups.index(point.group)
        tip = escape(f"{number + 1}: {point.name}: {x_label} {point.x:.4g}, {y_label} {point.y:.4g}")
        if number in front:
            parts.append(f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
        parts.append(_mark(MARKS[group % len(MARKS)], x, y, f"s{group % NUM_COLOURS}", tip))
        text = _placed(x, y, (f"{number + 1} · {point.short}", f"{number + 1}"), taken)
        parts.append(text.replace('"label"', '"label point"') if number in front else text)
    header = ("no.", "what", x_label, y_label, "Pareto front")
    rows = tuple(
        (str(n), f"{p.group}, {p.name}", _number(p.x), _number(p.y), "yes" if n - 1 in front else "no")
        for n, p in enumerate(points, 1)
    )
    legend = _legend(groups, lines=False)
    return Chart(_svg("".join(parts), title), legend, header, rows)


def pareto_front(points: Sequence[Point]) -> list[int]:
    """Places of the points with no other point at most as far right and higher, or as high and farther left.

    From left to right; of equal points the first.
    """
    order = sorted(range(len(points)), key=lambda n: (points[n].x, -points[n].y, n))
    front: list[int] = []
    for number in order:
        if not front or points[number].y > points[front[-1]].y:
            front.append(number)
    return front


def _placed(x: float, y: float, texts: Sequence[str], taken: list[tuple[float, float, float, float]]) -> str:
    """The first text that has room beside a point, and marks its box as taken; the last one wherever it stands."""
    beside = [(8, 4, 0), (-8, 4, 1), (0, -9, 0.5), (0, 17, 0.5), (7, -7, 0), (-7, -7, 1), (7, 15, 0), (-7, 15, 1)]
    for text in texts:
        wide = LETTER * len(text)
        for right, down, share in beside:
            left, foot = x + right - share * wide, y + down
            box = (left, foot - LINE + 3, left + wide, foot + 2)
            inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM
            if inside and not any(
                box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken
            ):
                taken.append(box)
                return _text(text, left, foot, "start")
    return _text(texts[-1], x + 8, y + 4, "start")


def bar_chart(groups: Sequence[str], bars: Series, title: str, y_label: str, *, x_label: str = "") -> Chart:
    """One bar for each group, of height ``bars.y[group]``, with an error bar where there is one.

    ``x_label`` names the groups.
    """
    up = _scale((*bars.y, *bars.low, *bars.high), HEIGHT - BOTTOM, TOP, False, from_zero=True)
    across = _Scale(0, len(groups), LEFT, WIDTH - RIGHT)
    parts = [_axes(None, up, x_label, y_label)]
    width = (across(1) - across(0)) * 0.8
    # As many names as have room.
    every = ceil((max(map(len, groups), default=1) + 1) * LETTER / (across(1) - across(0)))
    for group, (name, y) in enumerate(zip(groups, bars.y, strict=True)):
        if group % every == 0:
            parts.append(_text(name, across(group + 0.5), HEIGHT - BOTTOM + 16, "middle"))
        if not isfinite(y):
            continue
        left = across(group + 0.1)
        top, tall = min(up(y), up(0)), abs(up(y) - up(0))
        parts.append(
            f'<rect class="bar s0" x="{left:.1f}" y="{top:.1f}" width="{width * 0.92:.1f}" height="{tall:.1f}">'
            f"<title>{escape(f'{name}, {bars.name}: {y:.4g}')}</title></rect>"
        )
        if bars.low and isfinite(bars.low[group]):
            middle, low, high = left + width * 0.46, up(bars.low[group]), up(bars.high[group])
            parts.append(f'<path class="bar-line ink" d="M{middle:.1f} {low:.1f}V{high:.1f}"/>')
    rows = tuple((name, _number(y)) for name, y in zip(groups, bars.y, strict=True))
    return Chart(_svg("".join(parts), title), "", (x_label, bars.name), rows)


def heat_map(grid: ValueGrid, title: str, x_label: str, y_label: str, *, log: bool = False) -> Chart:
    """Values as shades; every cell shows its value when pointed at. Rows run downwards.

    Cells that are not numbers stay empty. With ``log`` shades follow the logarithm, and zero gets the lightest one.
    """
    values = [value for row in grid.values for value in row if isfinite(value)]
    shade = _scale(values, 0, 1, True) if log else _Scale(min([0.0, *values]), max([0.0, *values]) or 1.0, 0, 1)
    names = [name if len(name) <= MAX_LABEL else f"…{name[1 - MAX_LABEL :]}" for name in grid.rows]
    left = 12 + LETTER * max(map(len, names), default=0)
    cell = min(28.0, max(9.0, 240 / max(1, len(grid.rows))))
    wide = (WIDTH - left - RIGHT) / max(1, len(grid.columns))
    height = TOP + cell * len(grid.rows) + 44
    parts = []
    for down, (name, row) in enumerate(zip(grid.rows, grid.values, strict=True)):
        y = TOP + down * cell
        if down % ceil(LINE / cell) == 0:
            parts.append(_text(names[down], left - 4, y + cell / 2 + 4, "end"))
        for across, value in enumerate(row):
            if not isfinite(value):
                continue
            tip = escape(f"{name}, {x_label} {grid.columns[across]}: {value:.4g}")
            opacity = min(1.0, max(0.02, shade(value)))
            parts.append(
                f'<rect class="cell" x="{left + across * wide:.1f}" y="{y:.1f}" width="{wide + 0.3:.1f}" '
                f'height="{cell + 0.3:.1f}" fill-opacity="{opacity:.3f}"><title>{tip}</title></rect>'
            )
    every = ceil(28 / wide)
    for across in range(0, len(grid.columns), every):
        parts.append(_text(grid.columns[across], left + (across + 0.5) * wide, height - 29, "middle"))
    parts.append(_text(x_label, left + (WIDTH - left - RIGHT) / 2, height - 8, "middle"))
    ends = [_power_text(int(end)) if log else f"{end:.3g}" for end in (shade.low, shade.high)]
    low, high = "0" if shade.zero else ends[0], ends[1]
    legend = f'<p class="legend"><span>{low}</span><span class="ramp"></span><span>{high}</span></p>'
    rows = tuple((name, *map(_number, row)) for name, row in zip(grid.rows, grid.values, strict=True))
    header = (f"{y_label} \\ {x_label}", *grid.columns)
    return Chart(_svg("".join(parts), title, height), legend, header, rows)


def _svg(content: str, title: str, height: float = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{content}</svg>"
    )


def _axes(across: _Scale | None, up: _Scale, x_label: str, y_label: str, whole: bool = True) -> str:
    parts = []
    for y, text in up.ticks():
        parts.append(f'<path class="rule" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(text, LEFT - 6, y + 4, "end"))
    if up.zero:
        # Zero has no place on a logarithmic scale: its line stands apart.
        y = (up.start + up(10.0 ** (up.low + 1))) / 2
        parts.append(f'<path class="axis" d="M{LEFT - 4} {y + 4:.1f}l8 -5M{LEFT - 4} {y:.1f}l8 -5"/>')
    if across is not None:
        for x, text in across.ticks(8):
            if not whole or float(text).is_integer():
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


def _dashes(number: int) -> str:
    dash = DASHES[number % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _legend(names: Sequence[str], lines: bool = True) -> str:
    items = []
    for number, name in enumerate(names):
        colour = f"s{number % NUM_COLOURS}"
        key = f'<path class="line {colour}" d="M0 6H28"{_dashes(number)}/>' if lines else ""
        key += _mark(MARKS[number % len(MARKS)], 14, 6, colour, "")
        drawing = f'<svg width="28" height="12" viewBox="0 0 28 12" aria-hidden="true">{key}</svg>'
        items.append(f"<span>{drawing} {escape(name)}</span>")
    return f'<p class="legend">{"".join(items)}</p>'


def _power_text(power: int) -> str:
    return f"1e{power}" if abs(power) > 3 else f"{10.0**power:g}"


def _number(value: float | None) -> str:
    return "" if value is None or not isfinite(value) else f"{value:.4g}"


# --------------------------------------------------------------------------------------------------
# Images


def picture_source(image: Any) -> str:
    """An image (as `as_picture` takes it) as the address of an ``<img>``: a PNG inside the page."""
    from PIL import Image

    values = eight_bits(as_picture(image))
    if values.shape[2] == 1:
        values = values[:, :, 0]
    data = io.BytesIO()
    Image.fromarray(values).save(data, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def scale_maximum(differences: Sequence[np.ndarray]) -> float:
    """The value at the bright end of a scale for images that are shown beside one another: their 99th percentile.

    Args:
        differences: (H, W, C) absolute differences, each from 0 to 1.

    Returns:
        At least the value under which 99 % of the pixels with a difference lie; 0 where there is none.
    """
    values = np.concatenate([one.max(axis=2)[one.max(axis=2) > 0] for one in differences] or [np.zeros(0)])
    return float(np.percentile(values, 99)) if values.size else 0.0


def coloured(difference: np.ndarray, bright: float, borders: Sequence[float] = ()) -> np.ndarray:
    """An absolute difference in the colours of `RAMP`: black where the images are equal.

    Args:
        difference: (H, W, C), from 0 to 1; of a pixel's channels the largest counts.
        bright: the value at the bright end of the colours.
        borders: places from 0 to 1 down the image, marked by a line across it.

    Returns:
        (H, W, 3) colours from 0 to 1.
    """
    share = (difference.max(axis=2) / (bright or 1.0)).clip(0, 1)
    places = np.linspace(0, 1, len(RAMP))
    colours = np.array(RAMP, dtype=np.float64) / 255
    image = np.stack([np.interp(share, places, colours[:, channel]) for channel in range(3)], axis=2)
    for border in borders:
        row = min(len(image) - 1, max(0, round(border * len(image))))
        # Dashes: what lies under the line is still seen.
        image[row, np.arange(image.shape[1]) % 4 < 2] = BORDER
    return image
