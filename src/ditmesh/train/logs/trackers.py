"""Experiment trackers under accelerate's names, on the rank that writes logs, without an `Accelerator`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import ConfigError, InputError, did_you_mean
from ..config import TrainConfig

logger = logging.getLogger(__name__)

# Packages that are not called as their tracker is.
TRACKER_PACKAGES = {"comet_ml": "comet-ml"}
CSV = "csv"
# Trackers that get validation images.
SHOWS_IMAGES = ("tensorboard", "wandb")


def tracker_names(config: TrainConfig) -> tuple[str, ...]:
    """The trackers of ``report_to`` besides ``csv``."""
    wanted = (config.output.report_to,) if isinstance(config.output.report_to, str) else config.output.report_to
    return tuple(dict.fromkeys(name for name in wanted if name != CSV))


def check_trackers(config: TrainConfig) -> None:
    """Reject a tracker that accelerate does not know, or that is not installed.

    Raises:
        ConfigError, InputError: names it, and the known trackers.
    """
    wanted = tracker_names(config)
    if not wanted:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = [CSV, *LOGGER_TYPE_TO_CLASS]
    there = {str(name) for name in get_available_trackers()}
    for name in wanted:
        if name not in known:
            raise ConfigError(f"report_to: {name!r} is no tracker; use {', '.join(known)}{did_you_mean(name, known)}")
        if name not in there:
            raise InputError(
                f"report_to: {name} is not installed; pip install {TRACKER_PACKAGES.get(name, name)}, or use csv"
            )


class Trackers:
    """The trackers of a run. A tracker that fails is left out with a warning, and training goes on.

    Args:
        config: the run; its settings are the trackers' hyperparameters.
        from_step: a tracker's data of this step and later ones belong to a run that was lost.
    """

    def __init__(self, config: TrainConfig, from_step: int) -> None:
        self._open: dict[str, Any] = {}
        folder = Path(config.output_dir)
        for name in tracker_names(config):
            with self._surviving(name):
                self._open[name] = _begun(name, folder, from_step)
            if name not in self._open:
                continue
            settings = _flat(config.flat())
            with self._surviving(name):
                if name == "tensorboard":
                    # Its table of hyperparameters is another run in another folder.
                    self._open[name].log({"settings": json.dumps(settings, indent=1)}, step=from_step)
                else:
                    self._open[name].store_init_configuration(settings)

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        try:
            with _plain_logger():
                yield
        except Exception as error:
            self._open.pop(name, None)
            logger.warning("%s gets no more of this run: %s: %s", name, type(error).__name__, error)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of a step."""
        for name, tracker in list(self._open.items()):
            with self._surviving(name):
                tracker.log(dict(values), step=step)

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        """Images by name."""
        for name, tracker in list(self._open.items()):
            if name not in SHOWS_IMAGES:
                continue
            with self._surviving(name):
                for title, path in files.items():
                    with Image.open(path) as image:
                        pixels = np.asarray(image.convert("RGB"))
                    if name == "tensorboard":
                        tracker.log_images({title: pixels[None]}, step=step, dataformats="NHWC")
                    else:
                        tracker.log_images({title: [Image.fromarray(pixels)]}, step=step)

    def close(self) -> None:
        """Let all of them finish."""
        for name, tracker in list(self._open.items()):
            with self._surviving(name):
                tracker.finish()
        self._open.clear()


def _begun(name: str, folder: Path, from_step: int) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    # It is made on one rank alone, and need not ask accelerate's state which one.
    alone = type(kind.__name__, (kind,), {"main_process_only": False})
    if name == "tensorboard":
        tracker = alone("", folder, purge_step=from_step)
    elif kind.requires_logging_directory:
        tracker = alone(folder.resolve().name, str(folder))
    else:
        tracker = alone(folder.resolve().name)
    if hasattr(tracker, "start"):
        tracker.start()
    return tracker


@contextmanager
def _plain_logger() -> Iterator[None]:
    """accelerate's own logger works only after its `PartialState` was made."""
    from accelerate import tracking

    own = tracking.logger
    tracking.logger = logging.getLogger(tracking.__name__)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        tracking.logger = own


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted names, with values that every tracker takes."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return found
