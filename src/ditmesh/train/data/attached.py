"""Images that belong to a sample beside its own: a mask of the loss, reference images of edit and control models.

They have the image's name in a folder of their own. Reference images can also be named by a column of a listing or a
table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from PIL import Image

from ...errors import InputError
from ...media.files import open_file
from ...media.images import IMAGE_SUFFIXES, image_size, read_image, read_mask
from ..settings import SampleSettings
from .files import files_in

Read = TypeVar("Read")

# The largest distance of a mask's shape from its image's: a pixel of a small image.
MOST_ASKEW = 0.02


@dataclass(frozen=True)
class Part:
    """The bytes of an image: a file, or a function's result.

    Attributes:
        name: for messages.
        file: where the bytes are.
        content: reads the bytes from inside of the file; None: they are the file.
    """

    name: str
    file: Path
    content: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)

    def open(self) -> BinaryIO:
        """The bytes, opened for reading. Raises `InputError` if they cannot be read."""
        return open_file(self.file, self.name) if self.content is None else BytesIO(self.content())

    def picture(self) -> Image.Image:
        """The image, upright sRGB. Raises `OSError` if it is corrupt."""
        return self.read(read_image)

    def mask(self) -> Image.Image:
        """The image as levels of grey, upright: white is what counts. Raises `OSError` if it is corrupt."""
        return self.read(read_mask)

    def read(self, read: Callable[[BinaryIO, str], Read]) -> Read:
        """The result of ``read(file, name)``. Raises `OSError` in the place of `InputError`."""
        try:
            with self.open() as file:
                return read(file, self.name)
        except InputError as error:
            raise OSError(str(error)) from None

    def stamp(self) -> tuple[int, int] | None:
        """Time of change (ns) and size (bytes) of its file; None: it is missing, which reading it reports."""
        with suppress(OSError):
            about = self.file.stat()
            return about.st_mtime_ns, about.st_size
        return None

    def size(self) -> tuple[int, int]:
        """(height, width) as it is seen. Raises `InputError` if it is no image."""
        with self.open() as file:
            return image_size(file, self.name)

    def renamed(self, prefix: str) -> Part:
        """The part with a prefix before its name."""
        return replace(self, name=f"{prefix}{self.name}")


@dataclass(frozen=True)
class SampleImages:
    """The images that belong to a sample: a mask of the loss (None: all counts), and one for its conditions."""

    mask: Part | None = None
    reference: Part | None = None


class AttachedImages:
    """Finds the images that belong to the samples of a data set.

    Attributes:
        column: the column that names a reference image; None: none does.
        unmasked: names of samples without a mask, in a data set that has masks.

    Raises:
        InputError: a configured folder does not exist.
    """

    def __init__(self, config: SampleSettings) -> None:
        self.column = config.conditioning_image_column
        self.unmasked: list[str] = []
        self._wants_references = config.has_references
        settings = (("mask_dir", config.mask_dir), ("conditioning_dir", config.conditioning_dir))
        self._masks, self._references = (None if place is None else _files_of(place, name) for name, place in settings)
        self._places = [Path(place).resolve() for _, place in settings if place is not None]

    def holds(self, folder: str | Path) -> bool:
        """True if a folder is one of them: the files in it are no samples."""
        return bool(self._places) and Path(folder).resolve() in self._places

    def named(self, row: Mapping[str, Any], find: Callable[[str], str | None], where: str) -> str | None:
        """The name of the reference image that a row of a listing gives; ``find`` makes it of the name there, or None.

        Raises `InputError`: it is not there.
        """
        value = None if self.column is None else row.get(self.column)
        if value is None or value == "":
            return None
        name = find(value) if isinstance(value, str) else None
        if name is None:
            raise InputError(f"{where}: {self.column} names {str(value)[:80]!r}, which is no image that is there")
        return name

    def of(self, name: str, reference: Part | None, size: tuple[int, int]) -> SampleImages:
        """The images that belong to a sample of (height, width) pixels; ``reference``: what a column names.

        Raises:
            InputError: one cannot be read, or there is no reference image, or the mask has another shape; one sentence.
        """
        stem = os.path.splitext(name)[0]
        if reference is None and self._references is not None:
            reference = self._references.get(stem)
        if self._wants_references and reference is None:
            raise InputError("there is no conditioning image of it")
        if reference is not None:
            reference.size()
        mask = None if self._masks is None else self._masks.get(stem)
        if self._masks is not None and mask is None:
            self.unmasked.append(name)
        if mask is not None:
            height, width = mask.size()
            if abs(height * size[1] / (width * size[0]) - 1) > max(MOST_ASKEW, 1 / min(*size, height, width)):
                raise InputError(
                    f"it has {size[1]} x {size[0]} pixels, and its mask {mask.name} {width} x {height}, which is "
                    "another shape; draw the mask over the image"
                )
        return SampleImages(mask, reference)


def _files_of(folder: str, setting: str) -> dict[str, Part]:
    """The images below a folder by their names without suffix."""
    place = Path(folder)
    if not place.is_dir():
        raise InputError(f"{setting}={folder!r} is no folder")
    images: dict[str, Part] = {}
    for name in files_in(place):
        if name.lower().endswith(IMAGE_SUFFIXES):
            twin = images.setdefault(os.path.splitext(name)[0], Part(name, place / name))
            if twin.name != name:
                raise InputError(f"{setting}={folder!r} has {twin.name} and {name} for one image; leave one there")
    if not images:
        raise InputError(f"{setting}={folder!r} has no image ({', '.join(IMAGE_SUFFIXES)} are looked for)")
    return images
