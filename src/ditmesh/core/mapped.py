"""Tensors that are pages of a file or of shared memory, and so the same bytes in every process that maps them."""

from __future__ import annotations

import mmap
import re
from bisect import bisect_right
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
    tensors = list(tensors)
    places: list[Pages | None] = [None] * len(tensors)
    with suppress(OSError, ValueError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # One expression for all: a rank has hundreds of mappings with two dozen lines each.
        mappings = sorted(
            (int(first, 16), int(end, 16), int(offset, 16), file.decode())
            for first, end, offset, file, own, swapped in _MAPPING.findall(Path("/proc/self/smaps").read_bytes())
            # Pages of the process's own are those that it has written to.
            if int(own) + int(swapped) == 0
        )
        for number, tensor in enumerate(tensors):
            if not _is_plain(tensor):
                continue
            first, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            place = bisect_right(mappings, first, key=lambda mapping: mapping[0]) - 1
            start, end, offset, file = mappings[place]
            if place >= 0 and first + size <= end:
                places[number] = boot, file, offset + first - start, size
    return places


def _is_plain(tensor: Tensor) -> bool:
    """True if a tensor is a run of bytes of the host's memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() and bool(tensor.numel()) and not tensor.is_conj() and not tensor.is_neg()


def files_of(tensors: Iterable[Tensor]) -> list[tuple[str, int] | None]:
    """The file that each tensor is pages of, and its first byte in there; None as in `pages_of`, or without a name.

    The file of that name is the one that is mapped.
    """
    tensors = list(tensors)
    pages = pages_of(tensors)
    paths: dict[str, str] = {}
    with suppress(OSError, ValueError):
        for words in _lines():
            if len(words) > 5 and words[4] != "0":
                paths.setdefault(f"{words[3]} {words[4]}", words[5])
        of_tensors = {one[1] for one in pages if one is not None}
        paths = {file: path for file, path in paths.items() if file in of_tensors and _is_of(path, file)}
        return [(paths[one[1]], one[2]) if one is not None and one[1] in paths else None for one in pages]
    return [None] * len(tensors)


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


# Of a mapping of a file: memory of the process has 0 for the file's number.
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+ [1-9]\d*)\b[^\n]*\n"
    rb"(?:[A-Z]\w*:[^\n]*\n)*?Anonymous: +(\d+) kB\n(?:[A-Z]\w*:[^\n]*\n)*?Swap: +(\d+) kB\n",
    re.MULTILINE,
)
