"""Logs of a run: a CSV that a resumed run continues, and TensorBoard and Weights & Biases."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..core.files import written_whole
from ..errors import InputError
from .config import TrainConfig

logger = logging.getLogger(__name__)

COLUMNS: tuple[str, ...] = ("step", "loss", "lr", "grad_norm", "samples_per_second", "seconds")


def check_trackers(config: TrainConfig) -> None:
    """Reject a tracker that is not installed. Raises `InputError`: names it."""
    for name in config.output.report_to:
        if name != "csv" and find_spec(name) is None:
            raise InputError(f"report_to: {name} is not installed; pip install {name}, or use csv")


class TensorBoard:
    """TensorBoard's files in the output folder; data of ``from_step`` and later belong to a run that was lost."""

    def __init__(self, config: TrainConfig, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(config.output_dir, purge_step=from_step)
        # Its table of hyperparameters is another run in another folder.
        self._writer.add_text("settings", json.dumps(config.flat(), indent=1), from_step)
        self.close = self._writer.close

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def pictures(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        for name, picture in pictures.items():
            self._writer.add_image(name, picture, step, dataformats="HWC")


class Wandb:
    """A run of Weights & Biases, in a project of the output folder's name."""

    def __init__(self, config: TrainConfig, from_step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._image = getattr(wandb, "Image", None)
        self._run = wandb.init(project=Path(config.output_dir).resolve().name, config=config.flat())

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(values), step=step)

    def pictures(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        assert self._image is not None
        self.log({name: self._image(picture) for name, picture in pictures.items()}, step)

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, type[TensorBoard | Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}


class Trackers:
    """The trackers of a run. A tracker that fails is left out with a warning, and training goes on."""

    def __init__(self, config: TrainConfig, from_step: int) -> None:
        self._open: dict[str, Any] = {}
        for name in dict.fromkeys(config.output.report_to):
            tracker = self._tried(name, KINDS[name], config, from_step) if name in KINDS else None
            if tracker is not None:
                self._open[name] = tracker

    def _tried(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            self._open.pop(name, None)
            logger.warning("%s gets no more of this run: %s: %s", name, type(error).__name__, error)

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of all of them."""
        for name, tracker in [*self._open.items()]:
            self._tried(name, getattr(tracker, method), *args)


class TrainingLog:
    """The log of a run, written by one rank; rows from step ``from_step`` on belong to a run that was lost."""

    def __init__(self, config: TrainConfig, from_step: int) -> None:
        self._folder, self._columns = Path(config.output_dir), {"loss.csv": COLUMNS}
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in ("loss.csv", "validation.csv"):
            rows = [row for row in read_log(self._folder / name) if row["step"] < from_step]
            if rows or name in self._columns:
                self._begin(name, tuple(rows[0] if rows else COLUMNS), rows)
            else:
                (self._folder / name).unlink(missing_ok=True)
        self._trackers = Trackers(config, from_step)

    def _begin(self, name: str, columns: tuple[str, ...], rows: Iterable[Mapping[str, float]]) -> None:
        self._columns[name] = columns
        with written_whole(self._folder / name) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="nan", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    def add(self, row: Mapping[str, float], name: str = "loss.csv") -> None:
        """Append the numbers of a step. If they cannot be written (a full disk), the row is missing, with a warning."""
        path = self._folder / name
        try:
            if not {*row} <= {*self._columns.get(name, ())}:
                # The names of some numbers are known with the first of them.
                self._begin(name, tuple(row), read_log(path))
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns[name], restval="nan").writerow(row)
        except OSError as error:
            logger.warning("step %d is missing in %s: %s", row["step"], path, error)
        self._trackers.tell("log", {key: value for key, value in row.items() if key != "step"}, int(row["step"]))

    def pictures(self, step: int, files: Mapping[str, Path]) -> None:
        """Show validation images in trackers."""
        pictures = {name: np.asarray(Image.open(path).convert("RGB")) for name, path in files.items()}
        self._trackers.tell("pictures", pictures, step)

    def close(self) -> None:
        """Close trackers."""
        self._trackers.tell("close")


def read_log(path: Path) -> list[dict[Any, float]]:
    """The rows of a ``loss.csv``; an incomplete last line is left out."""
    if not path.exists():
        return []
    rows: list[dict[Any, float]] = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                rows.append({name: int(value) if value.isdigit() else float(value) for name, value in row.items()})
            except (AttributeError, ValueError):
                continue
    return rows
