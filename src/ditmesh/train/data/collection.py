"""The samples of a data set while they are read, with the reasons for everything that is left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ...errors import InputError
from ...media.images import IMAGE_SUFFIXES as IMAGES
from ...media.images import image_size
from ...media.videos import VIDEO_SUFFIXES as VIDEOS
from ...media.videos import frame_size
from ...report.formatting import count, enumerated
from ..settings import DataConfig
from .attached import AttachedImages, Part
from .captions import By, CaptionColumn, SampleWords, triggered
from .files import files_in
from .samples import SOME, Sample, Samples, is_nothing

# Folders beside one that is called train, which are not trained on.
OTHER_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
# Columns in a sentence.
MOST_COLUMNS = 16


@dataclass
class Collection:
    """The samples of a data set while they are read.

    Attributes:
        columns: of listings and tables, among which the wanted one was not.
        unread: names of files that nothing is made of.
    """

    config: DataConfig
    by: By
    advance: Callable[[int], None] | None = None
    good: list[Sample] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    columns: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = Path(self.config.train_data_dir)
        self.wanted = CaptionColumn(self.by, self.config.caption_column)
        self.attached = AttachedImages(self.config)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Suffixes of the files that are looked for; animated images are videos too."""
        return IMAGES if self.config.num_frames is None else (*IMAGES, *VIDEOS)

    def files(self) -> list[str]:
        """Names of the files that may be of the data set."""

        def unreadable(error: OSError) -> None:
            self.corrupt.append(f"the folder {error.filename} cannot be read ({error.strerror})")

        def choose(place: str, folders: list[str]) -> list[str]:
            below = os.path.relpath(place, self.folder)
            others = [name for name in folders if name.lower() in OTHER_SPLITS] if "train" in folders else []
            folders = [name for name in folders if not self.attached.holds(os.path.join(place, name))]
            for name in folders:
                path = os.path.normpath(os.path.join(below, name))
                if name in others:
                    self.notes.append(f"not trained on, as it is beside train: {path}/")
                elif name.lower().endswith(self.kinds):
                    self.corrupt.append(f"{path} is a folder, not a file")
            return [name for name in folders if name not in others]

        return files_in(self.folder, unreadable, choose)

    def add(
        self,
        name: str,
        words: SampleWords,
        part: Part,
        reference: Part | None = None,
        opened: BinaryIO | None = None,
    ) -> None:
        """Add a sample, or the reason for which it is none; ``opened``: its bytes, where they are read already."""
        if self.advance is not None:
            self.advance(len(self.good) + len(self.corrupt) + 1)
        try:
            with part.open() if opened is None else opened as file:
                size = (image_size if self.config.num_frames is None else frame_size)(file, name)
            attached = self.attached.of(name, reference, size)
        except InputError as error:
            self.leave_out(name, error)
            return
        if is_nothing(words.words) and self.by == "text" and self.config.instance_prompt is not None:
            words = SampleWords(self.config.instance_prompt, "instance_prompt")
        if words.words is not None:
            self.sources[words.source] += 1
        worded = triggered(words.words, self.config.trigger_word)
        self.good.append(Sample(name, worded, size, part, attached))

    def leave_out(self, name: str, error: InputError) -> None:
        """Note that a sample cannot be trained."""
        sentence = str(error)
        self.corrupt.append(sentence if sentence.startswith(name) else f"{name} is left out: {sentence}")

    def note_columns(self, columns: Iterable[str]) -> None:
        """Note columns among which the wanted one is not."""
        self.columns += [column for column in columns if column not in self.columns][: MOST_COLUMNS - len(self.columns)]

    def note_companions(self, names: Sequence[str]) -> None:
        """Note images that belong to others by their names."""
        if names:
            self.notes.append(
                f"by their names of other images (masks), and not trained: {count(len(names), 'file')} "
                f"({enumerated(names, SOME)}); to use them, set mask_dir or conditioning_dir to a folder with the "
                "images' names"
            )

    def samples(self) -> Samples:
        """The samples. Raises `InputError` if there are none, or the configured column is in no file."""
        self._check_column()
        unmasked = self.attached.unmasked
        if unmasked:
            some = enumerated(unmasked, SOME)
            self.notes.append(f"without mask, and trained whole: {count(len(unmasked), 'sample')} ({some})")
        if self.unread:
            kinds = Counter(os.path.splitext(name)[1].lower() or "without suffix" for name in self.unread)
            numbers = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(8))
            self.notes.append(f"files that are not read: {numbers} ({enumerated(self.unread, SOME)})")
        if not self.good:
            looked_for = f"; files of {', '.join(self.kinds)} are looked for"
            raise InputError(
                f"{self.config.train_data_dir!r} has no {'image' if self.config.num_frames is None else 'video'} that "
                f"can be read{f' ({self.corrupt[0]})' if self.corrupt else looked_for}"
                + "".join(f"; {note}" for note in self.notes)
            )
        good, sources = tuple(self.good), tuple(sorted(self.sources.items()))
        return Samples(good, tuple(self.corrupt), tuple(self.notes), sources, tuple(self.columns), self.by)

    def _check_column(self) -> None:
        column = self.wanted.column
        if column is None or not self.columns:
            return
        if not any(source.startswith(f"{column} in ") for source in self.sources):
            raise InputError(
                f"caption_column={column!r} is not in {self.config.train_data_dir!r}; its columns are "
                f"{', '.join(self.columns)}; name one of them"
            )
