"""Results and input images as files in the server's folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from ...core.files import written_whole
from ..errors import NoSpace, StorageError
from ..settings import ServiceSettings
from .storage import storage_error

RESULTS, INPUTS = "results", "inputs"

# First bytes of files, file extensions, and media types.
FILE_KINDS = (
    (0, b"\x89PNG", "png", "image/png"),
    (0, b"\xff\xd8\xff", "jpg", "image/jpeg"),
    (8, b"WEBP", "webp", "image/webp"),
    (4, b"ftyp", "mp4", "video/mp4"),
    (0, b"GIF8", "gif", "image/gif"),
)
MEDIA = {suffix: media for *_, suffix, media in FILE_KINDS}
OTHER = "application/octet-stream"


class ResultFiles:
    """Files of jobs, ``results/<job>/<picture>.<kind>``, and input images, ``inputs/<SHA-256>``.

    A file is on disk, whole and under its name, when the method that writes it returns. Any thread may call.

    Attributes:
        bytes: of all files.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: ServiceSettings | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Scan the folder, and remove unfinished files.

        Args:
            folder: of the server, which no other program uses.
            settings: bytes of all files and of the disk's reserve, and for how long unused inputs are kept.
            now: seconds since 1970.

        Raises:
            StorageError: the folders cannot be made.
        """
        settings = settings or ServiceSettings()
        self._results, self._inputs = Path(folder) / RESULTS, Path(folder) / INPUTS
        self._keep, self._most, self._reserve = settings.keep, int(settings.max_disk), settings.reserve
        self._now = now
        self._lock = threading.Lock()
        try:
            for parent in (self._results, self._inputs):
                parent.mkdir(parents=True, exist_ok=True)
            self.bytes = self._input_bytes = 0
            for path in (*self._results.glob("*/*"), *self._inputs.glob("*"), *self._results.glob(".*")):
                if path.name.endswith(".tmp"):
                    path.unlink()
                elif path.is_file():
                    self._count(path, path.stat().st_size)
        except OSError as error:
            raise _failed(f"cannot use folder {str(folder)!r}", error) from None

    @property
    def over(self) -> int:
        """Bytes beyond the limit."""
        return max(0, self.bytes - self._most)

    def check_space(self) -> None:
        """Reject a file that would not fit on the disk.

        Raises:
            NoSpace: the disk is nearly full.
        """
        free = shutil.disk_usage(self._results).free
        if free < self._reserve:
            raise NoSpace(f"the server's disk has {free >> 20} MiB left; ask again when room has been made")

    def write(self, job: str, picture: int, data: bytes) -> str:
        """Write a result; the file's name.

        Raises:
            StorageError: it cannot be written; `NoSpace`: as the disk is full.
        """
        kind = next((kind for at, mark, kind, _ in FILE_KINDS if data[at : at + len(mark)] == mark), "bin")
        path = self._results / job / f"{picture}.{kind}"
        try:
            path.parent.mkdir(exist_ok=True)
            self._write(path, data)
        except OSError as error:
            raise _failed(f"cannot write {path}", error) from error
        return path.name

    def path(self, job: str, file: str) -> tuple[Path, str]:
        """The path of a result, and its media type."""
        return self._results / job / file, MEDIA.get(file.rpartition(".")[2], OTHER)

    def remove(self, job: str, file: str | None = None) -> None:
        """Remove a result, or all results of a job; a missing file is not an error."""
        folder = self._results / job
        for path in [folder / file] if file is not None else [*folder.glob("*")]:
            self._unlink(path)
        # Unless there are others.
        with contextlib.suppress(OSError):
            folder.rmdir()

    def put_input(self, data: bytes) -> str:
        """Store an input image; returns its digest.

        Raises:
            StorageError: it cannot be written; `NoSpace`: there is no room for it.
        """
        digest = hashlib.sha256(data).hexdigest()
        path = self._inputs / digest
        try:
            if path.exists():
                # Update its time.
                os.utime(path, (self._now(), self._now()))
                return digest
            self.check_space()
            if self._input_bytes + len(data) > self._most // 2:
                # Old results are deleted for inputs, but only up to a share.
                raise NoSpace(f"the server keeps {self._most >> 21} MiB of input images at most; retry later")
            self._write(path, data)
            os.utime(path, (self._now(), self._now()))
        except OSError as error:
            raise _failed(f"cannot write {path}", error) from error
        return digest

    def input(self, digest: str) -> Path | None:
        """The path of an input image, if it exists."""
        path = self._inputs / digest
        return path if path.is_file() else None

    def remove_input(self, digest: str) -> None:
        """Remove an input image; a missing file is not an error."""
        self._unlink(self._inputs / digest)

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._count(path, -size)

    def sweep(self, jobs: Collection[str], inputs: Collection[str]) -> None:
        """Remove the results of removed jobs, and inputs that no job needs, after their time."""
        for folder in self._results.iterdir():
            if folder.name not in jobs:
                self.remove(folder.name)
        for path in self._inputs.iterdir():
            with contextlib.suppress(OSError):
                if path.name not in inputs and path.stat().st_mtime <= self._now() - self._keep:
                    self.remove_input(path.name)

    def _write(self, path: Path, data: bytes) -> None:
        before = path.stat().st_size if path.exists() else 0
        with written_whole(path) as temporary, temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _sync(path.parent)
        _sync(path.parent.parent)
        self._count(path, len(data) - before)

    def _count(self, path: Path, more: int) -> None:
        with self._lock:
            self.bytes += more
            if path.parent == self._inputs:
                self._input_bytes += more


def _failed(what: str, error: OSError) -> StorageError:
    found = storage_error(what, error)
    assert found is not None
    return found


def _sync(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
