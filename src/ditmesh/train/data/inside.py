"""Files of a data set, none of which lies outside its folder.

Tables, listings and links of a stranger's data set can name any file of this machine, which would be trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import InputError


class DataFolder:
    """A data set's folder, which decides by resolved paths what lies in it.

    Args:
        folder: as it was given; it may be a link itself.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        place = Path(os.path.realpath(folder))
        self._roots = (place, *_blobs(place))

    def check(self, path: str | Path, name: str) -> Path:
        """A path that lies in the folder, links followed.

        Args:
            path: relative to the folder, or absolute.
            name: of what names it, for messages.

        Raises:
            InputError: it lies outside; names where.
        """
        path = self.path / path
        try:
            place = Path(os.path.realpath(path))
        except ValueError:
            # A name with NUL characters, which reading it reports.
            return path
        if not any(place.is_relative_to(root) for root in self._roots):
            raise InputError(
                f"{name} leads to {str(place)[:200]!r}, outside of the data folder {str(self.path)!r}, and is left "
                "out; use a copy inside of it"
            )
        return path

    def files(
        self,
        outside: Callable[[str], None],
        unreadable: Callable[[OSError], None] | None = None,
        choose: Callable[[str, list[str]], list[str]] | None = None,
    ) -> list[str]:
        """Sorted names of all files, relative to the folder, but hidden ones; links inside of it are followed.

        Args:
            outside: called with a sentence for every link that leaves the folder, which is left out.
            unreadable: called with the error of a folder that cannot be read.
            choose: those of a folder's folders that are looked into.
        """
        names: list[str] = []
        seen: set[tuple[int, int]] = set()
        for place, folders, files in os.walk(self.path, followlinks=True, onerror=unreadable):
            # A link may lead back.
            where = os.stat(place)
            if (where.st_dev, where.st_ino) in seen:
                folders.clear()
                continue
            seen.add((where.st_dev, where.st_ino))
            for entries in (folders, files):
                entries[:] = sorted(
                    name for name in entries if is_shown(name) and self._is_inside(os.path.join(place, name), outside)
                )
            if choose is not None:
                folders[:] = choose(place, folders)
            below = os.path.relpath(place, self.path)
            names += [os.path.normpath(os.path.join(below, name)) for name in files]
        return sorted(names)

    def _is_inside(self, path: str, outside: Callable[[str], None]) -> bool:
        if not os.path.islink(path):
            return True
        name = os.path.relpath(path, self.path)
        try:
            self.check(os.path.abspath(path), f"the link {name}")
        except InputError as error:
            outside(str(error))
            return False
        return True


def _blobs(folder: Path) -> Iterator[Path]:
    """Where the hub's cache keeps the files of a snapshot, which are links."""
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots" and (above.parent.parent / "blobs").is_dir():
            yield above.parent.parent / "blobs"


def is_shown(name: str) -> bool:
    """True if a file or folder is not hidden, nor one of those that macOS and network drives add."""
    return not name.startswith(".") and name not in ("__MACOSX", "@eaDir")
