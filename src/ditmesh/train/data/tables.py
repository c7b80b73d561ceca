"""Samples of data sets of the ``datasets`` package: folders of ``save_to_disk``, and parquet files with images.

Nothing is downloaded: files on disk are read, and the image's bytes are decoded as those of every other file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from ...errors import InputError, first_line
from ...media.files import read_whole
from ...media.images import IMAGE_SUFFIXES
from ...requirements import not_installed
from .attached import Part
from .captions import SampleWords
from .collection import Collection
from .files import name_inside

# Files of `save_to_disk`: of one split, and of several.
_ONE, _SEVERAL = ("state.json", "dataset_info.json"), "dataset_dict.json"


def table_files(folder: Path, files: Sequence[str]) -> list[Path] | None:
    """The tables of a data set of the ``datasets`` package; empty: it was saved whole; None: it is no such data set."""
    if (folder / _SEVERAL).is_file() or all((folder / name).is_file() for name in _ONE):
        return []
    if any(name.lower().endswith(IMAGE_SUFFIXES) for name in files):
        return None
    return [folder / name for name in files if name.lower().endswith(".parquet")] or None


def read_table(collection: Collection, files: Sequence[Path]) -> None:
    """Read heads of images, captions and labels of a data set on disk.

    Raises `InputError`: the package is not installed, the files cannot be read, or a column is not there.
    """
    config, wanted = collection.config, collection.wanted
    if config.num_frames is not None:
        raise InputError(f"num_frames: videos are read from files, and {str(collection.folder)!r} is a table")
    rows = _Rows(collection, files)
    names = list(rows.table.features)
    column = wanted.among(names)
    if column is None:
        collection.note_columns(names)
    beside = collection.attached.column if collection.attached.column in names else None
    columns = dict.fromkeys(name for name in (rows.image, column, beside) if name is not None)
    for row, values in enumerate(rows.table.select_columns(list(columns))):
        name = f"row {row}"
        try:
            content = rows.content(row, rows.image)
            words = None if column is None else wanted.value(values[column], name)
        except InputError as error:
            collection.leave_out(name, error)
            continue
        reference = None
        if beside is not None and values[beside] is not None:
            reference = Part(f"{name}, {beside}", rows.file, partial(rows.content, row, beside))
        part = Part(name, rows.file, partial(rows.content, row, rows.image))
        collection.add(name, SampleWords(words, f"{column} in the table"), part, reference, BytesIO(content))


class _Rows:
    """The rows of a data set on disk.

    Attributes:
        table: the data set with undecoded images.
        image: the column of the images that are trained.
        file: the newest of its files.
    """

    def __init__(self, collection: Collection, files: Sequence[Path]) -> None:
        self._folder = collection.folder
        if find_spec("datasets") is None:
            raise InputError(not_installed(f"the data set {str(self._folder)!r}", "datasets", "data"))
        import datasets  # pyright: ignore[reportMissingImports]

        try:
            self.table: Any = _of_files(collection, files) if files else _saved(collection)
            names = files or [Path(file["filename"]) for file in self.table.cache_files]
            self.file = max(names, key=lambda path: path.stat().st_mtime_ns)
            features = self.table.features.items()
            # Files that other programs wrote do not say that bytes are images.
            images = [name for name, kind in features if isinstance(kind, datasets.Image) or _holds_bytes(kind)]
            for name, kind in features:
                # Of sounds and videos too: decoding opens what their paths name.
                inner: Any = getattr(kind, "feature", None)
                if hasattr(kind, "decode"):
                    self.table = self.table.cast_column(name, cast(Any, type(kind))(decode=False))
                elif hasattr(inner, "decode"):
                    self.table = self.table.cast_column(name, type(kind)(inner.__class__(decode=False)))
        except InputError:
            raise
        except Exception as error:
            # Of untrusted files, anything.
            raise InputError(
                f"{str(self._folder)!r} cannot be read by the package datasets ({first_line(error)[:200]})"
            ) from None
        images = [name for name in images if name != collection.config.conditioning_image_column]
        if "image" not in images and len(images) != 1:
            which = f"several columns of images ({', '.join(images)})" if images else "no column of images"
            raise InputError(f"{str(self._folder)!r} has {which}; call one image")
        self.image = "image" if "image" in images else images[0]

    def content(self, row: int, column: str) -> bytes:
        """The bytes of an image. Raises `InputError` if there are none."""
        value = self.table.select_columns([column])[row][column]
        if isinstance(value, bytes):
            return value
        if isinstance(value, Mapping):
            if value.get("bytes"):
                return value["bytes"]
            if value.get("path"):
                return read_whole(self._folder / name_inside(self._folder, value["path"]), f"row {row}")
        raise InputError(f"row {row} has no image in {column}")


def _saved(collection: Collection) -> Any:
    import datasets  # pyright: ignore[reportMissingImports]

    folder = str(collection.folder)
    table: Any = datasets.load_from_disk(folder)
    if isinstance(table, Mapping):
        name = "train" if "train" in table else next(iter(table)) if len(table) == 1 else None
        if name is None:
            raise InputError(f"{folder!r} has no split train (it has {', '.join(table)}); name its folder")
        if others := [split for split in table if split != name]:
            collection.notes.append(f"splits that are not trained on: {', '.join(others)}")
        table = table[name]
    for file in table.cache_files:
        name_inside(collection.folder, os.path.abspath(file["filename"]))
    return table


def _of_files(collection: Collection, files: Sequence[Path]) -> Any:
    import datasets  # pyright: ignore[reportMissingImports]

    train = [path for path in files if "train" in str(path.relative_to(collection.folder)).lower()]
    if train and len(train) < len(files):
        collection.notes.append(f"files that are not trained on, beside those of train: {len(files) - len(train)}")
    return datasets.Dataset.from_parquet(cast(Any, [str(path) for path in train or files]))


def _holds_bytes(kind: Any) -> bool:
    """True if a column of plain types can hold images: bytes, or bytes and a path as the package itself stores them."""
    if isinstance(kind, Mapping):
        return "bytes" in kind and set(kind) <= {"bytes", "path"}
    return getattr(kind, "dtype", None) in ("binary", "large_binary")
