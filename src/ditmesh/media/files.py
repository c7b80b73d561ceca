"""Safe opening of untrusted files: regular files or parts of them, up to a size limit."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError, reason_of

# Bytes of an image or video, at most.
MAX_FILE_BYTES = 2**30
# Bytes read at a time where little is asked for: heads of images are short.
_BUFFER = 4096


def open_part(path: str | Path, name: str, offset: int = 0, length: int = -1, most: int = MAX_FILE_BYTES) -> BinaryIO:
    """A regular file, or ``length`` bytes of it from ``offset`` on, for reading and seeking; nothing is read yet.

    Args:
        path: the file. A link is followed.
        name: of it, for messages.
        offset, length: of the part, in bytes; a length of -1 is the rest of the file.
        most: bytes of the part, at most.

    Raises:
        InputError: it cannot be opened, is no regular file (a folder, a pipe, a device), is empty, or is larger.
    """
    try:
        # A pipe without a writer would wait in `open`, and a device may do something when it is opened.
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise InputError(f"{name} is {_kind(mode)}, not a file")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except InputError:
        raise
    except (OSError, ValueError) as error:
        if os.path.islink(path) and not os.path.exists(path):
            raise InputError(f"{name} is a link to a file that is not there") from None
        raise InputError(f"cannot read {name} ({reason_of(error)})") from None
    file = os.fdopen(descriptor, "rb", buffering=0)
    status = os.fstat(descriptor)
    size = max(0, status.st_size - offset)
    if length >= 0 and size < length:
        file.close()
        raise InputError(f"{name} breaks off after {size} of {length} bytes")
    size = size if length < 0 else length
    if not stat.S_ISREG(status.st_mode) or not size or size > most:
        file.close()
        wrong = "is not a file" if not stat.S_ISREG(status.st_mode) else "is empty" if not size else ""
        raise InputError(f"{name} {wrong or f'has {size} bytes, more than {most}; give a smaller one'}")
    return io.BufferedReader(_Part(file, offset, size), _BUFFER)


def read_whole(path: str | Path, name: str, most: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a regular file. Raises as `open_part` does."""
    with open_part(path, name, most=most) as file:
        try:
            return file.read()
        except OSError as error:
            raise InputError(f"cannot read {name} ({reason_of(error)})") from None


def _kind(mode: int) -> str:
    kinds = (("a folder", stat.S_ISDIR), ("a pipe", stat.S_ISFIFO), ("a socket", stat.S_ISSOCK))
    return next((words for words, fits in kinds if fits(mode)), "a device")


class _Part(io.RawIOBase):
    """Bytes ``begin`` to ``begin + size`` of a file, which is closed with it."""

    def __init__(self, file: io.FileIO, begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._place = file, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), max(0, self._size - self._place))
        if not wanted:
            return 0
        self._file.seek(self._begin + self._place)
        count = self._file.readinto(memoryview(buffer)[:wanted]) or 0
        self._place += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        if place < 0:
            raise OSError(22, "Invalid argument")
        self._place = place
        return place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        self._file.close()
        super().close()
