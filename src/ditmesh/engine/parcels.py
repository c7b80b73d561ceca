"""Objects with tensors for other processes of this machine, which hold one copy of the tensors together.

An object is pickled, functions and classes that have no name elsewhere by value; its tensors stand in it by number.
Tensors of the host lie in memory that the other processes share among themselves (`memfd_create`). A GPU's tensor is
opened by the others (CUDA IPC) and copied to their own GPU.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..core.alignment import rounded_up
from ..errors import InputError, first_line
from .sent import NumberedTensors, as_bytes, dumped, from_bytes, loaded


class _Place(NamedTuple):
    """A tensor in a message.

    Attributes:
        start: first byte; None: it is opened by ``opened``.
        near: whether it belongs on the rank's device.
        parameter: whether it is an `nn.Parameter`.
        opened: function and arguments that open a GPU's tensor in another process.
    """

    start: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    near: bool
    parameter: bool
    opened: Any


class Parcel(NamedTuple):
    """A pickled object and where its tensors are, for another process of this machine.

    Attributes:
        data: pickled.
        places: of its tensors.
        process, file: where the memory is opened; a path, where there is no such thing.
        size: of the memory, in bytes.
    """

    data: bytes
    places: list[_Place]
    process: int
    file: int | str
    size: int


@contextmanager
def packed(value: Any, device: str, modules: dict[int, int] | None = None) -> Iterator[Parcel]:
    """An object for other processes of this machine, which `unpacked` it within the ``with`` block.

    Args:
        value: anything that can be pickled, modules with all their weights included.
        device: type of the device of the ranks; tensors on one come to be on each rank's own.
        modules: numbers of modules that the others have, by id.

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
    places: list[_Place] = []
    size = 0
    for tensor in tensors.found:
        near = tensor.device.type == device
        opened = _opened(tensor) if near and device == "cuda" else None
        start = None if opened is not None else size
        parameter = isinstance(tensor, nn.Parameter)
        places.append(_Place(start, tuple(tensor.shape), tensor.dtype, near, parameter, opened))
        if opened is None:
            size += rounded_up(tensor.nbytes)
    with ExitStack() as files:
        file, number = _memory(size, files)
        for tensor, place in zip(tensors.found, places, strict=True):
            if place.start is not None:
                _write(number, place.start, as_bytes(tensor))
        yield Parcel(data, places, os.getpid(), file, size)


def _memory(size: int, files: ExitStack) -> tuple[int | str, int]:
    """Memory that other processes can open: how, and the number of its file here."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("ditmesh-copy", os.MFD_CLOEXEC)
        files.callback(os.close, number)
        found: int | str = number
    else:
        named = files.enter_context(tempfile.NamedTemporaryFile(prefix="ditmesh-copy-"))  # noqa: SIM115
        number, found = named.fileno(), named.name
    os.ftruncate(number, max(1, size))
    return found, number


def _write(file: int, start: int, values: Tensor) -> None:
    """Write bytes, (n,) uint8, to a place of a file: twice as fast as into its mapping, which costs faults of pages."""
    left = memoryview(cast(Any, values.cpu().numpy()))
    while left:
        count = os.pwrite(file, left, start)
        left, start = left[count:], start + count


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
    whole = torch.empty(0, dtype=torch.uint8)
    if parcel.size:
        path = parcel.file if isinstance(parcel.file, str) else f"/proc/{parcel.process}/fd/{parcel.file}"
        number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            # A private view: what is written to stays here, and the rest is shared among all that have opened it.
            whole = torch.frombuffer(mmap.mmap(number, parcel.size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        finally:
            os.close(number)
    tensors = []
    for place in parcel.places:
        if place.start is None:
            rebuild, args = place.opened
            tensor = rebuild(*args).to(device, copy=True)
        else:
            end = place.start + prod(place.shape) * place.dtype.itemsize
            tensor = from_bytes(whole[place.start : end], place.shape, place.dtype)
            tensor = tensor.to(device) if place.near else tensor
        tensors.append(nn.Parameter(tensor, requires_grad=False) if place.parameter else tensor)

    def original(stand_in: Any) -> Any:
        kind, number = stand_in
        return tensors[number] if kind == "tensor" else modules[number]

    return loaded(parcel.data, original)
