"""Charts of matplotlib as SVG inside a page, and images as PNG.

Lines differ in dashes and marks as well as in colour. Every chart has a title that screen readers read; the page puts
its numbers in a table beside it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10, nan
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...errors import InputError
from ...quality.metrics import as_picture
from ...requirements import not_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

# In inches: legible on a phone's screen, where a chart is scaled down to four fifths.
WIDTH, HEIGHT = 4.6, 3.0
# Text stays text, is taken as it stands, and the bytes are the same in every run.
STYLE = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "ditmesh",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
}
COLOURS = ("#0072b2", "#c24f00", "#00795a", "#9c4f7c", "#8a6d00", "#3d3d3d")
DASHES = ("solid", "dashed", "dotted", "dashdot", (0, (1, 4)), (0, (10, 4)))
MARKS = ("o", "s", "D", "^")
# Points of a line that have room for a mark and a bar each.
CROWDED = 20
# Names that have room below a chart, and beside it.
MOST_ACROSS, MOST_DOWN = 14, 30
# Letters of a row's name; of a longer one the end is shown.
MAX_LABEL = 24
# Colours of a difference, from none to the largest; lightness rises all the way, so that they are told apart in grey.
RAMP = ((0, 0, 0), (58, 15, 110), (150, 30, 115), (225, 75, 60), (250, 165, 45), (255, 250, 205))
# The line between the ranks' parts of an image, (red, green, blue) from 0 to 1.
BORDER = (0.0, 0.75, 0.75)


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


@dataclass(frozen=True)
class Chart:
    """A chart: its title, its drawing as the address of an ``<img>``, and its numbers for a table."""

    title: str
    source: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def check_charts() -> None:
    """Reject an environment without matplotlib: `InputError`."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise InputError(not_installed("a chart", "matplotlib", "study")) from None


def _drawn(draw: Callable[[Axes], None], x_label: str, y_label: str, height: float = HEIGHT) -> str:
    """A drawing as an address; nothing of matplotlib's global state is changed."""
    check_charts()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    data = io.BytesIO()
    with rc_context(cast(Any, STYLE)):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel=x_label, ylabel=y_label)
        draw(axes)
        figure.savefig(data, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(data.getvalue()).decode()


def line_chart(series: Sequence[Series], title: str, x_label: str, y_label: str) -> Chart:
    """Lines through points over whole numbers (steps), with error bars where the series have them.

    Lines of more than `CROWDED` points have a band in place of bars, and no marks.
    """

    def draw(axes: Axes) -> None:
        for number, line in enumerate(series):
            colour, crowded = COLOURS[number % len(COLOURS)], len(line.x) > CROWDED
            mark = None if crowded else MARKS[number % len(MARKS)]
            dash = DASHES[number % len(DASHES)]
            axes.plot(line.x, line.y, color=colour, linestyle=dash, marker=mark, label=line.name)
            if line.low and crowded:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
            elif line.low:
                axes.vlines(line.x, line.low, line.high, color=colour, linewidth=1)
        cast(Any, axes.xaxis.get_major_locator()).set_params(integer=True)
        axes.grid(axis="y", alpha=0.4)
        axes.legend()

    by_x = [dict(zip(line.x, line.y, strict=True)) for line in series]
    places = sorted({x for line in series for x in line.x})
    rows = tuple((f"{x:g}", *(_number(points.get(x)) for points in by_x)) for x in places)
    return Chart(title, _drawn(draw, x_label, y_label), (x_label, *(line.name for line in series)), rows)


def heat_map(grid: ValueGrid, title: str, x_label: str, y_label: str) -> Chart:
    """Values as shades; cells that are not numbers stay empty. Rows run downwards."""

    def draw(axes: Axes) -> None:
        values = np.array(grid.values, dtype=float)
        least, most = float(np.nanmin(values, initial=0.0)), float(np.nanmax(values, initial=0.0)) or 1.0
        image = axes.imshow(values, cmap="Blues", vmin=least, vmax=most, aspect="auto", interpolation="nearest")
        names = [name if len(name) <= MAX_LABEL else f"…{name[1 - MAX_LABEL :]}" for name in grid.rows]
        _name_ticks(axes.set_xticks, grid.columns, MOST_ACROSS)
        _name_ticks(axes.set_yticks, names, MOST_DOWN)
        axes.figure.colorbar(image, format="%g")

    rows = tuple((name, *map(_number, row)) for name, row in zip(grid.rows, grid.values, strict=True))
    height = min(5.0, max(2.0, 0.8 + 0.15 * len(grid.rows)))
    return Chart(title, _drawn(draw, x_label, y_label, height), (f"{y_label} \\ {x_label}", *grid.columns), rows)


def _name_ticks(set_ticks: Callable[..., Any], names: Sequence[str], most: int) -> None:
    """Names along an axis of whole numbers, as many as have room."""
    every = max(1, ceil(len(names) / most))
    set_ticks(range(0, len(names), every), names[::every])


def _number(value: float | None) -> str:
    return "" if value is None or not isfinite(value) else f"{value:.4g}"


# --------------------------------------------------------------------------------------------------
# Images


def eight_bits(picture: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Values from 0 to 1, of any shape, as bytes; others are cut off."""
    return (picture * 255.0).round().clip(0, 255).astype(np.uint8)


def image_source(image: Any) -> str:
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


def number_text(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits: ``0.0312``, ``1,234``, ``3.2 × 10⁻⁷``; empty for None.

    Digits before the point are never cut off.
    """
    if value is None:
        return ""
    if not isfinite(value):
        return "infinite" if value > 0 else "-infinite" if value < 0 else "not a number"
    if value == 0:
        return "0"
    power = floor(log10(abs(value)))
    if -4 <= power < 6:
        return f"{value:,.{max(0, digits - 1 - power)}f}"
    factor, power_text = f"{value:.{digits - 1}e}".split("e")
    return f"{factor} × 10{str(int(power_text)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
