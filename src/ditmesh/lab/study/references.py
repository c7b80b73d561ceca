"""The training images of an embedded model, as its folder holds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

THUMBNAIL = 32
THUMBNAIL_COLUMNS = 16


def nearest(pictures: np.ndarray, references: np.ndarray) -> np.ndarray:
    """For each of (n, h, w, 3) images the number of the nearest of (m, h, w, 3) references: (n,)."""
    a = pictures.reshape(len(pictures), -1).astype(np.float64)
    b = references.reshape(len(references), -1).astype(np.float64)
    squares = (a**2).sum(1)[:, None] - 2.0 * a @ b.T + (b**2).sum(1)[None]
    return squares.argmin(axis=1)


def shrink(pictures: np.ndarray, size: int = THUMBNAIL) -> np.ndarray:
    """(n, h, w, 3) -> (n, size, size, 3), by averaging boxes."""
    return np.stack([np.asarray(Image.fromarray(p).resize((size, size), Image.Resampling.BOX)) for p in pictures])


def read_sheet(file: Path, count: int, size: int = THUMBNAIL, columns: int = THUMBNAIL_COLUMNS) -> np.ndarray:
    """The first images of a sheet of ``columns`` columns: (count, size, size, 3) ``uint8``."""
    page = np.asarray(Image.open(file).convert("RGB"))
    places = [divmod(i, columns) for i in range(count)]
    return np.stack([page[y * size : (y + 1) * size, x * size : (x + 1) * size] for y, x in places])


def views(pictures: np.ndarray, size: int = 64) -> np.ndarray:
    """The four views of a class: (n, h, w, 3) ``uint8`` -> (n, 4, size, size, 3).

    Each image in the upper left and in the lower right corner of a white ground, as it is and mirrored. The
    class does not say which, so the image tokens must agree on it, which they can only by attention.
    """
    n, height, width, _ = pictures.shape
    out = np.full((n, 4, size, size, 3), 255, np.uint8)
    for i, side in enumerate((pictures, pictures[:, :, ::-1])):
        out[:, 2 * i, :height, :width] = side
        out[:, 2 * i + 1, size - height :, size - width :] = side
    return out


def read_references(model: Path, classes: int, size: int) -> np.ndarray:
    """All views of all training images at half of ``size`` pixels: (classes, views, size / 2, size / 2, 3)."""
    with Image.open(model / "thumbnails.png") as page:
        side = page.width // THUMBNAIL_COLUMNS
    return views(read_sheet(model / "thumbnails.png", classes, side), size // 2)
