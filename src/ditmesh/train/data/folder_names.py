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
        found = {folder: re.fullmatch(r"([1-9]\d*)_(.+)", folder) for folder in folders}
        repeats = {folder: int(match[1]) for folder, match in found.items() if match and len(match[1]) < 5}
        repeats = {folder: count for folder, count in repeats.items() if count <= MAX_REPEATS}
        if not repeats:
            return FolderRepeats()
        if len(repeats) < len(folders):
            other = next(folder for folder in folders if folder not in repeats)
            return FolderRepeats(
                notes=(
                    f"{min(repeats)}/ counts once, and its name is no caption: other images are in "
                    f"{other + '/' if other else 'the data folder itself'}; set weights with train_data",
                )
            )
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
    names = list(names)
    stems = {os.path.splitext(name)[0] for name in names}
    # Also of images/a.png and masks/a.png.
    beside: dict[tuple[str, str], set[str]] = {}
    for stem in stems:
        folder, file = os.path.split(stem)
        beside.setdefault((os.path.dirname(folder), file), set()).add(os.path.basename(folder).lower())
    found = []
    for name in names:
        stem = os.path.splitext(name)[0]
        folder, file = os.path.split(stem)
        above, last = os.path.dirname(folder), os.path.basename(folder).lower()
        is_companion = any(stem.lower().endswith(end) and stem[: -len(end)] in stems for end in COMPANION_ENDS)
        is_companion |= stem.lower().endswith(COMPANION_LABELS)
        if last in COMPANION_FOLDERS:
            is_companion |= os.path.join(above, file) in stems
            is_companion |= bool(beside[above, file].difference(COMPANION_FOLDERS, [""] if not above else []))
        if is_companion:
            found.append(name)
    return found
