"""Results and input images as files in the server's folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from ...core.files import written_whole
from ..errors import NoSpace
from ..settings import ServiceSettings
from .storage import storage_error

RESULTS = "results"

# Media types by file extension.
MEDIA = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4"}


class ResultFiles:
    """Files of jobs: results, ``results/<job>/<image>[.part<k>].<format>``, and input images, ``<SHA-256>.png`` there.

    A file is on disk, whole and under its name, when the method that writes it returns. Any thread may call.

    Attributes:
        bytes: of all files.
    """

    def __init__(self, folder: str | Path, settings: ServiceSettings | None = None) -> None:
        """Scan the server's folder, and remove unfinished files. Raises `StorageError`: it cannot be made."""
        settings = settings or ServiceSettings()
        self._results = Path(folder) / RESULTS
        self._most, self._reserve = int(settings.max_disk), settings.reserve
        self._lock = threading.Lock()
        try:
            self._results.mkdir(parents=True, exist_ok=True)
            self.bytes = 0
            for path in (*self._results.glob("*/*"), *self._results.glob(".*")):
                if path.name.endswith(".tmp"):
                    path.unlink()
                elif path.is_file():
                    self.bytes += path.stat().st_size
        except OSError as error:
            raise storage_error(f"cannot use folder {str(folder)!r}", error) from None

    @property
    def over(self) -> int:
        """Bytes beyond the limit."""
        return max(0, self.bytes - self._most)

    def check_space(self) -> None:
        """Reject a file that would not fit on the disk. Raises `NoSpace`."""
        free = shutil.disk_usage(self._results).free
        if free < self._reserve:
            raise NoSpace(f"the server's disk has {free >> 20} MiB left; ask again when room has been made")

    def write(self, job: str, file: str, data: bytes) -> str:
        """Write a result under a name such as ``"0.png"``, which is returned.

        Raises:
            StorageError: it cannot be written; `NoSpace`: as the disk is full.
        """
        path = self._results / job / file
        try:
            path.parent.mkdir(exist_ok=True)
            self._write(path, data)
        except OSError as error:
            raise storage_error(f"cannot write {path}", error) from error
        return file

    def path(self, job: str, file: str) -> tuple[Path, str]:
        """The path of a result, and its media type."""
        return self._results / job / file, MEDIA[file.rpartition(".")[2]]

    def remove(self, job: str, file: str | None = None) -> None:
        """Remove a result, or all results of a job; a missing file is not an error."""
        folder = self._results / job
        for path in [folder / file] if file is not None else [*folder.glob("*")]:
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                path.unlink()
                self._count(-size)
        # Unless there are others.
        with contextlib.suppress(OSError):
            folder.rmdir()

    def sweep(self, jobs: Collection[str]) -> None:
        """Remove the files of removed jobs."""
        for folder in self._results.iterdir():
            if folder.name not in jobs:
                self.remove(folder.name)

    def _write(self, path: Path, data: bytes) -> None:
        before = path.stat().st_size if path.exists() else 0
        with written_whole(path) as temporary, temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _sync(path.parent)
        _sync(path.parent.parent)
        self._count(len(data) - before)

    def _count(self, more: int) -> None:
        with self._lock:
            self.bytes += more


def _sync(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
