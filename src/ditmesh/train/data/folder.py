"""Samples of a folder of image or video files, from listings or from files beside them."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...errors import InputError
from ...media.files import read_whole
from ...report.formatting import count, enumerated
from .attached import Part
from .captions import BESIDE, MOST_BESIDE, SampleWords, is_listing, read_beside, read_listing
from .collection import Collection
from .folder_names import FolderRepeats, companions
from .samples import SOME


@dataclass(frozen=True)
class _Line:
    """What a line of a listing says of a file: words, and names of its reference images."""

    words: SampleWords = field(default_factory=SampleWords)
    images: Sequence[str] = ()


class FolderReader:
    """Reads a folder of files.

    Args:
        files: names of all that are in it.
    """

    def __init__(self, collection: Collection, files: list[str]) -> None:
        self._collection, self._files = collection, files
        # Names that differ in how accents are composed only: other systems compose them in another way.
        self._by_name = {_composed(name): name for name in files}
        # By file: the lines that name it; and files that belong to others.
        self._lines: dict[str, list[_Line]] = {}
        self._belonging: set[str] = set()

    def read(self) -> None:
        collection = self._collection
        listings = self._listings()
        media = {name for name in self._files if name.lower().endswith(collection.kinds)}
        for name in listings:
            self._read_listing(name)
        covered = [os.path.dirname(name) for name in listings]
        unlisted = {
            name
            for name in media - self._lines.keys() - self._belonging
            if any(not place or name.startswith(place + os.sep) for place in covered)
        }
        if unlisted:
            names = enumerated(sorted(unlisted), SOME)
            collection.notes.append(f"in no line of a listing, and left out: {count(len(unlisted), 'file')} ({names})")
        wanted = (media - unlisted - self._belonging) | self._lines.keys()
        texts = self._texts(wanted, listings)
        used = {*media, *listings, *(text for beside in texts.values() for text in beside.values())}
        self._take_companions(texts)
        if not listings and collection.by == "text":
            collection.repeats = FolderRepeats.read(texts)
            collection.notes += collection.repeats.notes
        self._add_samples(texts)
        collection.unread += [name for name in self._files if name not in used | self._lines.keys() | self._belonging]

    # --- listings -----------------------------------------------------------------------------------------------

    def _listings(self) -> list[str]:
        listings = [name for name in self._files if is_listing(os.path.basename(name))]
        places = [os.path.dirname(name) for name in listings]
        for place in places:
            if places.count(place) > 1:
                both = " and ".join(name for name in listings if os.path.dirname(name) == place)
                folder = self._collection.config.train_data_dir
                raise InputError(f"{folder!r} has {both} in one folder; leave one there")
        return listings

    def _read_listing(self, name: str) -> None:
        collection, wanted = self._collection, self._collection.wanted
        listing = read_listing(collection.folder / name, name)
        collection.corrupt += listing.problems
        column = wanted.among(listing.columns)
        if column is None:
            collection.note_columns(listing.columns)
        find = partial(self._find, os.path.dirname(name))
        for where, file_name, row in listing.lines:
            try:
                file = find(file_name)
            except InputError as error:
                collection.corrupt.append(f"{error} ({where})")
                continue
            if file is None:
                collection.corrupt.append(f"{file_name} is not there ({where})")
                continue
            lines = self._lines.setdefault(file, [])
            try:
                value = None if column is None else wanted.value(row.get(column), where)
                images = collection.attached.named(row, find, where)
            except InputError as error:
                collection.leave_out(file, error)
                continue
            self._belonging.update(images)
            lines.append(_Line(SampleWords(value, f"{column} in {name}"), images))
        if several := [file for file, lines in self._lines.items() if len(lines) > 1]:
            collection.notes.append(
                f"with more than one line in a listing, each of which is a sample: {count(len(several), 'file')} "
                f"({enumerated(several, SOME)})"
            )

    def _find(self, place: str, file_name: str) -> str | None:
        """The name of a file by its name in a listing at a place; None: there is no such file."""
        folder = self._collection.folder
        for name in dict.fromkeys((file_name, file_name.replace("\\", "/"))):
            path = os.path.relpath(name, os.path.abspath(folder)) if os.path.isabs(name) else os.path.join(place, name)
            path = os.path.normpath(path)
            if path.split(os.sep)[0] == ".." or os.path.isabs(path):
                raise InputError(f"{name!r} is outside of {str(folder)!r}, and is left out")
            if _composed(path) in self._by_name:
                return self._by_name[_composed(path)]
            if "\0" not in path and os.path.lexists(folder / path):
                # A hidden file, a folder, or behind a link.
                self._collection.inside.check(path, repr(file_name))
                return path
        return None

    # --- files beside an image ----------------------------------------------------------------------------------

    def _texts(self, names: Iterable[str], listings: list[str]) -> dict[str, dict[str, str]]:
        """For every name the files beside it that say something of it, by suffix: ``a.txt`` before ``a.png.txt``."""
        beside: dict[str, dict[str, str]] = {}
        for name in self._files:
            stem, kind = os.path.splitext(name)
            if kind.lower() in BESIDE[self._collection.by] and name not in listings:
                beside.setdefault(_composed(stem), {})[kind.lower()] = name
        nothing: dict[str, str] = {}
        return {
            name: beside.get(_composed(name), nothing) | beside.get(_composed(os.path.splitext(name)[0]), nothing)
            for name in names
        }

    def _take_companions(self, texts: dict[str, dict[str, str]]) -> None:
        """Take masks and the like, without a caption of their own, from the samples."""
        names = [name for name in companions(sorted(texts)) if not texts[name] and name not in self._lines]
        self._collection.note_companions(names)
        self._belonging.update(names)
        for name in names:
            del texts[name]

    def _add_samples(self, texts: Mapping[str, dict[str, str]]) -> None:
        """Add samples from their lines and from files beside them."""
        collection = self._collection
        described: list[tuple[str, SampleWords | InputError, Sequence[str]]] = []
        for name in sorted(texts):
            for line in self._lines.get(name, [_Line()]):
                try:
                    described.append((name, *self._described(name, line, texts[name])))
                except InputError as error:
                    described.append((name, error, ()))
        for name, words, images in described:
            if isinstance(words, InputError):
                collection.leave_out(name, words)
            # JSON files of others may name it as their mask.
            elif words.words is not None or name not in self._belonging or name in self._lines:
                collection.add(name, words, self._part(name), [self._part(file) for file in images])

    def _described(self, name: str, line: _Line, texts: Mapping[str, str]) -> tuple[SampleWords, Sequence[str]]:
        """Words of a sample, and names of its reference images. Raises `InputError`."""
        collection, images = self._collection, line.images
        beside = {kind: (text, _reader(collection.folder / text, text)) for kind, text in texts.items()}
        words = read_beside(beside, collection.wanted)
        if words.row and not images:
            find = partial(self._find, os.path.dirname(name))
            images = collection.attached.named(words.row, find, texts[".json"])
            self._belonging.update(images)
        line.words.check_against(words)
        return (words if line.words.words is None else line.words), images

    def _part(self, name: str) -> Part:
        return Part(name, self._collection.folder / name)


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _reader(path: Path, name: str) -> Callable[[], bytes]:
    # An empty file is an empty caption.
    return lambda: b"" if path.is_file() and not path.stat().st_size else read_whole(path, name, MOST_BESIDE)
