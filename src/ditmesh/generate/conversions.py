"""Weights that are converted while they are loaded, shared out among the ranks of a host.

The first rank plans: which weight goes to which place in which rank's memory. Then every rank converts its part, and
all ranks map all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.alignment import rounded_up
from ..followers.messages import from_bytes
from ..followers.shared_memory import MemoryFile, Place, address_of, map_place

# Names of dtypes in safetensors files.
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Conversion(NamedTuple):
    """A weight to convert: its place in a file, and its new dtype."""

    file: str
    name: str
    dtype: torch.dtype


class Conversions:
    """The plan of a host's first rank.

    Attributes:
        jobs: of each rank of the host, in the order of their places in its room.
        rooms: of each, with its size.
    """

    def __init__(self, rooms: Sequence[Place]) -> None:
        self.rooms, self.jobs = list(rooms), [list[Conversion]() for _ in rooms]
        self._used = [0] * len(rooms)
        self._views: list[tuple[int, Tensor]] = []

    def plan(self, files: Iterable[Path], dtype_of: Callable[[str, torch.dtype], torch.dtype]) -> dict[str, Tensor]:
        """Views of the places of all weights of some files that are to be converted; their values come later.

        Args:
            files: in safetensors' format.
            dtype_of: the new dtype of a weight, by its name and the stored dtype.
        """
        from safetensors import safe_open

        found: list[tuple[int, str, str, tuple[int, ...], torch.dtype]] = []
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    stored = tensors.get_slice(name)
                    kind, shape = SAFETENSORS_DTYPES.get(stored.get_dtype()), tuple(stored.get_shape())
                    if kind is not None and (wanted := dtype_of(name, kind)) != kind:
                        found.append((prod(shape) * wanted.itemsize, str(file), name, shape, wanted))
        places: list[tuple[int, int, str, tuple[int, ...], torch.dtype]] = []
        # The largest first, each to the rank with the least.
        for size, file, name, shape, wanted in sorted(found, key=lambda one: -one[0]):
            rank = min(range(len(self.rooms)), key=lambda number: self._used[number])
            places.append((rank, self._used[rank], name, shape, wanted))
            self.jobs[rank].append(Conversion(file, name, wanted))
            self._used[rank] = rounded_up(self._used[rank] + size)
        memory = {rank: self._mapped(rank) for rank in dict.fromkeys(place[0] for place in places)}
        return {
            name: from_bytes(memory[rank][start : start + prod(shape) * wanted.itemsize], shape, wanted)
            for rank, start, name, shape, wanted in places
        }

    def _mapped(self, rank: int) -> Tensor:
        place = self.rooms[rank]
        os.truncate(address_of(place), self._used[rank])
        self.rooms[rank] = place._replace(size=self._used[rank])
        found = map_place(self.rooms[rank])
        self._views.append((rank, found))
        return found

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """The number of the room and the first byte in there of a view; None: it is no view."""
        first = tensor.data_ptr()
        for rank, memory in self._views:
            if 0 <= first - memory.data_ptr() < memory.numel() and tensor.is_contiguous():
                return rank, first - memory.data_ptr()
        return None


def convert(jobs: Sequence[Conversion], room: MemoryFile, size: int) -> None:
    """This rank's part, into a room of so many bytes. Raises whatever reading raises."""
    from safetensors import safe_open

    if not jobs:
        return
    room.grow(size)
    with ExitStack() as files:
        known: dict[str, Any] = {}
        # In the order of their places.
        for job in jobs:
            if job.file not in known:
                known[job.file] = files.enter_context(safe_open(job.file, framework="pt", device="cpu"))
            room.put(known[job.file].get_slice(job.name)[...], job.dtype)
    room.finish()
