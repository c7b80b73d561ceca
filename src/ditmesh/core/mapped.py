"""Tensors that are pages of a file, and so the same bytes in every process that maps it."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

# Of a mapping of a file: its addresses, the first byte in the file, the file's number and path, and the pages that are
# the process's own, as it has written to them. Memory of the process has 0 for the number.
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ ([1-9]\d*) +(/[^\n]*)\n"
    rb"(?:[A-Z]\w*:[^\n]*\n)*?Anonymous: +(\d+) kB\n(?:[A-Z]\w*:[^\n]*\n)*?Swap: +(\d+) kB\n",
    re.MULTILINE,
)


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
