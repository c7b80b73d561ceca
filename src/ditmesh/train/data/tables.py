"""Samples of data sets of the ``datasets`` package: folders of ``save_to_disk``, parquet or arrow files with images.

Nothing is downloaded: files on disk are read, and the image's bytes are decoded as those of every other file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from ...errors import InputError, first_line
from ...media.files import read_whole
from ...media.images import IMAGE_SUFFIXES, image_size
from ...requirements import not_installed
from ..config import TrainConfig
from .attached import AttachedImages, Part
from .captions import CaptionColumn, is_listing
from .inside import DataFolder

# Files of `save_to_disk`: of one split, and of several.
_ONE, _SEVERAL = ("state.json", "dataset_info.json"), "dataset_dict.json"
_TABLES = (".parquet", ".arrow")


def holds_tables(folder: Path) -> bool:
    """True if a folder is a data set of the ``datasets`` package: saved by it, or tables and no image files."""
    if _is_saved(folder):
        return True
    there = False
    for _, folders, files in DataFolder(folder).walk(lambda _: None):
        folders[:] = [one for one in folders if not one.startswith(".")]
        shown = [one.lower() for one in files if not one.startswith(".")]
        if any(one.endswith((*IMAGE_SUFFIXES, ".tar")) for one in shown):
            return False
        there = there or any(one.endswith(_TABLES) and not is_listing(one) for one in shown)
    return there


def _is_saved(folder: Path) -> bool:
    return (folder / _SEVERAL).is_file() or all((folder / name).is_file() for name in _ONE)


def _holds_bytes(kind: Any) -> bool:
    """True if a column of plain types can hold images: bytes, or bytes and a path as the package itself stores them."""
    if isinstance(kind, Mapping):
        return "bytes" in kind and set(kind) <= {"bytes", "path"}
    return getattr(kind, "dtype", None) in ("binary", "large_binary")


@dataclass
class TableRows:
    """The rows of a data set on disk.

    Attributes:
        data: the data set with undecoded images.
        file: the newest of its files.
        notes: what else there is to know.

    Raises:
        InputError: the package is not installed, or the files cannot be read.
    """

    folder: Path
    config: TrainConfig
    data: Any = None
    file: Path = field(default_factory=Path)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if find_spec("datasets") is None:
            raise InputError(not_installed(f"the data set {str(self.folder)!r}", "datasets", "data"))
        import datasets  # pyright: ignore[reportMissingImports]

        self._inside = DataFolder(self.folder)
        try:
            self.data = self._saved(datasets) if _is_saved(self.folder) else self._files(datasets)
            features = self.data.features.items()
            # Files that other programs wrote do not say that bytes are images.
            self.images = [name for name, kind in features if isinstance(kind, datasets.Image) or _holds_bytes(kind)]
            for name, kind in self.data.features.items():
                # Of sounds and videos too: decoding opens what their paths name.
                inner: Any = getattr(kind, "feature", None)
                if hasattr(kind, "decode"):
                    self.data = self.data.cast_column(name, cast(Any, type(kind))(decode=False))
                elif hasattr(inner, "decode"):
                    self.data = self.data.cast_column(name, type(kind)(inner.__class__(decode=False)))
        except InputError:
            raise
        except Exception as error:
            # Of untrusted files, anything.
            raise InputError(
                f"{str(self.folder)!r} cannot be read by the package datasets ({first_line(error)[:200]})"
            ) from None

    def _saved(self, datasets: Any) -> Any:
        found = datasets.load_from_disk(str(self.folder))
        if isinstance(found, Mapping):
            name = "train" if "train" in found else next(iter(found)) if len(found) == 1 else None
            if name is None:
                raise InputError(
                    f"{str(self.folder)!r} has no split train (it has {', '.join(found)}); name its folder"
                )
            if others := [one for one in found if one != name]:
                self.notes.append(f"splits that are not trained on: {', '.join(others)}")
            found = found[name]
        for file in found.cache_files:
            self._inside.check(os.path.abspath(file["filename"]), f"a file of {str(self.folder)!r}")
        self.file = max((Path(one["filename"]) for one in found.cache_files), key=lambda one: one.stat().st_mtime_ns)
        return found

    def _files(self, datasets: Any) -> Any:
        there: list[Path] = []
        for place, folders, files in self._inside.walk(self.notes.append):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths = (Path(place, name) for name in files if not name.startswith(".") and not is_listing(name))
            there += [path for path in paths if path.suffix.lower() in _TABLES and path.is_file()]
        there.sort()
        train = [path for path in there if "train" in str(path.relative_to(self.folder)).lower()]
        if train and len(train) < len(there):
            self.notes.append(f"files that are not trained on, beside those of train: {len(there) - len(train)}")
        there = train or there
        kinds = {path.suffix.lower() for path in there}
        if len(kinds) > 1:
            raise InputError(f"{str(self.folder)!r} has parquet and arrow files; leave one kind there")
        self.file = max(there, key=lambda one: one.stat().st_mtime_ns)
        names = [str(path) for path in there]
        if kinds == {".parquet"}:
            return datasets.Dataset.from_parquet(names)
        return datasets.concatenate_datasets([datasets.Dataset.from_file(name) for name in names])

    def image_column(self) -> str:
        """The column with the images that are trained.

        Raises:
            InputError: there is none, or several might be.
        """
        wanted, beside = self.config.image_column, (self.config.mask_column, self.config.conditioning_image_column)
        if wanted is not None:
            if wanted not in self.data.features:
                raise InputError(
                    f"image_column={wanted!r} is not in {str(self.folder)!r}; its columns are "
                    f"{', '.join(self.data.features)}"
                )
            return wanted
        found = [name for name in self.images if name not in beside]
        if "image" in found:
            return "image"
        if len(found) != 1:
            which = f"several columns of images ({', '.join(found)})" if found else "no column of images"
            raise InputError(f"{str(self.folder)!r} has {which}; name one with image_column")
        return found[0]

    def content(self, row: int, column: str, place: int | None = None) -> bytes:
        """The bytes of an image. Raises `InputError` if there are none."""
        value = self.data.select_columns([column])[row][column]
        value = value if place is None else value[place]
        if isinstance(value, bytes):
            return value
        if isinstance(value, Mapping):
            if value.get("bytes"):
                return value["bytes"]
            if value.get("path"):
                return read_whole(self._inside.check(value["path"], f"row {row}: {value['path']!r}"), f"row {row}")
        raise InputError(f"row {row} has no image in {column}")

    def parts(self, row: int, column: str | None, value: Any) -> list[Part]:
        """The images of a row in a column, or in the list there."""
        if column is None or value is None:
            return []
        name = f"row {row}, {column}"
        if isinstance(value, (list, tuple)):
            every = range(len(value))
            return [Part(f"{name}.{n}", self.file, content=partial(self.content, row, column, n)) for n in every]
        return [Part(name, self.file, content=partial(self.content, row, column))]


@dataclass
class TableSearch:
    """Samples of a table, as `samples.Samples.find` wants them.

    Args:
        rows: of the data set.
        wanted: captions or labels.
        advance: called with the number of samples that have been looked at so far.

    Attributes:
        found: for every row that can be trained: name, caption or label, size, where its bytes are, what belongs to it.
        corrupt: a sentence for every other one.
        sources: the number of captions by their column.
        notes: what else there is to know.
    """

    rows: TableRows
    wanted: CaptionColumn
    config: TrainConfig
    advance: Callable[[int], None] | None = None
    found: list[tuple[str, Any, tuple[int, int], Part, Any]] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Read heads of images, captions and labels."""
        if self.config.num_frames is not None:
            raise InputError(f"num_frames: videos are read from files, and {str(self.rows.folder)!r} is a table")
        image, names = self.rows.image_column(), list(self.rows.data.features)
        column = self.wanted.among(names)
        if column is None and self.wanted.column is not None and self.wanted.by == "text":
            raise InputError(
                f"caption_column={self.wanted.column!r} is not in {str(self.rows.folder)!r}; its columns are "
                f"{', '.join(names)}; name one of them"
            )
        attached = AttachedImages(self.config)
        for row, values in self._rows(
            [image, *(one for one in (column, *attached.columns) if one is not None and one in names)]
        ):
            if self.advance is not None:
                self.advance(row + 1)
            name = f"row {row}"
            try:
                bytes_there = self.rows.content(row, image)
                size = image_size(BytesIO(bytes_there), name)
                said = None if column is None else self.wanted.value(values[column], name)
                parts = {one: self.rows.parts(row, one, values.get(one)) for one in attached.named_columns}
                beside = attached.of(name, parts, size)
            except InputError as error:
                self.corrupt.append(str(error) if str(error).startswith(name) else f"{name} is left out: {error}")
                continue
            if said is None and self.wanted.by == "text" and self.config.instance_prompt is not None:
                said, source = self.config.instance_prompt, "instance_prompt"
            else:
                source = f"{column} in the table"
            if said is not None:
                self.sources[source] += 1
            part = Part(name, self.rows.file, 0, len(bytes_there), partial(self.rows.content, row, image))
            self.found.append((name, said, size, part, beside))
        self.notes += self.rows.notes
        if attached.unmasked:
            self.notes.append(f"without mask, and trained whole: {len(attached.unmasked)} samples")

    def _rows(self, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        yield from enumerate(self.rows.data.select_columns(list(dict.fromkeys(names))))
