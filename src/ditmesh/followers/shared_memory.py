"""Memory for tensors that processes of this machine map: one process fills it, and all see the same pages.

Or the tensors are pages of a file already, the same bytes in every process that maps it.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..core.alignment import rounded_up
from ..core.values import as_bytes

# Of a mapping of a file: its addresses, the first byte in the file, the file's number and path, and the pages that are
# the process's own, as it has written to them. Memory of the process has 0 for the number.
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ ([1-9]\d*) +(/[^\n]*)\n"
    rb"(?:[A-Z]\w*:[^\n]*\n)*?Anonymous: +(\d+) kB\n(?:[A-Z]\w*:[^\n]*\n)*?Swap: +(\d+) kB\n",
    re.MULTILINE,
)


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


def files_of(tensors: Iterable[Tensor]) -> list[tuple[str, int] | None]:
    """The file that each tensor is pages of, and its first byte in there.

    None: it is memory of this process, or this process may have written to a page of the mapping (which gives it a page
    of its own), or the file has another name by now, or the system does not say.
    """
    tensors = list(tensors)
    places: list[tuple[str, int] | None] = [None] * len(tensors)
    with suppress(OSError, ValueError):
        # One expression for all: a rank has hundreds of mappings with two dozen lines each.
        mappings = sorted(
            (int(first, 16), int(end, 16), int(offset, 16), os.fsdecode(path))
            for first, end, offset, file, path, own, swapped in _MAPPING.findall(Path("/proc/self/smaps").read_bytes())
            if int(own) + int(swapped) == 0 and os.path.exists(path) and os.stat(path).st_ino == int(file)
        )
        for number, tensor in enumerate(tensors):
            if not _is_plain(tensor):
                continue
            first, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            place = bisect_right(mappings, first, key=lambda mapping: mapping[0]) - 1
            if place >= 0 and first + size <= mappings[place][1]:
                start, _, offset, path = mappings[place]
                places[number] = path, offset + first - start
    return places


def _is_plain(tensor: Tensor) -> bool:
    """True if a tensor is a run of bytes of the host's memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() and bool(tensor.numel()) and not tensor.is_conj() and not tensor.is_neg()
