"""Samples of folders and WebDataset tars: images or videos with captions or labels.

A folder follows Hugging Face's imagefolder: a listing (``metadata.jsonl``, ``.csv`` and others, in any folder below)
with ``file_name`` and a caption or label; or files of the same name beside each image. A tar follows WebDataset: files
of one sample share their name up to the first dot.
"""

from __future__ import annotations

import logging
import os
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...errors import InputError
from ...media.files import open_part, read_whole
from ...media.images import IMAGE_SUFFIXES as IMAGES
from ...media.images import image_size
from ...media.videos import VIDEO_SUFFIXES as VIDEOS
from ...media.videos import frame_size, read_frames
from ...report.formatting import count, enumerated
from ..config import TrainConfig
from .attached import AttachedImages, Part, SampleImages
from .captions import (
    BESIDE,
    MOST_BESIDE,
    By,
    CaptionColumn,
    SidecarContent,
    Words,
    is_listing,
    read_beside,
    read_listing,
)
from .folder_names import FolderRepeats, companions
from .inside import DataFolder
from .tables import TableRows, TableSearch, holds_tables

# Of a video model's data set; animated images are videos too.
FILES = (*IMAGES, *VIDEOS)
# Of files that hold others, in forms that are not read.
ARCHIVES = (".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".7z", ".rar")
# Folders beside one that is called train, which are not trained on.
OTHER_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
# Names in a sentence, and the largest ratio of a scaled image's pixels to those of its crop.
SOME, MOST_SPARE = 3, 16


@dataclass(frozen=True)
class Sample:
    """One image or video.

    Attributes:
        name: for messages: its file, or tar and file.
        said: caption, several of which one is drawn, label, or None.
        size: (height, width) of the upright image, in pixels.
        part: the place of its bytes.
        attached: its mask and reference images.
        source: number of its data set.
        repeats: how often an epoch has it, by the name of its folder.
    """

    name: str
    said: Any
    size: tuple[int, int]
    part: Part
    attached: SampleImages = field(default_factory=SampleImages)
    source: int = 0
    repeats: int = 1

    def picture(self) -> Image.Image:
        """The decoded image, upright sRGB.

        Raises:
            OSError: it is corrupt; names it.
        """
        seen = self.part.picture()
        if (seen.height, seen.width) != self.size:
            # A PNG with EXIF behind its pixels; or the file is another one by now.
            raise OSError(
                f"{self.name} has {self.size[1]} x {self.size[0]} pixels by its header and {seen.width} x "
                f"{seen.height} when it is decoded; save it upright"
            )
        return seen

    def frames(self, count: int) -> list[Image.Image]:
        """The first ``count`` frames of a video, upright RGB.

        Raises:
            OSError: it is corrupt, or has fewer; names it.
        """
        found = self.part.read(lambda file, name: read_frames(file, name, count))
        if len(found) < count:
            raise OSError(f"{self.name} has {len(found)} frames, and num_frames={count}")
        return found


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
        notes: what else there is to know: files that are not read, captions that contradict one another.
        sources: how many captions or labels come from where.
        columns: of listings, and keys of JSON files, among which the wanted column is not.
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
        return tuple(one.name for one in self.good if _nothing(one.said))

    def report(self, held_out: int | None = None) -> DataReport:
        """The report of used and skipped files before a run; ``held_out`` samples are measured and not trained on."""
        word = "caption" if self.by == "text" else "label"
        sources = ", ".join(f"{count} of {source}" for source, count in self.sources)
        missing = self.without
        lines = [
            f"data: {count(len(self.good), 'sample')}",
            f"  with {word}: {len(self.good) - len(missing)}" + (f" ({sources})" if sources else ""),
            f"  without {word}: {len(missing)}" + (f" ({enumerated(missing, SOME)})" if missing else ""),
            *([] if held_out is None else [f"  held out to measure the loss on: {count(held_out, 'sample')}"]),
            f"  skipped: {len(self.corrupt)}",
            *(f"    {one}" for one in self.corrupt[:SOME]),
        ]
        if len(self.corrupt) > SOME:
            lines.append(f"    and {len(self.corrupt) - SOME} others")
        return DataReport((*lines, *(f"  {one}" for one in self.notes)), bool(missing or self.corrupt or self.notes))

    @staticmethod
    def find(config: TrainConfig, by: By, advance: Callable[[int], None] | None = None) -> Samples:
        """Read the names, captions and sizes of a data set: heads of files only; no image is decoded.

        Args:
            config: where it is.
            by: ``"text"`` or ``"label"``.
            advance: called with the number of samples that have been looked at so far.

        Raises:
            InputError: there is no such folder, no image in it, a listing that cannot be read, no column of the
                configured name, or a label that is no integer.
        """
        folder = Path(config.train_data_dir)
        if not folder.is_dir():
            raise InputError(f"train_data_dir={config.train_data_dir!r} is no folder")
        column = config.caption_column if by == "text" else config.label_column
        wanted = CaptionColumn(by, column, config.multiline_captions)
        if holds_tables(folder):
            return _of_table(TableSearch(TableRows(folder, config), wanted, config, advance))
        search = _Search(folder, wanted, config, AttachedImages(config), advance)
        search.run()
        if not search.good:
            raise InputError(
                f"{config.train_data_dir!r} has no {'image' if config.num_frames is None else 'video'} that can be read"
                + (
                    f" ({search.corrupt[0]})"
                    if search.corrupt
                    else f"; files of {', '.join(search.kinds)} or tars of them are looked for"
                )
                + "".join(f"; {note}" for note in search.notes)
            )
        return Samples(
            good=tuple(search.good),
            corrupt=tuple(search.corrupt),
            notes=tuple(search.notes),
            sources=tuple(sorted(search.sources.items())),
            columns=tuple(search.columns),
            by=by,
        )

    def check(self, config: TrainConfig) -> None:
        """Raise an error if there are no captions (or labels).

        Raises:
            InputError: not one sample has one, and ``allow_missing_captions`` is not set.
        """
        if config.allow_missing_captions or config.proportion_empty_prompts == 1:
            return
        if len(self.without) < len(self.good):
            return
        word = "caption" if self.by == "text" else "label"
        there = f" (columns and keys that are there: {', '.join(self.columns)})" if self.columns else ""
        raise InputError(
            f"none of {count(len(self.good), 'sample')} in {config.train_data_dir!r} has a {word}{there}"
            + "".join(f"; {note}" for note in self.notes)
            + f"; name their column with {word}_column, write files {', '.join(BESIDE[self.by])} beside them, or set "
            "allow_missing_captions: true to train without"
        )


def _of_table(search: TableSearch) -> Samples:
    """The samples of a data set of the ``datasets`` package."""
    search.run()
    if not search.found:
        why = f" ({search.corrupt[0]})" if search.corrupt else ""
        raise InputError(f"{str(search.rows.folder)!r} has no image that can be read{why}")
    return Samples(
        good=tuple(starmap(Sample, search.found)),
        corrupt=tuple(search.corrupt),
        notes=tuple(search.notes),
        sources=tuple(sorted(search.sources.items())),
        columns=tuple(search.rows.data.features),
        by=search.wanted.by,
    )


@dataclass
class _Search:
    """Walks a data set and collects its `Samples`."""

    folder: Path
    wanted: CaptionColumn
    config: TrainConfig
    attached: AttachedImages
    advance: Callable[[int], None] | None = None
    good: list[Sample] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    # Columns of listings and keys of JSON files among which the wanted one was not.
    columns: list[str] = field(default_factory=list)
    # Names, of images of which two sources say different things, and of files that are not read.
    _disputed: dict[str, str] = field(default_factory=dict)
    _unread: list[str] = field(default_factory=list)
    _has_column: bool = False
    # Files of a folder that are to be samples, or why they are left out; and those that belong to others.
    _waiting: list[tuple[str, SidecarContent | str, dict[str, list[str]]]] = field(default_factory=list)
    _belong: set[str] = field(default_factory=set)
    _repeats: FolderRepeats = field(default_factory=FolderRepeats)

    def __post_init__(self) -> None:
        self._inside = DataFolder(self.folder)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Suffixes of the files that are looked for."""
        return IMAGES if self.config.num_frames is None else FILES

    def run(self) -> None:
        files = self._walk()
        tars = [name for name in files if name.lower().endswith(".tar")]
        if tars:
            self._unread += [name for name in files if not name.lower().endswith(".tar")]
            for name in tars:
                self._tar(name)
        else:
            self._loose(files)
        column = self.wanted.column
        by_label = self.wanted.by == "label"
        # Labels have a column by default, and may be in files without columns.
        may_lack = by_label and (self.config.allow_missing_captions or bool(self.sources))
        if column is not None and self.columns and not self._has_column and not may_lack:
            setting = "label_column" if by_label else "caption_column"
            raise InputError(
                f"{setting}={column!r} is not in {self.config.train_data_dir!r}; its columns and keys are "
                f"{', '.join(self.columns)}; name one of them"
            )
        if self.attached.unmasked:
            some = enumerated(self.attached.unmasked, SOME)
            self.notes.append(
                f"without mask, and trained whole: {count(len(self.attached.unmasked), 'sample')} ({some})"
            )
        if self._disputed:
            self.notes.append(
                f"{count(len(self._disputed), 'sample')} of which files say different things: "
                + enumerated((f"{name} ({what})" for name, what in self._disputed.items()), SOME)
            )
        if self._unread:
            self.notes.append(_unread_words(self._unread))

    # --- folders ------------------------------------------------------------------------------------------------

    def _walk(self) -> list[str]:
        found: list[str] = []

        def unreadable(error: OSError) -> None:
            self.corrupt.append(f"the folder {error.filename} cannot be read ({error.strerror})")

        for place, folders, files in self._inside.walk(self.corrupt.append, unreadable):
            below = os.path.relpath(place, self.folder)
            others = [one for one in folders if one.lower() in OTHER_SPLITS] if "train" in folders else []
            for one in others:
                self.notes.append(
                    f"not trained on, as it is beside train: {os.path.normpath(os.path.join(below, one))}/"
                )
            folders[:] = [one for one in folders if _is_shown(one) and one not in others]
            folders[:] = [one for one in folders if not self.attached.holds(os.path.join(place, one))]
            for one in folders:
                if one.lower().endswith(self.kinds):
                    self.corrupt.append(f"{os.path.normpath(os.path.join(below, one))} is a folder, not a file")
            found += [os.path.normpath(os.path.join(below, one)) for one in files if _is_shown(one)]
        return sorted(found)

    def _loose(self, files: list[str]) -> None:
        listings = self._listings(files)
        media = [name for name in files if name.lower().endswith(self.kinds)]
        finder = _Finder(self._inside, files, media)
        # By name: what lines of listings say of it, and where.
        listed: dict[str, list[_Listed]] = {}
        covered: list[str] = []
        for name in listings:
            place = os.path.dirname(name)
            if self._listing(name, place, finder, listed):
                covered.append(place)
            else:
                self.notes.append(f"{name} names no file that is there, and is not read")
        left = [
            name
            for name in media
            if name not in listed
            and name not in self._belong
            and any(not place or name.startswith(place + os.sep) for place in covered)
        ]
        if left:
            names = enumerated(left, SOME)
            self.notes.append(f"in no line of a listing, and left out: {count(len(left), 'file')} ({names})")
        inside = self._belong - set(listed) if covered else set[str]()
        texts = self._texts({*media, *listed} - set(left) - inside, files, listings)
        self._read_names(texts, listed, bool(listings))
        for name in sorted(texts):
            for one in listed.get(name, [_Listed(None, "", {})]):
                self._add(name, one, texts[name], finder)
        self._begin_samples(listed)
        used = {*media, *listed, *listings, *(one for beside in texts.values() for one in beside.values())}
        used |= self._belong
        self._unread += [name for name in files if name not in used]

    def _read_names(self, texts: dict[str, dict[str, str]], listed: Mapping[str, Any], has_listing: bool) -> None:
        """Take masks and the like, without a caption of their own, from the samples; read repeats from folders."""
        names = [name for name in companions(texts) if not texts[name] and name not in listed]
        names = [name for name in names if name not in self._belong]
        for name in names:
            del texts[name]
        self._note_companions(names)
        self._belong.update(names)
        if not has_listing and self.wanted.by == "text":
            self._repeats = FolderRepeats.read(texts)
            self.notes += self._repeats.notes

    def _note_companions(self, names: Sequence[str]) -> None:
        if names:
            self.notes.append(
                f"by their names of other images (masks), and not trained: {count(len(names), 'file')} "
                f"({enumerated(names, SOME)}); to use them, set mask_dir or conditioning_dir to a folder with the "
                "images' names"
            )

    def _begin_samples(self, listed: Mapping[str, Sequence[_Listed]]) -> None:
        """The files that wait, without those that belong to others and have no caption of their own."""
        for name, said, named in self._waiting:
            if isinstance(said, str):
                self.corrupt.append(said)
                continue
            if said.value is None and name in self._belong and name not in listed:
                continue
            parts = {column: [Part(one, self.folder / one) for one in names] for column, names in named.items()}
            self._sample(name, said, Part(name, self.folder / name), parts)

    def _listings(self, files: list[str]) -> list[str]:
        listings = [name for name in files if is_listing(os.path.basename(name))]
        places = [os.path.dirname(name) for name in listings]
        for place in places:
            if places.count(place) > 1:
                both = " and ".join(one for one in listings if os.path.dirname(one) == place)
                raise InputError(f"{self.config.train_data_dir!r} has {both} in one folder; leave one there")
        return listings

    def _texts(self, names: set[str], files: list[str], listings: list[str]) -> dict[str, dict[str, str]]:
        """For every name the files beside it that say something of it, by suffix: ``a.txt`` before ``a.png.txt``."""
        beside: dict[str, dict[str, str]] = {}
        for name in files:
            stem, kind = os.path.splitext(name)
            if kind.lower() in BESIDE[self.wanted.by] and name not in listings:
                beside.setdefault(stem, {})[kind.lower()] = name
        # Other systems compose accents in another way, for the names of some of the files.
        composed = {unicodedata.normalize("NFC", stem): found for stem, found in beside.items()}

        def of(stem: str) -> dict[str, str]:
            return beside.get(stem) or composed.get(unicodedata.normalize("NFC", stem), {})

        return {name: {**of(name), **of(os.path.splitext(name)[0])} for name in names}

    def _listing(self, name: str, place: str, finder: _Finder, listed: dict[str, list[_Listed]]) -> bool:
        """Read a listing into ``listed``; False: it names no file here and may be something else."""
        listing = read_listing(self.folder / name, name)
        column = self.wanted.among(listing.columns)
        self._has_column = self._has_column or column is not None
        if column is None:
            self._note_columns(listing.columns)
        problems = listing.problems
        found: list[tuple[str, _Listed]] = []
        for line in listing.lines:
            try:
                file = finder.find(place, line.file)
            except InputError as error:
                problems.append(f"{error} ({line.where})")
                continue
            if file is None:
                problems.append(f"{line.file} is not there ({line.where})")
                continue
            try:
                value = None if column is None else self.wanted.value(line.row.get(column), line.where)
                named = self.attached.named(line.row, partial(finder.find, place), line.where)
            except InputError as error:
                if self.wanted.by == "label":
                    raise
                # The file is listed, and left out with this reason.
                problems.append(f"{file} is left out: {error}")
                listed.setdefault(file, [])
                continue
            self._belong.update(*named.values())
            found.append((file, _Listed(value, f"{column} in {name}", named)))
        if not found and name.lower().endswith(".json") and len(problems) == len(listing.lines):
            return False
        self.corrupt += problems
        twice = []
        for file, line in found:
            said = listed.setdefault(file, [])
            if any((other.value, other.named) == (line.value, line.named) for other in said):
                self.corrupt.append(f"{file} is in {name} again with the same {self.wanted.by}")
                continue
            if said:
                twice.append(file)
            said.append(line)
        if twice:
            self.notes.append(
                f"with more than one line in {name}, each of which is a sample: "
                f"{count(len(set(twice)), 'file')} ({enumerated(dict.fromkeys(twice), SOME)})"
            )
        return True

    def _add(self, name: str, line: _Listed, texts: dict[str, str], finder: _Finder) -> None:
        """A sample of a folder, from its line in a listing and from files beside it."""
        paths = {kind: (text, _reader(self.folder / text, text)) for kind, text in texts.items()}
        value, source, named = line.value, line.source, line.named
        try:
            said = read_beside(paths, self.wanted)
            if said.row:
                beside = partial(finder.find, os.path.dirname(name))
                named = named or self.attached.named(said.row, beside, texts[".json"])
                self._belong.update(*named.values())
        except InputError as error:
            if self.wanted.by == "label":
                raise
            if value is None:
                self._waiting.append((name, f"{name} is left out: {error}", {}))
                return
            said = SidecarContent()
        if value is not None:
            if said.value is not None and str(said.value).strip() != str(value).strip():
                self._disputed[name] = f"{source}, {said.source}"
            said = SidecarContent(value, source)
        self._waiting.append((name, said, named))

    # --- tars ---------------------------------------------------------------------------------------------------

    def _tar(self, name: str) -> None:
        tar = self.folder / name
        entries: dict[str, dict[str, tarfile.TarInfo]] = {}
        try:
            # Compressed, the members' places in the file would not be known.
            with open_part(tar, name, most=2**63) as file, tarfile.open(fileobj=file, mode="r:") as opened:
                for member in opened:
                    self._member(name, member, entries)
        except (tarfile.TarError, OSError, EOFError, InputError) as error:
            compressed = "" if entries else "; an uncompressed tar is read"
            self.corrupt.append(f"{name} breaks off: {error}{compressed}")
        for key, files in sorted(self._without_companions(name, entries).items()):
            images = [files[kind] for kind in self.kinds if kind in files]
            belong = self._beside(name, files)
            kinds = [kind for kind in files if kind in BESIDE[self.wanted.by]]
            if not images:
                self._unread += [f"{name}:{one.name}" for one in files.values()]
                continue
            used = {images[0].name, *(files[kind].name for kind in kinds)}
            used |= {one.name.rpartition(".tar:")[2] for every in belong.values() for one in every}
            self._unread += [f"{name}:{one.name}" for one in files.values() if one.name not in used]
            texts = {kind: (f"{name}:{files[kind].name}", _member_reader(tar, name, files[kind])) for kind in kinds}
            try:
                said = read_beside(texts, self.wanted)
            except InputError as error:
                if self.wanted.by == "label":
                    raise
                self.corrupt.append(f"{name}:{key} is left out: {error}")
                continue
            part = Part(f"{name}:{images[0].name}", tar, images[0].offset_data, images[0].size)
            self._sample(part.name, said, part, belong)

    def _without_companions(
        self, name: str, entries: dict[str, dict[str, tarfile.TarInfo]]
    ) -> dict[str, dict[str, tarfile.TarInfo]]:
        """The entries of a tar but masks and the like, without a caption of their own."""
        kinds = BESIDE[self.wanted.by]
        others = {os.path.splitext(file)[0] for file in companions(f"{key}.png" for key in entries)}
        others = {key for key in others if not any(kind in entries[key] for kind in kinds)}
        self._note_companions(sorted(f"{name}:{key}" for key in others))
        return {key: files for key, files in entries.items() if key not in others}

    def _beside(self, name: str, files: dict[str, tarfile.TarInfo]) -> dict[str, list[Part]]:
        """Images of a tar's entry that belong to it, by column: ``.mask.png`` for a column ``mask``."""
        found: dict[str, list[Part]] = {}
        for column in self.attached.named_columns:
            for kind, one in sorted(files.items()):
                if kind.rpartition(".")[0] == f".{column.lower()}" and kind.endswith(IMAGES):
                    part = Part(f"{name}:{one.name}", self.folder / name, one.offset_data, one.size)
                    found.setdefault(column, []).append(part)
        return found

    def _member(self, name: str, member: tarfile.TarInfo, entries: dict[str, dict[str, tarfile.TarInfo]]) -> None:
        where, _, file = member.name.rpartition("/")
        if member.isdir() or not all(_is_shown(part) for part in member.name.split("/") if part not in ("", ".")):
            return
        stem, _, kind = file.partition(".")
        if not member.isreg() or member.issparse():
            what = "a link" if member.islnk() or member.issym() else "sparse" if member.issparse() else "no file"
            self.corrupt.append(f"{name}:{member.name} is {what} in the tar, and is left out")
            return
        files = entries.setdefault(f"{where}/{stem}".lstrip("/"), {})
        if f".{kind.lower()}" in files:
            self.corrupt.append(f"{name}:{member.name} is in the tar again, and the last one counts")
        files[f".{kind.lower()}"] = member

    # --- samples ------------------------------------------------------------------------------------------------

    def _sample(self, name: str, said: SidecarContent, part: Part, belong: Mapping[str, Sequence[Part]]) -> None:
        if self.advance is not None:
            self.advance(len(self.good) + len(self.corrupt) + 1)
        try:
            with part.open() as opened:
                size = (image_size if self.config.num_frames is None else frame_size)(opened, name)
            attached = self.attached.of(name, belong, size) if self.attached.any else SampleImages()
        except InputError as error:
            self.corrupt.append(str(error))
            return
        self._note_columns(said.columns)
        if said.others:
            self._disputed[name] = ", ".join((said.source, *said.others))
        if said.source.endswith(" in .json"):
            self._has_column = True
        if _nothing(said.value) and self.wanted.by == "text":
            said = self._default_caption(name) or said
        if said.value is not None:
            self.sources[said.source] += 1
        self.good.append(Sample(name, said.value, size, part, attached, repeats=self._repeats.of(name)))

    def _default_caption(self, name: str) -> SidecarContent | None:
        if self.config.instance_prompt is not None:
            return SidecarContent(self.config.instance_prompt, "instance_prompt")
        words = self._repeats.caption(name)
        return None if words is None else SidecarContent(words, "folder names")

    def _note_columns(self, columns: Iterable[str]) -> None:
        for one in columns:
            if one not in self.columns and len(self.columns) < 16:
                self.columns.append(one)


@dataclass(frozen=True)
class _Listed:
    """The entry of a listing for a file: caption or label, where, and images that belong to it by column."""

    value: Words
    source: str
    named: dict[str, list[str]]


class _Finder:
    """Files of a data set by their names in a listing."""

    def __init__(self, inside: DataFolder, files: list[str], media: list[str]) -> None:
        self._inside, self._folder, self._files = inside, inside.path, set(files)
        # Names that differ in how accents are composed only; and names without suffix.
        self._composed = {unicodedata.normalize("NFC", name): name for name in files}
        self._stems: dict[str, list[str]] = {}
        for name in media:
            self._stems.setdefault(os.path.splitext(name)[0], []).append(name)

    def find(self, place: str, file: str) -> str | None:
        """The name relative to the data set's folder; None: there is no such file."""
        tries = [file] if "\\" not in file else [file, file.replace("\\", "/")]
        for one in tries:
            if os.path.isabs(one):
                one = os.path.relpath(one, os.path.abspath(self._folder))
            else:
                one = os.path.join(place, one)
            name = os.path.normpath(one)
            if name.split(os.sep)[0] == ".." or os.path.isabs(name):
                raise InputError(f"{file!r} is outside of {str(self._folder)!r}, and is left out")
            if name in self._files:
                return name
            composed = self._composed.get(unicodedata.normalize("NFC", name))
            if composed is not None:
                return composed
            if len(self._stems.get(name, ())) == 1:
                return self._stems[name][0]
            if "\0" not in name and os.path.lexists(self._folder / name):
                self._inside.check(name, repr(file))
                return name
        return None


def _reader(path: Path, name: str) -> Callable[[], bytes]:
    # An empty file is an empty caption.
    return lambda: b"" if path.is_file() and not path.stat().st_size else read_whole(path, name, MOST_BESIDE)


def _member_reader(tar: Path, name: str, member: tarfile.TarInfo) -> Callable[[], bytes]:
    def read() -> bytes:
        if not member.size:
            return b""
        with open_part(tar, f"{name}:{member.name}", member.offset_data, member.size) as file:
            return file.read()

    return read


def _unread_words(names: Sequence[str]) -> str:
    kinds = Counter(_suffixes(name) for name in names)
    way = "; unpack archives, or write plain tars" if kinds.keys() & set(ARCHIVES) else ""
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8))
    return f"files that are not read: {found} ({enumerated(names, SOME)}){way}"


def _suffixes(name: str) -> str:
    file = os.path.basename(name).rpartition(":")[2]
    return file[file.index(".") :].lower()[-12:] if "." in file else "without suffix"


def _is_shown(name: str) -> bool:
    """True if a file or folder is not hidden, nor one of those that macOS and network drives add."""
    return not name.startswith(".") and name not in ("__MACOSX", "@eaDir")


def _nothing(said: Any) -> bool:
    return said is None or (isinstance(said, str) and not said.strip())


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
