"""What names of folders and files say of a data set without a listing: repeats, captions, masks of other images.

kohya's trainers read a folder ``10_sks dog`` ten times in an epoch, with its words as the caption of those without.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# Larger numbers, and those with a leading zero, number folders (2024_photos, 01_first).
MAX_REPEATS = 1000
# Names of folders, and ends of names of files, of images that belong to the image of the same name.
COMPANION_FOLDERS = ("mask", "masks", "control", "conditioning", "conditioning_images")
COMPANION_ENDS = ("-mask", "_mask", ".mask")
# Ends of names that are given to nothing else.
COMPANION_LABELS = ("-masklabel", "-condlabel")


@dataclass(frozen=True)
class FolderRepeats:
    """The folders of a data set that say how often an epoch has their images.

    Attributes:
        repeats: by folder.
        notes: sentences about it.
    """

    repeats: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @staticmethod
    def read(names: Iterable[str]) -> FolderRepeats:
        """The repeats of folders right below the data folder, if all images are in folders that are named so."""
        folders = sorted({name.partition(os.sep)[0] if os.sep in name else "" for name in names})
        matches = {folder: re.fullmatch(r"([1-9]\d{0,3})_(.+)", folder) for folder in folders}
        repeats = {folder: int(match[1]) for folder, match in matches.items() if match and int(match[1]) <= MAX_REPEATS}
        if not repeats:
            return FolderRepeats()
        if len(repeats) < len(folders):
            other = next(folder for folder in folders if folder not in repeats)
            place = f"{other}/" if other else "the data folder itself"
            sentence = f"{min(repeats)}/ counts once, and its name is no caption: other images are in {place}"
            return FolderRepeats(notes=(f"{sentence}; set weights with train_data",))
        times = ", ".join(f"{folder}/ {count}" for folder, count in repeats.items())
        return FolderRepeats(repeats, (f"times in an epoch, by the names of folders: {times}",))

    def of(self, name: str) -> int:
        """The times that an epoch has a file."""
        return self.repeats.get(name.partition(os.sep)[0], 1)

    def caption(self, name: str) -> str | None:
        """The words of a file's folder; None: it has no repeats."""
        folder = name.partition(os.sep)[0]
        return folder.partition("_")[2] if folder in self.repeats else None


def companions(names: Iterable[str]) -> list[str]:
    """Files that belong to another image by their name: ``masks/a.png`` and ``a-masklabel.png`` to ``a.png``."""
    stems = {name: os.path.splitext(name)[0] for name in names}
    in_folders = {stem for stem in stems.values() if _last_folder(stem) in COMPANION_FOLDERS}
    # Also of images/a.png and masks/a.png.
    others = {os.path.basename(stem) for stem in stems.values() if stem not in in_folders}
    images = set(stems.values())
    return [
        name
        for name, stem in stems.items()
        if stem.lower().endswith(COMPANION_LABELS)
        or any(stem.lower().endswith(end) and stem[: -len(end)] in images for end in COMPANION_ENDS)
        or (stem in in_folders and os.path.basename(stem) in others)
    ]


def _last_folder(stem: str) -> str:
    return os.path.basename(os.path.dirname(stem)).lower()
