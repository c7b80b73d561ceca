"""Calls that travel: rank 0's arguments, on all ranks.

All but tensors is pickled. Tensors go over the mesh, in one message; one that every rank has from the call before is
not sent again: the same object in the same version, or, where torch counts no versions (in inference mode), one with
the same values at the same place.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import Mesh
from ..core.alignment import rounded_up
from ..errors import InputError, first_line


class _Facts(NamedTuple):
    """A tensor of a call.

    Attributes:
        of: number of the tensor of the call before that has its values; None: it is sent.
        near: whether it lies on the rank's device; else in host memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    near: bool
    of: int | None

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class _Kept:
    """A tensor of the call before, on the rank that sends."""

    tensor: Tensor
    # None: torch counts none.
    version: int | None
    # Its values, where there is no version.
    values: Tensor | None

    def has(self, tensor: Tensor) -> bool:
        """True if a tensor has the values that were sent."""
        if self.version is not None:
            return tensor is self.tensor and tensor._version == self.version
        assert self.values is not None
        return (
            tensor.shape == self.values.shape
            and tensor.dtype == self.values.dtype
            and tensor.device == self.values.device
            and torch.equal(as_bytes(tensor), as_bytes(self.values))
        )


class NumberedTensors:
    """The tensors of a value while it is pickled: numbered in the order in which they are met."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.found)
            self.found.append(tensor)
        return self._numbers[id(tensor)]


def dumped(value: Any, stand_in: Callable[[Any], Any]) -> bytes:
    """Pickle a value. Functions without a name elsewhere go by value.

    Args:
        value: to be pickled.
        stand_in: what is pickled in an object's place, for `loaded`; None: the object itself.

    Raises:
        Exception: whatever pickling raises.
    """
    import cloudpickle

    class StandInPickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return stand_in(obj)

    stream = io.BytesIO()
    StandInPickler(stream).dump(value)
    return stream.getvalue()


class _StandInUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, original: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._original = original

    def persistent_load(self, pid: Any) -> Any:
        return self._original(pid)


def loaded(data: bytes, original: Callable[[Any], Any]) -> Any:
    """The object that `dumped` pickled; ``original`` returns the object that a stand-in is for."""
    return _StandInUnpickler(data, original).load()


def _dumped_call(call: Any, tensors: NumberedTensors) -> bytes:
    def stand_in(obj: Any) -> Any:
        if type(obj) in (Tensor, torch.nn.Parameter):
            if obj.layout is not torch.strided:
                raise InputError(f"a tensor in the layout {obj.layout} cannot be sent; make it dense")
            return ("tensor", tensors.number(obj))
        if isinstance(obj, torch.Generator):
            return ("generator", obj.device.type, obj.get_state())
        return None

    return dumped(call, stand_in)


def _loaded_call(data: bytes, tensors: Sequence[Tensor], device: torch.device) -> Any:
    def original(stand_in: Any) -> Any:
        kind, *what = stand_in
        if kind == "tensor":
            return tensors[what[0]]
        generator = torch.Generator(device if what[0] == device.type else what[0])
        generator.set_state(what[1])
        return generator

    return loaded(data, original)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of any dtype, 1-D."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor of these bytes; it shares their memory."""
    return data.view(dtype).view(tuple(shape)) if data.numel() else data.new_empty(tuple(shape), dtype=dtype)


def _places(facts: Sequence[_Facts]) -> tuple[list[int], int]:
    """The place in a message at which every tensor begins that is sent, and its length in bytes."""
    sizes = [0 if one.of is not None else rounded_up(one.size) for one in facts]
    ends = [*accumulate(sizes)]
    return [end - size for end, size in zip(ends, sizes, strict=True)], ends[-1] if ends else 0


class CallSender:
    """Rank 0's side.

    Args:
        mesh: its ranks, of which this one is the first.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._kept: list[_Kept] = []
        # Bytes of tensors that were sent for the latest call.
        self.bytes_sent = 0

    def forget(self) -> None:
        """Send everything in the next call: the state of the others is not known any more."""
        self._kept = []

    def pack(self, call: Any) -> tuple[bytes, list[Tensor]]:
        """A call as the others are told of it, and the tensors for `send`.

        Raises:
            InputError: a part of it cannot be pickled; it is named.
        """
        tensors = NumberedTensors()
        try:
            data = _dumped_call(call, tensors)
        except InputError:
            raise
        except Exception as error:
            where, why = _culprit(call, error)
            raise InputError(
                f"{where} cannot be sent to the other ranks ({why}); pass something that can be pickled"
            ) from error
        facts, kept = [], []
        for number, tensor in enumerate(tensors.found):
            before = self._before(number, tensor)
            near = tensor.device.type == self._mesh.device.type
            facts.append(_Facts(tuple(tensor.shape), tensor.dtype, near, before))
            counted = not tensor.is_inference()
            held = self._kept[before].values if before is not None else None
            values = None if counted else (held if held is not None else tensor.detach().clone())
            kept.append(_Kept(tensor, tensor._version if counted else None, values))
        self._kept = kept
        return pickle.dumps((data, facts)), [t for t, f in zip(tensors.found, facts, strict=True) if f.of is None]

    def _before(self, number: int, tensor: Tensor) -> int | None:
        """Number of the tensor of the call before that has this one's values."""
        places = [number] if number < len(self._kept) else []
        places += [place for place, one in enumerate(self._kept) if one.tensor is tensor and place != number]
        return next((place for place in places if self._kept[place].has(tensor)), None)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send the tensors of a call. Collective: the others `CallReceiver.take` it."""
        facts = [_Facts(tuple(t.shape), t.dtype, True, None) for t in tensors]
        places, size = _places(facts)
        self.bytes_sent = size
        if size == 0:
            return
        message = torch.zeros(size, dtype=torch.uint8, device=self._mesh.device)
        for tensor, place, one in zip(tensors, places, facts, strict=True):
            message[place : place + one.size].copy_(as_bytes(tensor))
        self._mesh.world.broadcast(message, 0)


class CallReceiver:
    """The side of another rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._kept: list[Tensor] = []

    def take(self, packed: bytes) -> Any:
        """The call; its tensors may be written to. Collective."""
        data, facts = pickle.loads(packed)
        places, size = _places(facts)
        device = self._mesh.device
        message = torch.empty(size, dtype=torch.uint8, device=device)
        if size:
            self._mesh.world.broadcast(message, 0)
        kept = []
        for place, one in zip(places, facts, strict=True):
            if one.of is not None:
                kept.append(self._kept[one.of])
                continue
            tensor = from_bytes(message[place : place + one.size], one.shape, one.dtype)
            kept.append(tensor if one.near else tensor.cpu())
        self._kept = kept
        # Models write to their arguments.
        return _loaded_call(data, [tensor.clone() for tensor in kept], device)


def _culprit(value: Any, error: Exception, where: str = "") -> tuple[str, str]:
    """The innermost part of a call that cannot be pickled, by its path, and why."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{where}[{key!r}]" if where else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{where}[{place}]" if where else f"argument {place}", item) for place, item in enumerate(value)]
    for path, item in items:
        try:
            _dumped_call(item, NumberedTensors())
        except Exception as inner:
            return _culprit(item, inner, path)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    module = getattr(value, "__module__", type(value).__module__)
    return f"{where or 'the call'} ({name} of {module})", first_line(error)
