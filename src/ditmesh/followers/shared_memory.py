"""Memory for tensors that processes of this machine map: one process fills it, and all see the same pages."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..core.alignment import rounded_up
from ..core.values import as_bytes


class Place(NamedTuple):
    """The place where other processes find a file.

    Attributes:
        process: that has it open; 0: it has a name.
        file: its number there, or its path.
        size: in bytes.
        state: of a file with a name, by which it is known again.
    """

    process: int
    file: int | str
    size: int
    state: tuple[int, ...] = ()


class MemoryFile:
    """A file in memory that its owner fills from its beginning; others have private views of it."""

    def __init__(self, files: ExitStack, size: int) -> None:
        """Make it, of a size in bytes. ``files`` closes it for processes that have not opened it."""
        if hasattr(os, "memfd_create"):
            self._number = os.memfd_create("ditmesh-copy", os.MFD_CLOEXEC)
            files.callback(os.close, self._number)
            self._file: int | str = self._number
        else:
            named = files.enter_context(tempfile.NamedTemporaryFile(prefix="ditmesh-copy-"))  # noqa: SIM115
            self._number, self._file = named.fileno(), named.name
        self._used, self._size = 0, max(1, size)
        os.ftruncate(self._number, self._size)

    @property
    def place(self) -> Place:
        """The place where other processes find it."""
        return Place(os.getpid(), self._file, self._size)

    def put(self, values: Tensor) -> int:
        """Append a copy of a tensor; returns where it begins."""
        start, end = self._used, self._used + values.nbytes
        if end > self._size:
            raise ValueError(f"{end - start} bytes do not fit behind {start} of {self._size}")
        self._used = rounded_up(end)
        content = as_bytes(values.resolve_conj().resolve_neg().contiguous().view(-1)).cpu().numpy()
        # Twice as fast as into a mapping, of which each page costs a fault.
        left, place = memoryview(cast(Any, content)), start
        while left:
            count = os.pwrite(self._number, left, place)
            left, place = left[count:], place + count
        return start


def map_place(place: Place) -> Tensor:
    """A private view of a file or a `MemoryFile`: (size,) uint8, unmapped with its last user; `OSError`: changed."""
    path = place.file if isinstance(place.file, str) else f"/proc/{place.process}/fd/{place.file}"
    number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        if place.state and file_state(number) != place.state:
            raise OSError(f"{str(place.file)!r} has changed meanwhile")
        # A process keeps the pages that it writes to; the rest is shared among all that have opened it.
        return torch.frombuffer(mmap.mmap(number, place.size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(number)


def file_state(file: int | str) -> tuple[int, ...]:
    """A value by which a file is known to be the same as before."""
    about = os.stat(file)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
