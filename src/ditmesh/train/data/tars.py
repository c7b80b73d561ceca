"""Samples of WebDataset tars: files of one sample share their name up to the first dot."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable

from ...errors import InputError
from ...media.files import open_part
from ...media.images import IMAGE_SUFFIXES
from .attached import Part
from .captions import BESIDE, read_beside
from .collection import Collection
from .folder_names import companions
from .inside import is_shown

# A member of a tar by its suffix from the first dot on.
_Members = dict[str, tarfile.TarInfo]


class TarReader:
    """Reads an uncompressed tar.

    Args:
        name: of the tar, relative to the data set's folder.
    """

    def __init__(self, collection: Collection, name: str) -> None:
        self._collection, self._name = collection, name
        self._tar = collection.folder / name

    def read(self) -> None:
        collection, name = self._collection, self._name
        entries: dict[str, _Members] = {}
        try:
            # Compressed, the members' places in the file would not be known.
            with open_part(self._tar, name, most=2**63) as file, tarfile.open(fileobj=file, mode="r:") as opened:
                for member in opened:
                    self._note_member(member, entries)
        except (tarfile.TarError, OSError, EOFError, InputError) as error:
            compressed = "" if entries else "; an uncompressed tar is read"
            collection.corrupt.append(f"{name} breaks off: {error}{compressed}")
        masks = {os.path.splitext(file)[0] for file in companions(f"{key}.png" for key in entries)}
        # With a caption of its own it is a sample.
        masks = {key for key in masks if not entries[key].keys() & BESIDE[collection.by]}
        collection.note_companions(sorted(f"{name}:{key}" for key in masks))
        for key in sorted(entries.keys() - masks):
            self._add(key, entries[key])

    def _note_member(self, member: tarfile.TarInfo, entries: dict[str, _Members]) -> None:
        where, _, file = member.name.rpartition("/")
        if member.isdir() or not all(is_shown(part) for part in member.name.split("/") if part not in ("", ".")):
            return
        corrupt, full = self._collection.corrupt, f"{self._name}:{member.name}"
        if not member.isreg() or member.issparse():
            kind = "a link" if member.islnk() or member.issym() else "sparse" if member.issparse() else "no file"
            corrupt.append(f"{full} is {kind} in the tar, and is left out")
            return
        stem, _, kind = file.partition(".")
        members = entries.setdefault(f"{where}/{stem}".lstrip("/"), {})
        if f".{kind.lower()}" in members:
            corrupt.append(f"{full} is in the tar again, and the last one counts")
        members[f".{kind.lower()}"] = member

    def _add(self, key: str, members: _Members) -> None:
        collection = self._collection
        image = next((members[kind] for kind in collection.kinds if kind in members), None)
        references = self._references(members) if image is not None else []
        texts = [kind for kind in members if image is not None and kind in BESIDE[collection.by]]
        used = {image and image.name, *(members[kind].name for kind in texts)}
        names = {self._full(member) for member in members.values() if member.name not in used}
        collection.unread += sorted(names - {part.name for part in references})
        if image is None:
            return
        try:
            words = read_beside(
                {kind: (self._full(members[kind]), self._reader(members[kind])) for kind in texts}, collection.wanted
            )
        except InputError as error:
            collection.leave_out(f"{self._name}:{key}", InputError(f"{error}"))
            return
        part = self._part(image)
        collection.add(part.name, words, part, references)

    def _references(self, members: _Members) -> list[Part]:
        """The reference images of a sample: ``.before.png`` for a column ``before``."""
        column = self._collection.attached.column
        return [
            self._part(member)
            for kind, member in sorted(members.items())
            if column is not None and kind.rpartition(".")[0] == f".{column.lower()}" and kind.endswith(IMAGE_SUFFIXES)
        ]

    def _full(self, member: tarfile.TarInfo) -> str:
        return f"{self._name}:{member.name}"

    def _part(self, member: tarfile.TarInfo) -> Part:
        return Part(self._full(member), self._tar, member.offset_data, member.size)

    def _reader(self, member: tarfile.TarInfo) -> Callable[[], bytes]:
        def read() -> bytes:
            # An empty file is an empty caption.
            if not member.size:
                return b""
            with self._part(member).open() as file:
                return file.read()

        return read
