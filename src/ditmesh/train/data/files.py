"""Names of a data set's files: all that are in its folder, and those that belong to other images."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ...errors import InputError

# Names of folders, and ends of names of files, of images that belong to the image of the same name.
COMPANION_FOLDERS = ("mask", "masks", "control", "conditioning", "conditioning_images")
COMPANION_ENDS = ("-mask", "_mask", ".mask")
# Ends of names that are given to nothing else.
COMPANION_LABELS = ("-masklabel", "-condlabel")


def files_in(
    folder: Path,
    unreadable: Callable[[OSError], None] | None = None,
    choose: Callable[[str, list[str]], list[str]] | None = None,
) -> list[str]:
    """Sorted names of all files, relative to the folder, but hidden ones; links are followed.

    Args:
        unreadable: called with the error of a folder that cannot be read.
        choose: those of a folder's folders that are looked into.
    """
    names: list[str] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=unreadable):
        # A link may lead back.
        where = os.stat(place)
        if (where.st_dev, where.st_ino) in seen:
            folders.clear()
            continue
        seen.add((where.st_dev, where.st_ino))
        for entries in (folders, files):
            # Beside hidden ones, those that macOS and network drives add.
            shown = (name for name in entries if not name.startswith(".") and name not in ("__MACOSX", "@eaDir"))
            entries[:] = sorted(shown)
        if choose is not None:
            folders[:] = choose(place, folders)
        below = os.path.relpath(place, folder)
        names += [os.path.normpath(os.path.join(below, name)) for name in files]
    return sorted(names)


def name_inside(folder: Path, name: str, place: str = "") -> str:
    """A name of a table or listing, relative to the data set's folder; its own place there is ``place``.

    Raises `InputError`: it leads out of the folder: a stranger's data set could name any file of this machine.
    """
    above = os.path.abspath(folder)
    path = os.path.relpath(name, above) if os.path.isabs(name) else os.path.normpath(os.path.join(place, name))
    if path.split(os.sep)[0] == ".." or os.path.isabs(path):
        raise InputError(f"{name!r} is outside of {str(folder)!r}, and is left out; use a copy inside of it")
    return path


def repeating_folders(names: Iterable[str]) -> list[str]:
    """Folders right below the data folder that are named as kohya's trainers read them: ``10_sks dog``, ten times."""
    folders = sorted({name.partition(os.sep)[0] for name in names if os.sep in name})
    return [folder for folder in folders if re.fullmatch(r"[1-9]\d{0,2}_.+", folder)]


def companions(names: Iterable[str]) -> list[str]:
    """Files that belong to another image by their name: ``masks/a.png`` and ``a-masklabel.png`` to ``a.png``."""
    stems = {name: os.path.splitext(name)[0] for name in names}
    folders = {stem: os.path.basename(os.path.dirname(stem)).lower() for stem in stems.values()}
    in_folders = {stem for stem, folder in folders.items() if folder in COMPANION_FOLDERS}
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
