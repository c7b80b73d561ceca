"""Images of a run: its curves, and validation images over the steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ...core.files import written_whole
from ...errors import InputError
from ...requirements import not_installed

# The share of a run's steps over which a smoothed curve is a mean, and the fewest; the most columns of a grid and
# pixels of its images.
SMOOTHED, FEWEST, MOST_COLUMNS, SIDE = 0.04, 5, 12, 256
LOSS, MEAN, HELD_OUT, RATE, NORM = "#9ecae9", "#1f5fa8", "#c9510c", "#3d7a3d", "#7b4ea3"


def matplotlib_figure(**more: Any) -> Any:
    """An empty figure; nothing of matplotlib's global state is used.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(not_installed("a chart", "matplotlib", "train")) from None
    figure = Figure(layout="constrained", dpi=110, **more)
    FigureCanvasAgg(figure)
    return figure


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and up to ``width - 1`` before it; numbers that are not finite are left out."""
    found: list[float] = []
    for place in range(len(values)):
        near = [value for value in values[max(0, place - width + 1) : place + 1] if math.isfinite(value)]
        found.append(sum(near) / len(near) if near else math.nan)
    return found


def training_chart(rows: Sequence[Mapping[str, float]], path: Path, held_out: str) -> None:
    """Loss, held-out loss, learning rate and norm of the gradient over the steps, as a PNG.

    Args:
        rows: as `read_log` returns them; ``validation_loss`` is NaN where it was not measured.
        held_out: the name of the held-out loss in the legend.

    Raises:
        InputError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = matplotlib_figure(figsize=(9, 7.5))
    steps = [row["step"] + 1 for row in rows]
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    losses = [row["loss"] for row in rows]
    width = max(FEWEST, round(SMOOTHED * len(rows)))
    dots: Any = {"marker": "."} if len(rows) < 60 else {}
    top.plot(steps, losses, color=LOSS, linewidth=1, label="loss of each step", **dots)
    if len(rows) >= 2 * FEWEST:
        top.plot(steps, smoothed(losses, width), color=MEAN, linewidth=1.8, label=f"mean of {width} steps")
    measured = [(row["step"] + 1, row["validation_loss"]) for row in rows if math.isfinite(row["validation_loss"])]
    if measured:
        top.plot(*zip(*measured, strict=True), color=HELD_OUT, marker="o", markersize=4, linewidth=1.8, label=held_out)
    limit_loss(top, losses + [loss for _, loss in measured])
    top.set_ylabel("loss")
    top.legend(frameon=False)
    middle.plot(steps, [row["lr"] for row in rows], color=RATE, linewidth=1.5)
    middle.set_ylabel("learning rate")
    middle.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    norms = [row["grad_norm"] for row in rows]
    bottom.plot(steps, norms, color=NORM, linewidth=1)
    bottom.set_ylabel("gradient norm")
    limit_loss(bottom, norms)
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.align_ylabels()
    _save(figure, path)


def limit_loss(axes: Any, values: Sequence[float]) -> None:
    """Set the axis from zero to the 99th percentile: one outlier does not flatten the rest."""
    finite = sorted(value for value in values if math.isfinite(value))
    if finite:
        most = finite[min(len(finite) - 1, int(0.99 * len(finite)))]
        axes.set_ylim(0, 1.08 * most if most > 0 else 1)


def _save(figure: Any, path: Path) -> None:
    with written_whole(path) as part:
        figure.savefig(part, format="png")


def validation_grid(folder: Path, prompts: Sequence[str], until: int) -> Path | None:
    """One image of the validation images: a row for each prompt, a column for each step.

    Of more steps than fit, evenly spaced ones are shown, the first and the last among them.

    Args:
        folder: with ``step-N-I.png``, the I-th prompt's image after N steps.
        prompts: by number.
        until: images of later steps, of a run that was lost, are left out.

    Returns:
        The file; None without images.
    """
    found: dict[int, dict[int, Path]] = {}
    for file in folder.glob("step-*-*.png"):
        match = re.fullmatch(r"step-(\d+)-(\d+)\.png", file.name)
        if match and int(match[1]) <= until and int(match[2]) < len(prompts):
            found.setdefault(int(match[1]), {})[int(match[2])] = file
    steps = sorted(found)
    if not steps:
        return None
    if len(steps) > MOST_COLUMNS:
        places = {round(n * (len(steps) - 1) / (MOST_COLUMNS - 1)) for n in range(MOST_COLUMNS)}
        steps = [steps[place] for place in sorted(places)]
    with Image.open(next(iter(found[steps[-1]].values()))) as one:
        scale = min(1.0, SIDE / max(one.size))
        width, height = (max(1, round(side * scale)) for side in one.size)
    # Small images are shown larger, so that words fit beside them.
    factor = max(1, 96 // max(width, height))
    width, height = width * factor, height * factor
    font: Any = ImageFont.load_default(13)
    gap, left, top = 6, 150, 26
    size = left + len(steps) * (width + gap), top + len(prompts) * (height + gap)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for column, step in enumerate(steps):
        x = left + column * (width + gap)
        draw.text((x + width / 2, top / 2), f"step {step}", fill="black", font=font, anchor="mm")
        for row, file in found[step].items():
            with Image.open(file) as image:
                fitted = image.convert("RGB").resize((width, height), Image.Resampling.NEAREST if factor > 1 else None)
            sheet.paste(fitted, (x, top + row * (height + gap)))
    for row, prompt in enumerate(prompts):
        words = _wrapped(prompt, draw, font, left - 2 * gap, max(1, height // 16))
        draw.multiline_text((gap, top + row * (height + gap) + height / 2), words, fill="black", font=font, anchor="lm")
    path = folder / "grid.png"
    with written_whole(path) as part:
        sheet.save(part, "PNG")
    return path


def _wrapped(text: str, draw: Any, font: Any, width: float, most: int) -> str:
    """Words in lines of a width in pixels; what does not fit is cut."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if draw.textlength(longer, font=font) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1]} ..."]
    return "\n".join(lines)
