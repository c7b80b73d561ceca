"""Samples of a folder of image or video files, from listings or from files beside them."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping, Sequence
from functools import partial

from ...errors import InputError
from ...report.formatting import count, enumerated
from .attached import Part
from .captions import BESIDE, LISTINGS, SampleWords, read_beside, read_listing
from .collection import Collection
from .files import companions, name_inside, repeating_folders
from .samples import SOME


class FolderReader:
    """Reads a folder of files.

    Args:
        files: names of all that are in it.
    """

    def __init__(self, collection: Collection, files: list[str]) -> None:
        self._collection, self._files = collection, files
        # Names that differ in how accents are composed only: other systems compose them in another way.
        self._by_name = {_composed(name): name for name in files}
        # By file, of the lines that name it: its words, and names of its reference images.
        self._lines: dict[str, list[tuple[SampleWords, Sequence[str]]]] = {}
        # Files that belong to others.
        self._belonging: set[str] = set()

    def read(self) -> None:
        collection = self._collection
        listings = [name for name in self._files if os.path.basename(name).lower() in LISTINGS]
        covered = [os.path.dirname(name) for name in listings]
        if len(set(covered)) < len(covered):
            folder = collection.config.train_data_dir
            raise InputError(f"{folder!r} has two of {', '.join(listings)} in one folder; leave one there")
        media = {name for name in self._files if name.lower().endswith(collection.kinds)}
        for name in listings:
            self._read_listing(name)
        unlisted = {
            name
            for name in media - self._lines.keys() - self._belonging
            if any(not place or name.startswith(place + os.sep) for place in covered)
        }
        if unlisted:
            names = enumerated(sorted(unlisted), SOME)
            collection.notes.append(f"in no line of a listing, and left out: {count(len(unlisted), 'file')} ({names})")
        texts = self._texts((media - unlisted - self._belonging) | self._lines.keys())
        used = {*media, *listings, *(text for beside in texts.values() for text in beside.values())}
        # Masks and the like, without a caption of their own.
        names = [name for name in companions(sorted(texts)) if not texts[name] and name not in self._lines]
        collection.note_companions(names)
        self._belonging.update(names)
        texts = {name: texts[name] for name in sorted(texts) if name not in names}
        if not listings and (repeats := repeating_folders(texts)):
            folders = ", ".join(f"{name}/" for name in repeats)
            collection.notes.append(
                f"numbers in the names of folders are no repeats, and their words no captions: {folders}; give each as "
                "dir of train_data, with weight and instance_prompt"
            )
        for name, beside in texts.items():
            for words, images in self._lines.get(name, [(SampleWords(), ())]):
                self._add(name, words, images, beside)
        collection.unread += [name for name in self._files if name not in used | self._lines.keys() | self._belonging]

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
            lines.append((SampleWords(value, f"{column} in {name}"), images))
        if several := [file for file, lines in self._lines.items() if len(lines) > 1]:
            collection.notes.append(
                f"with more than one line in a listing, each of which is a sample: {count(len(several), 'file')} "
                f"({enumerated(several, SOME)})"
            )

    def _find(self, place: str, file_name: str) -> str | None:
        """The name of a file by its name in a listing at a place; None: there is no such file."""
        for name in dict.fromkeys((file_name, file_name.replace("\\", "/"))):
            path = name_inside(self._collection.folder, name, place)
            if _composed(path) in self._by_name:
                return self._by_name[_composed(path)]
            if "\0" not in path and os.path.lexists(self._collection.folder / path):
                # A hidden file, or a folder.
                return path
        return None

    def _texts(self, names: set[str]) -> dict[str, dict[str, str]]:
        """For every name the files beside it that say something of it, by suffix: ``a.txt`` before ``a.png.txt``."""
        beside: dict[str, dict[str, str]] = {}
        for name in self._files:
            stem, kind = os.path.splitext(name)
            if kind.lower() in BESIDE[self._collection.by]:
                beside.setdefault(_composed(stem), {})[kind.lower()] = name
        nothing: dict[str, str] = {}
        return {
            name: beside.get(_composed(name), nothing) | beside.get(_composed(os.path.splitext(name)[0]), nothing)
            for name in names
        }

    def _add(self, name: str, words: SampleWords, images: Sequence[str], beside: Mapping[str, str]) -> None:
        """Add a sample, by a line that names it (or by none) and the files beside it."""
        collection = self._collection
        try:
            texts = read_beside(beside, collection.folder, collection.wanted)
            words.check_against(texts)
        except InputError as error:
            collection.leave_out(name, error)
            return
        parts = [Part(file, collection.folder / file) for file in (name, *images)]
        collection.add(name, texts if words.words is None else words, parts[0], parts[1:])


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)
