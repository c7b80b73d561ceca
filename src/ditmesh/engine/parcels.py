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
from .rooms import Room, opened
from .sent import NumberedTensors, dumped, from_bytes, loaded


class _Place(NamedTuple):
    """A tensor in a message.

    Attributes:
        start: first byte; None: it is opened by ``opened``.
        near: whether it belongs on the rank's device.
        parameter: whether it is an `nn.Parameter`.
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
    """A pickled object and where its tensors are, for another process of this machine.

    Attributes:
        data: pickled.
        places: of its tensors.
        process: where memory is opened.
        files: that tensors lie in: how each is opened, its size in bytes, and what else is known of a file with a name.
    """

    data: bytes
    places: list[_Place]
    process: int
    files: list[tuple[int | str, int, Any]]


@contextmanager
def packed(
    value: Any,
    device: str,
    modules: dict[int, int] | None = None,
    rooms: Sequence[Room] = (),
    on_files: bool = False,
) -> Iterator[Parcel]:
    """An object for other processes of this machine, which `unpacked` it within the ``with`` block.

    Args:
        value: anything that can be pickled, modules with all their weights included.
        device: type of the device of the ranks; tensors on one come to be on each rank's own.
        modules: numbers of modules that the others have, by id.
        rooms: memory that some tensors lie in already.
        on_files: tensors that are pages of a file are opened there; else all are copied.

    Raises:
        InputError: it cannot be pickled.
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
    there = _there(tensors.found, rooms, on_files)
    with ExitStack() as files:
        size = sum(rounded_up(t.nbytes) for t in tensors.found if id(t) not in there and not _is_far(t, device))
        room = Room(size, files)
        paths = list(dict.fromkeys(path for path, _ in there.values() if isinstance(path, str)))
        places: list[_Place] = []
        for tensor in tensors.found:
            near, file = tensor.device.type == device, 0
            start = handle = None
            if id(tensor) in there:
                where, start = there[id(tensor)]
                file = 1 + (len(rooms) + paths.index(where) if isinstance(where, str) else where)
            elif (handle := _opened(tensor) if _is_far(tensor, device) else None) is None:
                start, _ = room.put(tensor.cpu())
            parameter = isinstance(tensor, nn.Parameter)
            places.append(_Place(start, tuple(tensor.shape), tensor.dtype, near, parameter, handle, file))
        room.finish()
        known_files = [(path, os.stat(path).st_size, _state_of(path)) for path in paths]
        yield Parcel(data, places, os.getpid(), [*((one.file, one.size, None) for one in (room, *rooms)), *known_files])


def _there(tensors: list[Tensor], rooms: Sequence[Room], on_files: bool) -> dict[int, tuple[int | str, int]]:
    """By the id of a tensor where it is already: the number of its room, or its file, and its first byte in there."""
    there: dict[int, tuple[int | str, int]] = {}
    for tensor in tensors:
        for number, room in enumerate(rooms):
            if (start := room.place_of(tensor)) is not None:
                there[id(tensor)] = number, start
    if on_files:
        for tensor, found in zip(tensors, files_of(tensors), strict=True):
            if found is not None and id(tensor) not in there:
                there[id(tensor)] = found
    return there


def _is_far(tensor: Tensor, device: str) -> bool:
    """Whether other processes may open a tensor on its device."""
    return tensor.device.type == device == "cuda"


def _state_of(path: str) -> tuple[int, ...]:
    """What shows that a file is still the one that it was."""
    about = os.stat(path)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _opened(tensor: Tensor) -> Any:
    """How another process opens a GPU's tensor; None where the allocator's memory cannot be opened."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    from torch.multiprocessing.reductions import reduce_tensor

    with suppress(RuntimeError):
        return reduce_tensor(tensor.detach())
    return None


def unpacked(parcel: Parcel, device: torch.device, modules: Sequence[nn.Module] = ()) -> Any:
    """The object of a parcel of another process of this machine.

    Args:
        parcel: what `packed` yields; its ``with`` block must still be open.
        device: where tensors go that belong on a rank's own.
        modules: that stand in the parcel as numbers.
    """
    used = {place.file for place in parcel.places if place.start is not None}
    memory: dict[int, Tensor] = {}
    for number, (file, size, state) in enumerate(parcel.files):
        if number in used:
            if state is not None and _state_of(str(file)) != state:
                raise InputError(f"{str(file)!r} has changed meanwhile")
            memory[number] = opened(parcel.process, file, size)
    tensors = []
    for place in parcel.places:
        if place.start is None:
            rebuild, args = place.opened
            tensor = rebuild(*args).to(device, copy=True)
        else:
            end = place.start + prod(place.shape) * place.dtype.itemsize
            tensor = from_bytes(memory[place.file][place.start : end], place.shape, place.dtype)
            tensor = tensor.to(device) if place.near else tensor
        tensors.append(nn.Parameter(tensor, requires_grad=False) if place.parameter else tensor)

    def original(stand_in: Any) -> Any:
        kind, number = stand_in
        return tensors[number] if kind == "tensor" else modules[number]

    return loaded(parcel.data, original)
