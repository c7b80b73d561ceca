"""Samples of a data set, and the report about them; their images as pixels."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...errors import InputError
from ...media.videos import read_frames
from ...report.formatting import count, enumerated
from ..settings import DataConfig
from .attached import Part, SampleImages
from .captions import By, Words

# Names in a sentence, and the largest ratio of a scaled image's pixels to those of its crop.
SOME, MOST_SPARE = 3, 16


@dataclass(frozen=True)
class Sample:
    """One image or video.

    Attributes:
        name: for messages: its file, or its row.
        words: caption, several of which one is drawn, label, or None.
        size: (height, width) of the upright image, in pixels.
        part: the place of its bytes.
        attached: its mask and reference images.
        source: number of its data set.
    """

    name: str
    words: Words
    size: tuple[int, int]
    part: Part
    attached: SampleImages = field(default_factory=SampleImages)
    source: int = 0

    def picture(self) -> Image.Image:
        """The decoded image, upright sRGB. Raises `OSError` if it is corrupt."""
        image = self.part.picture()
        if (image.height, image.width) != self.size:
            # A PNG with EXIF behind its pixels; or the file is another one by now.
            raise OSError(
                f"{self.name} has {self.size[1]} x {self.size[0]} pixels by its header and {image.width} x "
                f"{image.height} when it is decoded; save it upright"
            )
        return image

    def frames(self, count: int) -> list[Image.Image]:
        """The first ``count`` frames of a video, upright RGB. Raises `OSError` if it is corrupt, or has fewer."""
        frames = self.part.read(lambda file, name: read_frames(file, name, count))
        if len(frames) < count:
            raise OSError(f"{self.name} has {len(frames)} frames, and num_frames={count}")
        return frames


@dataclass(frozen=True)
class DataReport:
    """The report about a run's data before its first step.

    Attributes:
        odd: whether captions are missing, files were skipped, or there is something else to know.
    """

    lines: tuple[str, ...]
    odd: bool

    def log(self, logger: logging.Logger) -> None:
        """A report function that ignores the report."""
        logger.log(logging.WARNING if self.odd else logging.INFO, "%s", "\n".join(self.lines))


@dataclass(frozen=True)
class Samples:
    """The readable samples of a data set in the order of their names, and the reasons for skipped files.

    Attributes:
        good: the samples.
        corrupt: a sentence for each that was skipped.
        notes: what else there is to know, such as files that are not read.
        sources: how many captions or labels come from where.
        columns: of listings and tables, among which the wanted column is not.
        by: ``"text"`` or ``"label"``.
    """

    good: tuple[Sample, ...]
    corrupt: tuple[str, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[tuple[str, int], ...] = ()
    columns: tuple[str, ...] = ()
    by: By = "text"

    @property
    def without(self) -> tuple[str, ...]:
        """Names of the samples without caption or label."""
        return tuple(sample.name for sample in self.good if is_nothing(sample.words))

    @property
    def _noun(self) -> str:
        return "caption" if self.by == "text" else "label"

    def report(self) -> DataReport:
        """The report of used and skipped files before a run."""
        sources = ", ".join(f"{number} of {source}" for source, number in self.sources)
        missing = self.without
        lines = [
            f"data: {count(len(self.good), 'sample')}",
            f"  with {self._noun}: {len(self.good) - len(missing)}" + (f" ({sources})" if sources else ""),
            f"  without {self._noun}: {len(missing)}" + (f" ({enumerated(missing, SOME)})" if missing else ""),
            f"  skipped: {len(self.corrupt)}",
            *(f"    {sentence}" for sentence in self.corrupt[:SOME]),
        ]
        if len(self.corrupt) > SOME:
            lines.append(f"    and {len(self.corrupt) - SOME} others")
        return DataReport((*lines, *(f"  {note}" for note in self.notes)), bool(missing or self.corrupt or self.notes))

    def check(self, config: DataConfig) -> None:
        """Reject a data set of which not one sample has a caption (or label). Raises `InputError`."""
        if config.proportion_empty_prompts == 1:
            return
        if len(self.without) < len(self.good):
            return
        columns = f" (columns that are there: {', '.join(self.columns)})" if self.columns else ""
        raise InputError(
            f"none of {count(len(self.good), 'sample')} in {config.train_data_dir!r} has a {self._noun}{columns}"
            + "".join(f"; {sentence}" for sentence in (*self.notes, *self.corrupt[:1]))
            + "; name their column with caption_column, list them in metadata.jsonl, or "
            "set proportion_empty_prompts: 1 to train without"
        )


def is_nothing(words: Words) -> bool:
    """True if words are missing or blank."""
    return words is None or (isinstance(words, str) and not words.strip())


def crop_to_fill(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """An image scaled to cover ``size``, (height, width) in pixels, and cut in its middle."""
    height, width = size
    factor = max(height / picture.height, width / picture.width)
    if picture.height * factor * picture.width * factor > MOST_SPARE * height * width:
        # Of a very long image only the middle is scaled: all of it would fill the memory.
        wide, high = min(picture.width, width / factor), min(picture.height, height / factor)
        left, top = (picture.width - wide) / 2, (picture.height - high) / 2
        scaled = picture.resize((width, height), box=(left, top, left + wide, top + high))
    else:
        scaled = picture.resize(
            (max(width, round(picture.width * factor)), max(height, round(picture.height * factor)))
        )
    left, top = (scaled.width - width) // 2, (scaled.height - height) // 2
    return scaled.crop((left, top, left + width, top + height))


def pixels(picture: Image.Image, size: tuple[int, int], flip: bool = False) -> Tensor:
    """An image as (3, H, W) in [-1, 1]: scaled to cover ``size`` and cut in its middle."""
    array = np.asarray(crop_to_fill(picture, size))
    values = torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 127.5 - 1
    return values.flip(2) if flip else values
