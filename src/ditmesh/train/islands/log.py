"""A table of the outer steps of a run on islands."""

from __future__ import annotations

import csv
import logging
from dataclasses import asdict, fields
from pathlib import Path

from ...core.files import written_whole
from .islands import OuterStep

logger = logging.getLogger(__name__)

COLUMNS = tuple(one.name for one in fields(OuterStep))


class IslandLog:
    """``islands.csv``, which a resumed run continues.

    Args:
        from_step: rows of later steps are dropped: they belong to a run that was lost.
    """

    def __init__(self, folder: str | Path, from_step: int) -> None:
        self._path = Path(folder) / "islands.csv"
        kept: list[dict[str, str]] = []
        if self._path.is_file():
            with self._path.open(newline="", encoding="utf-8") as file:
                kept = [row for row in csv.DictReader(file) if int(row["step"]) <= from_step]
        with written_whole(self._path) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)

    def add(self, done: OuterStep) -> None:
        """Append one outer step. If it cannot be written (a full disk), the row is missing and a warning is shown."""
        try:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS).writerow(asdict(done))
        except OSError as error:
            logger.warning("the outer step after step %d is missing in %s: %s", done.step, self._path, error)
