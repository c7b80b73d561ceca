"""Samples of a folder of image or video files, from listings or from files beside them."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
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
        # By file, of the lines that name it: its words, and the name of its reference image.
        self._lines: dict[str, list[tuple[SampleWords, str | None]]] = {}
        # Files that belong to others.
        self._belonging: set[str] = set()

    def read(self) -> None:
        collection = self._collection
        listings = self._listings()
        media = {name for name in self._files if name.lower().endswith(collection.kinds)}
        for name in listings:
            self._read_listing(name)
        unlisted = self._unlisted(media, [os.path.dirname(name) for name in listings])
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
            for words, image in self._lines.get(name, [(SampleWords(), None)]):
                self._add(name, words, image, beside)
        collection.unread += [name for name in self._files if name not in used | self._lines.keys() | self._belonging]

    def _listings(self) -> list[str]:
        listings = [name for name in self._files if os.path.basename(name).lower() in LISTINGS]
        if len({os.path.dirname(name) for name in listings}) < len(listings):
            folder = self._collection.config.train_data_dir
            raise InputError(f"{folder!r} has two of {', '.join(listings)} in one folder; leave one there")
        return listings

    def _unlisted(self, media: set[str], covered: list[str]) -> set[str]:
        """Files in or below a folder with a listing that no line names."""
        unlisted = {
            name
            for name in media - self._lines.keys() - self._belonging
            if any(not place or name.startswith(place + os.sep) for place in covered)
        }
        if unlisted:
            files = f"{count(len(unlisted), 'file')} ({enumerated(sorted(unlisted), SOME)})"
            self._collection.notes.append(f"in no line of a listing, and left out: {files}")
        return unlisted

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
                image = collection.attached.named(row, find, where)
            except InputError as error:
                collection.leave_out(file, error)
                continue
            self._belonging.update([] if image is None else [image])
            lines.append((SampleWords(value, f"{column} in {name}"), image))
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
            if kind.lower() in BESIDE and self._collection.by == "text":
                beside.setdefault(_composed(stem), {})[kind.lower()] = name
        nothing: dict[str, str] = {}
        return {
            name: beside.get(_composed(name), nothing) | beside.get(_composed(os.path.splitext(name)[0]), nothing)
            for name in names
        }

    def _add(self, name: str, words: SampleWords, image: str | None, beside: Mapping[str, str]) -> None:
        """Add a sample, by a line that names it (or by none) and the files beside it."""
        collection = self._collection
        try:
            texts = read_beside(beside, collection.folder)
            words.check_against(texts)
        except InputError as error:
            collection.leave_out(name, error)
            return
        reference = None if image is None else Part(image, collection.folder / image)
        words = texts if words.words is None else words
        collection.add(name, words, Part(name, collection.folder / name), reference)


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)
