"""Safe opening of untrusted files: regular files, up to a size limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError, reason_of

# Bytes of an image or video, at most.
MAX_FILE_BYTES = 2**30
# Bytes read at a time where little is asked for: heads of images are short.
_BUFFER = 4096


def open_file(path: str | Path, name: str, most: int = MAX_FILE_BYTES) -> BinaryIO:
    """A regular file of at most ``most`` bytes, for reading and seeking; a link is followed. Nothing is read yet.

    `InputError`: it cannot be opened, is no regular file (a folder, a pipe, a device), is empty, or is larger.
    """
    try:
        # A pipe without a writer would wait in `open`, and a device may do something when it is opened.
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kinds = (("a folder", stat.S_ISDIR), ("a pipe", stat.S_ISFIFO), ("a socket", stat.S_ISSOCK))
            kind = next((words for words, fits in kinds if fits(mode)), "a device")
            raise InputError(f"{name} is {kind}, not a file")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except InputError:
        raise
    except (OSError, ValueError) as error:
        if os.path.islink(path) and not os.path.exists(path):
            raise InputError(f"{name} is a link to a file that is not there") from None
        raise InputError(f"cannot read {name} ({reason_of(error)})") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= most:
        os.close(descriptor)
        wrong = (
            "is empty" if not status.st_size else f"has {status.st_size} bytes, more than {most}; give a smaller one"
        )
        raise InputError(f"{name} {wrong if stat.S_ISREG(status.st_mode) else 'is not a file'}")
    return os.fdopen(descriptor, "rb", _BUFFER)


def read_whole(path: str | Path, name: str, most: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a regular file. Raises as `open_file` does."""
    with open_file(path, name, most) as file:
        try:
            return file.read(most)
        except OSError as error:
            raise InputError(f"cannot read {name} ({reason_of(error)})") from None
