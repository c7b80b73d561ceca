"""Tensors that are pages of a file or of shared memory, and so the same bytes in every process that maps them."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

# Of a tensor's bytes: the system, the file, the first byte in it, and their number.
Pages = tuple[str, str, int, int]


def pages_of(tensors: Iterable[Tensor]) -> list[Pages | None]:
    """Which bytes of a file each tensor is, equal in processes of one system only if they are the same pages.

    None: it is memory of this process, or this process may have written to a page of the mapping (which gives it a page
    of its own), or the system does not say.

    Args:
        tensors: any; those with values on the host and without gaps can be such pages.
    """
    found = list(tensors)
    with suppress(OSError, ValueError):
        boot, mappings = _boot(), sorted(_mappings())
        starts = [mapping[0] for mapping in mappings]
        return [_pages(tensor, boot, mappings, starts) for tensor in found]
    return [None] * len(found)


def _pages(tensor: Tensor, boot: str, mappings: list[tuple[int, int, int, str]], starts: list[int]) -> Pages | None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    if not tensor.is_contiguous() or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return None
    first, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    place = bisect_right(starts, first) - 1
    if place < 0:
        return None
    start, end, offset, file = mappings[place]
    return (boot, file, offset + first - start, size) if first + size <= end else None


def _boot() -> str:
    if sys.platform != "linux":
        raise OSError("no table of mappings")
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _mappings() -> Iterator[tuple[int, int, int, str]]:
    """First address, end, offset in the file and the file of mappings that this process has not written to."""
    current: tuple[int, int, int, str] | None = None
    own = 0
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                words = rest.split()
                first, _, end = name.partition("-")
                # Device and number of the file; memory of the process has 0.
                file = f"{words[2]} {words[3]}"
                current = (int(first, 16), int(end, 16), int(words[1], 16), file) if words[3] != "0" else None
            elif name == "Anonymous:":
                own = int(rest.split()[0])
            elif name == "Swap:" and current is not None and own + int(rest.split()[0]) == 0:
                # What was written to may have left memory since.
                yield current
