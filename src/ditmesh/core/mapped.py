"""Tensors that are pages of a file or of shared memory, and so the same bytes in every process that maps them."""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

# Of a tensor's bytes: the system, the file, the first byte in it, and their number.
Pages = tuple[str, str, int, int]


def pages_of(tensors: Iterable[Tensor]) -> list[Pages | None]:
    """The bytes of a file that each tensor maps, equal in processes of one system only if they are the same pages.

    None: it is memory of this process, or this process may have written to a page of the mapping (which gives it a page
    of its own), or the system does not say.

    Args:
        tensors: any; those with values on the host and without gaps can be such pages.
    """
    found = list(tensors)
    with suppress(OSError, ValueError):
        boot, mappings = _boot(), sorted(_mappings([t.data_ptr() for t in found if _is_plain(t)]))
        starts = [mapping[0] for mapping in mappings]
        return [_pages(tensor, boot, mappings, starts) for tensor in found]
    return [None] * len(found)


def _is_plain(tensor: Tensor) -> bool:
    """True if a tensor is a run of bytes of the host's memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() and bool(tensor.numel()) and not tensor.is_conj() and not tensor.is_neg()


def _pages(tensor: Tensor, boot: str, mappings: list[tuple[int, int, int, str]], starts: list[int]) -> Pages | None:
    if not _is_plain(tensor):
        return None
    first, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    place = bisect_right(starts, first) - 1
    if place < 0:
        return None
    start, end, offset, file = mappings[place]
    return (boot, file, offset + first - start, size) if first + size <= end else None


def files_of(tensors: Iterable[Tensor]) -> list[tuple[str, int] | None]:
    """The file that each tensor is pages of, and its first byte in there; None as in `pages_of`, or without a name.

    The file of that name is the one that is mapped.
    """
    found = list(tensors)
    pages = pages_of(found)
    paths: dict[str, str] = {}
    with suppress(OSError, ValueError):
        for words in _lines():
            if len(words) > 5 and words[4] != "0":
                paths.setdefault(f"{words[3]} {words[4]}", words[5])
        of_tensors = {one[1] for one in pages if one is not None}
        paths = {file: path for file, path in paths.items() if file in of_tensors and _is_of(path, file)}
        return [(paths[one[1]], one[2]) if one is not None and one[1] in paths else None for one in pages]
    return [None] * len(found)


def _lines() -> Iterator[list[str]]:
    """Of the table of mappings: addresses, rights, offset, device, number and path of the file."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        yield from (line.rstrip("\n").split(maxsplit=5) for line in lines)


def _is_of(path: str, file: str) -> bool:
    """True if a mapping of the file of this name is one of this file; file systems may show other numbers elsewhere."""
    with suppress(OSError, ValueError), open(path, "rb") as named:
        # Only to look at the table: nothing is written.
        view = torch.frombuffer(mmap.mmap(named.fileno(), 1, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        start = view.data_ptr()
        return any(
            int(words[0].partition("-")[0], 16) == start and f"{words[3]} {words[4]}" == file for words in _lines()
        )
    return False


def _boot() -> str:
    if sys.platform != "linux":
        raise OSError("no table of mappings")
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _mappings(addresses: Iterable[int]) -> Iterator[tuple[int, int, int, str]]:
    """First address, end, offset in the file and the file of mappings that this process has not written to.

    Args:
        addresses: of mappings that are wanted; others may be missing.
    """
    wanted, scan = sorted(set(addresses)), True
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for words in _lines():
            first, end = (int(address, 16) for address in words[0].split("-"))
            # Memory of the process has 0 for the number of its file.
            if words[4] == "0" or bisect_left(wanted, first) == bisect_left(wanted, end):
                continue
            try:
                own = _has_own_pages(pagemap.fileno(), first, end)
            except OSError:
                scan = False
                break
            if not own:
                yield first, end, int(words[2], 16), f"{words[3]} {words[4]}"
    if not scan:
        yield from _mappings_by_table()


def _has_own_pages(pagemap: int, first: int, end: int) -> bool:
    """True if a process has pages of its own in a private mapping of a file: those that it has written to.

    By the ioctl PAGEMAP_SCAN of Linux 6.7, which is told of a range what is looked for. What was written to may have
    left memory since.
    """
    from fcntl import ioctl

    found = (ctypes.c_uint64 * 3)()
    # Pages that are in memory or swapped out, and no pages of a file.
    present, swapped, of_file = 1 << 3, 1 << 4, 1 << 2
    pages = (96, 0, first, end, 0, ctypes.addressof(found), 1, 1, of_file, of_file, present | swapped, present)
    argument = bytearray(struct.pack("12Q", *pages))
    return ioctl(pagemap, 0xC0606610, argument) > 0


def _mappings_by_table() -> Iterator[tuple[int, int, int, str]]:
    """The same of all mappings, from a table that takes long to make: it counts all pages of the process."""
    # One expression for all: a rank has hundreds of mappings with two dozen lines each.
    for first, end, offset, file, own, swapped in _MAPPING.findall(Path("/proc/self/smaps").read_bytes()):
        if int(own) + int(swapped) == 0:
            yield int(first, 16), int(end, 16), int(offset, 16), file.decode()


# Of a mapping of a file: memory of the process has 0 for the file's number.
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+ [1-9]\d*)\b[^\n]*\n"
    rb"(?:[A-Z]\w*:[^\n]*\n)*?Anonymous: +(\d+) kB\n(?:[A-Z]\w*:[^\n]*\n)*?Swap: +(\d+) kB\n",
    re.MULTILINE,
)
