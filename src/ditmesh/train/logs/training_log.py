"""Logs of a run: a CSV that a resumed run continues, and trackers."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.files import written_whole
from ..config import TrainConfig
from .trackers import Trackers

logger = logging.getLogger(__name__)

COLUMNS = ("step", "loss", "lr", "grad_norm", "samples_per_second", "seconds")


class TrainingLog:
    """The log of a run, written by one rank; rows from step ``from_step`` on belong to a run that was lost."""

    def __init__(self, config: TrainConfig, from_step: int) -> None:
        self._path = Path(config.output_dir) / "loss.csv"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in read_log(self._path) if row["step"] < from_step]
        with written_whole(self._path) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        self._trackers = Trackers(config, from_step)

    def add(self, row: Mapping[str, float]) -> None:
        """Append `COLUMNS` of a step. If they cannot be written (a full disk), the row is missing, with a warning."""
        row = {name: row[name] for name in COLUMNS}
        try:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(row.values())
        except OSError as error:
            logger.warning("step %d is missing in %s: %s", row["step"], self._path, error)
        self._trackers.log({name: value for name, value in row.items() if name != "step"}, int(row["step"]))

    def pictures(self, step: int, files: Mapping[str, Path]) -> None:
        """Show validation images in trackers."""
        self._trackers.pictures(files, step)

    def close(self) -> None:
        """Close trackers."""
        self._trackers.close()


def read_log(path: Path) -> list[dict[Any, float]]:
    """The rows of a ``loss.csv``; an incomplete last line is left out."""
    if not path.exists():
        return []
    rows: list[dict[Any, float]] = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                rows.append({name: float(row[name]) for name in COLUMNS})
            except (TypeError, ValueError, KeyError):
                continue
    return rows
