"""TensorBoard and Weights & Biases, on the rank that writes logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import InputError
from ..config import TrainConfig

logger = logging.getLogger(__name__)


def check_trackers(config: TrainConfig) -> None:
    """Reject a tracker that is not installed.

    Raises:
        InputError: names it.
    """
    for name in config.output.report_to:
        if name != "csv" and find_spec(name) is None:
            raise InputError(f"report_to: {name} is not installed; pip install {name}, or use csv")


class TensorBoard:
    """TensorBoard's files in the output folder.

    Args:
        from_step: data of this step and later ones belong to a run that was lost.
    """

    def __init__(self, config: TrainConfig, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(config.output_dir, purge_step=from_step)
        # Its table of hyperparameters is another run in another folder.
        self._writer.add_text("settings", json.dumps(config.flat(), indent=1), from_step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        for name, picture in pictures.items():
            self._writer.add_image(name, picture, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, in a project of the output folder's name."""

    def __init__(self, config: TrainConfig, from_step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._image = getattr(wandb, "Image", None)
        self._run = wandb.init(project=Path(config.output_dir).resolve().name, config=config.flat())

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def show(self, pictures: Mapping[str, np.ndarray], step: int) -> None:
        assert self._image is not None
        self._run.log({name: self._image(picture) for name, picture in pictures.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, type[TensorBoard | Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}


class Trackers:
    """The trackers of a run. A tracker that fails is left out with a warning, and training goes on."""

    def __init__(self, config: TrainConfig, from_step: int) -> None:
        self._open: dict[str, TensorBoard | Wandb] = {}
        for name in dict.fromkeys(config.output.report_to):
            if name in KINDS:
                try:
                    self._open[name] = KINDS[name](config, from_step)
                except Exception as error:
                    self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        logger.warning("%s gets no more of this run: %s: %s", name, type(error).__name__, error)

    def _each(self, method: str, *args: Any) -> None:
        for name, tracker in list(self._open.items()):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:
                self._leave_out(name, error)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of a step."""
        self._each("log", values, step)

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        """Images by name."""
        if self._open:
            pictures = {name: np.asarray(Image.open(path).convert("RGB")) for name, path in files.items()}
            self._each("show", pictures, step)

    def close(self) -> None:
        """Let all of them finish."""
        self._each("close")
        self._open.clear()
