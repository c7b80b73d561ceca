"""Objects with tensors for other processes of this machine, which hold one copy of the tensors together.

An object is pickled, functions and classes that have no name elsewhere by value; its tensors stand in it by number.
Tensors of the host lie in memory that the other processes share among themselves (`memfd_create`). A GPU's tensor is
opened by the others (CUDA IPC) and copied to their own GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.alignment import rounded_up
from ..core.mapped import files_of
from ..errors import InputError, first_line
from .messages import NumberedTensors, dumped, from_bytes, loaded
from .shared_memory import MemoryFile, Place, file_state, map_place


class _Place(NamedTuple):
    """A tensor in a message.

    Attributes:
        start: first byte; None: it is opened by ``opened``.
        near: whether it belongs on the rank's device.
        opened: function and arguments that open a GPU's tensor in another process.
        file: number of the memory or file that it lies in.
    """

    start: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    near: bool
    parameter: bool
    opened: Any
    file: int = 0


class Parcel(NamedTuple):
    """A pickled object and where its tensors are, for another process of this machine."""

    data: bytes
    places: list[_Place]
    files: list[Place]


@contextmanager
def pack_parcel(
    value: Any, device: str, modules: dict[int, int] | None = None, *, moved: bool = False
) -> Iterator[Parcel]:
    """An object for other processes of this machine, which `open_parcel` it within the ``with`` block.

    Args:
        device: type of the device of the ranks; tensors on one come to be on each rank's own.
        modules: numbers of modules that the others have, by id.
        moved: the tensors of this process move into the memory that the others map, one after the other; those that are
            pages of a file stay there, and are opened there. Without it they stay as they are, and all are copied.

    `InputError`: it cannot be pickled.
    """
    tensors, known = NumberedTensors(), modules or {}

    def stand_in(obj: Any) -> Any:
        if type(obj) in (Tensor, nn.Parameter) and obj.layout is torch.strided and not obj.is_meta:
            return ("tensor", tensors.number(obj))
        return ("module", known[id(obj)]) if isinstance(obj, nn.Module) and id(obj) in known else None

    try:
        data = dumped(value, stand_in)
    except Exception as error:
        said = f"this {type(value).__name__} cannot be copied to other processes ({first_line(error)})"
        raise InputError(said) from error
    of_files = zip(tensors.found, files_of(tensors.found) if moved else (), strict=False)
    mapped = {id(tensor): place for tensor, place in of_files if place is not None}
    with ExitStack() as files:
        size = sum(rounded_up(t.nbytes) for t in tensors.found if id(t) not in mapped and not _is_far(t, device))
        room = MemoryFile(files, size)
        memory = map_place(room.place) if moved and size else None
        paths = list(dict.fromkeys(path for path, _ in mapped.values()))
        places: list[_Place] = []
        for tensor in tensors.found:
            near, file = tensor.device.type == device, 0
            start = handle = None
            if id(tensor) in mapped:
                path, start = mapped[id(tensor)]
                file = 1 + paths.index(path)
            elif (handle := _opened(tensor) if _is_far(tensor, device) else None) is None:
                start = room.put(tensor.cpu())
                if memory is not None:
                    tensor.data = from_bytes(memory[start : start + tensor.nbytes], tuple(tensor.shape), tensor.dtype)
            parameter = isinstance(tensor, nn.Parameter)
            places.append(_Place(start, tuple(tensor.shape), tensor.dtype, near, parameter, handle, file))
        named = [Place(0, path, os.stat(path).st_size, file_state(path)) for path in paths]
        yield Parcel(data, places, [room.place, *named])


def _is_far(tensor: Tensor, device: str) -> bool:
    """True if other processes may open a tensor on its device."""
    return tensor.device.type == device == "cuda"


def _opened(tensor: Tensor) -> Any:
    """A handle by which another process opens a GPU's tensor; None where the allocator's memory cannot be opened."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    from torch.multiprocessing.reductions import reduce_tensor

    with suppress(RuntimeError):
        return reduce_tensor(tensor.detach())
    return None


def open_parcel(parcel: Parcel, device: torch.device, modules: Sequence[nn.Module] = ()) -> Any:
    """The object of a parcel of another process of this machine, within the ``with`` block of its `pack_parcel`.

    ``device`` is where tensors go that belong on a rank's own; ``modules`` stand in the parcel as numbers.
    """
    used = {place.file for place in parcel.places if place.start is not None}
    memory = {number: map_place(parcel.files[number]) for number in used if parcel.files[number].size}
    nothing = torch.empty(0, dtype=torch.uint8)
    tensors = []
    for place in parcel.places:
        if place.start is None:
            rebuild, args = place.opened
            tensor = rebuild(*args).to(device, copy=True)
        else:
            end = place.start + prod(place.shape) * place.dtype.itemsize
            tensor = from_bytes(memory.get(place.file, nothing)[place.start : end], place.shape, place.dtype)
            tensor = tensor.to(device) if place.near else tensor
        tensors.append(nn.Parameter(tensor, requires_grad=False) if place.parameter else tensor)

    def original(stand_in: Any) -> Any:
        kind, number = stand_in
        return tensors[number] if kind == "tensor" else modules[number]

    return loaded(parcel.data, original)
