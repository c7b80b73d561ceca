"""Logs of a run: a CSV that a resumed run continues, a curve, and TensorBoard."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from PIL import Image, ImageDraw

from ..core.files import written_whole
from ..errors import InputError

logger = logging.getLogger(__name__)

COLUMNS = ("step", "loss", "lr", "grad_norm", "samples_per_second", "seconds", "overflowed", "loss_scale")
# Defaults of columns that files of earlier versions lack.
ABSENT = {"overflowed": 0, "loss_scale": 1.0}


class TrainingLog:
    """The log of a run, written by one rank.

    Args:
        folder: where ``loss.csv``, ``loss.png`` and TensorBoard's files go.
        from_step: rows of this step and later ones are dropped: they belong to a run that was lost.
        tensorboard: write for TensorBoard as well.

    Raises:
        InputError: TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, from_step: int, tensorboard: bool) -> None:
        self._folder, self._path = folder, folder / "loss.csv"
        folder.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_log(self._path) if row["step"] < from_step]
        with written_whole(self._path) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        self._losses = [(row["step"], row["loss"]) for row in kept]
        self._board = cast(Any, None)
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise InputError(
                    "report_to: tensorboard is not installed; pip install tensorboard, or use csv"
                ) from None
            self._board = SummaryWriter(str(folder), purge_step=from_step)

    def add(self, row: Mapping[str, float]) -> None:
        """Append one step. If it cannot be written (a full disk), the row is missing and a warning is shown."""
        try:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS).writerow({name: row[name] for name in COLUMNS})
        except OSError as error:
            logger.warning("step %d is missing in %s: %s", row["step"], self._path, error)
        self._losses.append((int(row["step"]), row["loss"]))
        for name in COLUMNS[1:] if self._board is not None else ():
            cast(Any, self._board).add_scalar(name, row[name], int(row["step"]))

    def pictures(self, step: int, files: Mapping[str, Path]) -> None:
        """Show validation images in TensorBoard."""
        if self._board is None:
            return
        import numpy as np

        for name, path in files.items():
            self._board.add_image(name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        """Draw the curve and close TensorBoard's file."""
        if self._losses:
            try:
                curve({"loss": self._losses}, self._folder / "loss.png")
            except OSError as error:
                logger.warning("the curve of losses cannot be drawn: %s", error)
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[Any, float]]:
    """The rows of a ``loss.csv``; a last line that broke off is left out."""
    if not path.exists():
        return []
    rows: list[dict[Any, float]] = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                there = {**ABSENT, **{name: value for name, value in row.items() if value is not None}}
                rows.append({name: float(there[name]) for name in COLUMNS})
            except (TypeError, ValueError, KeyError):
                continue
    return rows


COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700")


def curve(lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, size: tuple[int, int] = (960, 540)) -> None:
    """Loss over steps as a PNG, lines by name, the losses on a linear axis from zero to the 99th percentile."""
    width, height = size
    left, top, right, bottom = 72, 24, width - 24, height - 48
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    every = sorted(loss for line in lines.values() for _, loss in line if loss == loss)
    most = every[min(len(every) - 1, int(0.99 * len(every)))] if every else 1.0
    last = max((step for line in lines.values() for step, _ in line), default=1) or 1
    for tick in range(5):
        y = bottom - (bottom - top) * tick / 4
        draw.line([(left, y), (right, y)], fill="#d0d7de")
        draw.text((8, y - 6), f"{most * tick / 4:.4g}", fill="#57606a")
        x = left + (right - left) * tick / 4
        draw.text((x - 12, bottom + 8), f"{last * tick / 4:.0f}", fill="#57606a")
    draw.text((right - 40, bottom + 24), "step", fill="#57606a")
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [
            (left + (right - left) * step / last, bottom - (bottom - top) * min(loss, most) / (most or 1.0))
            for step, loss in line
            if loss == loss
        ]
        if len(points) > 1:
            # Later ones are thinner: those that lie on one another are all seen.
            draw.line(points, fill=colour, width=2 * (len(lines) - number))
        draw.text((right - 180, top + 16 * number), name, fill=colour)
    with written_whole(path) as part:
        picture.save(part, "PNG")
