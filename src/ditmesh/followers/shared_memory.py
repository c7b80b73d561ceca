"""Memory for tensors that processes of this machine map: one process fills it, and all see the same pages.

Where the system can (Linux from 6.1 on), the memory consists of huge pages. Ordinary pages of shared memory cost more
to make than what is written into them, and every process that maps them pays for each again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..core.alignment import rounded_up
from ..core.values import as_bytes

# Bytes of a huge page, and of the memory that is made of them at a time.
HUGE, STEP = 1 << 21, 1 << 23
# Seconds for a huge page above which ordinary ones are cheaper: a virtual machine may have given large free blocks back
# to its host, and gets them again page by page. Then so many steps are made of ordinary pages before the next attempt:
# twice as many each time in a row, and at most.
SLOW, LONGEST = 1.5e-3, 16
# Of madvise(2): make huge pages of a range now, whatever the system's settings for later are.
_COLLAPSE = 25


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
    """A file in memory that is filled from its beginning.

    Its owner writes through a mapping that ends with `finish`, or into the file; all others have private views of it.
    """

    def __init__(self, files: ExitStack) -> None:
        """Make it, empty. ``files`` closes it for processes that have not opened it."""
        if hasattr(os, "memfd_create"):
            self._number = os.memfd_create("ditmesh-copy", os.MFD_CLOEXEC)
            files.callback(os.close, self._number)
            self._file: int | str = self._number
        else:
            named = files.enter_context(tempfile.NamedTemporaryFile(prefix="ditmesh-copy-"))  # noqa: SIM115
            self._number, self._file = named.fileno(), named.name
        self._used = 0
        # Of every step whether it has huge pages, as far as there is something in it.
        self._huge: list[bool] = []
        self._pause, self._slow = 0, 0
        self._size = 0
        self._shared: Tensor | None = None
        files.callback(self.finish)

    @property
    def place(self) -> Place:
        """The place where other processes find it."""
        return Place(os.getpid(), self._file, self._size)

    def grow(self, size: int) -> None:
        """Be so large, in bytes, for what `put` brings."""
        self._size = rounded_up(max(1, size), HUGE if size >= HUGE else 1)
        os.ftruncate(self._number, self._size)
        if size >= HUGE and isinstance(self._file, int) and sys.platform == "linux":
            self._shared = _mapped(self._number, self._size, True, mmap.MAP_SHARED)

    def put(self, values: Tensor) -> int:
        """Append a copy of a tensor; returns where it begins."""
        start, end = self._used, self._used + values.nbytes
        if end > self._size:
            raise ValueError(f"{end - start} bytes do not fit behind {start} of {self._size}")
        self._used = rounded_up(end)
        self._make_huge(end)
        content, place = as_bytes(values.resolve_conj().resolve_neg().contiguous().view(-1)), start
        while place < end:
            number = place // STEP
            last = min(end, (number + 1) * STEP)
            part = content[place - start : last - start]
            if self._shared is not None and self._huge[number]:
                self._shared[place:last].copy_(part)
            else:
                self._write(place, part)
            place = last
        return start

    def finish(self) -> None:
        """End writing, and free the part that is not filled."""
        if self._size > self._used:
            self._size = max(1, self._used)
            os.ftruncate(self._number, self._size)
        self._shared = None

    def _make_huge(self, end: int) -> None:
        """Make huge pages of the steps up to a place, as long as that is quick."""
        while self._shared is not None and len(self._huge) * STEP < end:
            first = len(self._huge) * STEP
            if self._pause:
                self._pause -= 1
                self._huge.append(False)
                continue
            last = min(first + STEP, self._size)
            # A range without any page cannot be collapsed.
            for place in range(first, last, HUGE):
                os.pwrite(self._number, b"\0", place)
            began = time.perf_counter()
            failed = _libc().madvise(self._shared.data_ptr() + first, last - first, _COLLAPSE)
            if failed:
                self._shared = None
                return
            self._huge.append(True)
            slow = time.perf_counter() - began > SLOW * (last - first) / HUGE
            self._slow = self._slow + 1 if slow else 0
            self._pause = min(2**self._slow, LONGEST) if slow else 0

    def _write(self, start: int, values: Tensor) -> None:
        """Write bytes, (n,) uint8: twice as fast as into a mapping of ordinary pages, of which each costs a fault."""
        left = memoryview(cast(Any, values.cpu().numpy()))
        while left:
            count = os.pwrite(self._number, left, start)
            left, start = left[count:], start + count


def map_place(place: Place) -> Tensor:
    """A private view of a file or of another process's `MemoryFile`: (size,) uint8.

    Raises:
        OSError: it is not there, or another one under its name.
    """
    path = place.file if isinstance(place.file, str) else f"/proc/{place.process}/fd/{place.file}"
    number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        if place.state and file_state(number) != place.state:
            raise OSError(f"{str(place.file)!r} has changed meanwhile")
        # A process keeps the pages that it writes to; the rest is shared among all that have opened it.
        return _mapped(number, place.size, huge=isinstance(place.file, int))
    finally:
        os.close(number)


def file_state(file: int | str) -> tuple[int, ...]:
    """A value by which a file is known to be the same as before."""
    about = os.stat(file)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _mapped(number: int, size: int, huge: bool, flags: int = 0) -> Tensor:
    """A mapping of an open file, private unless flags say otherwise: (size,) uint8, unmapped when nothing has it.

    ``huge``: it begins where a huge page can.
    """
    if not (huge and size >= HUGE and sys.platform == "linux"):
        return torch.frombuffer(mmap.mmap(number, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    flags = flags or mmap.MAP_PRIVATE
    # MemoryFile for it, in which it is put: the object takes all of it away at its end.
    whole = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    found = torch.frombuffer(whole, dtype=torch.uint8)
    first = -found.data_ptr() % HUGE
    address = found.data_ptr() + first
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mmap(address, size, prot, flags | _FIXED, number, 0) != address:
        raise OSError(ctypes.get_errno(), f"mapping {size} bytes failed")
    return found[first : first + size]


# Of mmap(2), on Linux.
_FIXED, _NORESERVE = 0x10, 0x4000


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    return libc
