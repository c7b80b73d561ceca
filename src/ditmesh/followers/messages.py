"""Calls that travel: rank 0's arguments, on all ranks.

All but tensors is pickled. Tensors go over the mesh, in one message.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import Mesh
from ..core.alignment import rounded_up
from ..core.values import as_bytes
from ..errors import InputError, first_line


class _Facts(NamedTuple):
    """A tensor of a call; ``near``: it lies on the rank's device, else in host memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    near: bool

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


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
    """Pickle a value; functions without a name elsewhere go by value. Raises whatever pickling raises.

    ``stand_in`` returns what is pickled in an object's place, for `loaded`; None: the object itself.
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
            if words := _unsendable(obj):
                raise InputError(words)
            return ("tensor", tensors.number(obj))
        if isinstance(obj, torch.Generator):
            return ("generator", obj.device.type, obj.get_state())
        return None

    return dumped(call, stand_in)


def _unsendable(tensor: Tensor) -> str:
    """The reason why a tensor's values cannot be sent, and a way out; empty: they can."""
    if tensor.is_nested:
        return "a nested tensor; pass a dense one, as torch.nested.to_padded_tensor makes it"
    if tensor.layout is not torch.strided:
        return f"a tensor in the layout {tensor.layout}; make it dense"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values; pass one that has"
    return "a quantised tensor; dequantise it" if tensor.is_quantized else ""


def from_bytes(data: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor of these bytes; it shares their memory."""
    return data.view(dtype).view(tuple(shape)) if data.numel() else data.new_empty(tuple(shape), dtype=dtype)


def _places(facts: Sequence[_Facts]) -> list[int]:
    """The place in a message at which every tensor begins, and its length in bytes."""
    return [0, *accumulate(rounded_up(fact.size) for fact in facts)]


def pack_call(mesh: Mesh, call: Mapping[str, Any]) -> tuple[bytes, Callable[[], None]]:
    """A call, by the names of its arguments, as the other ranks are told of it; and what sends its tensors to them.

    The latter is collective: the others `take_call`. `InputError`: a part of it cannot be sent; it is named. Or a
    gradient is wanted.
    """
    numbered = NumberedTensors()
    try:
        data = _dumped_call(call, numbered)
    except Exception as error:
        where, inner = _culprit(call, error)
        words = f"{where} cannot be sent to the other ranks"
        if isinstance(inner, InputError):
            raise InputError(f"{words}: it is {inner}") from error
        raise InputError(f"{words} ({first_line(inner)}); pass something that can be pickled") from error
    tensors = numbered.found
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise InputError(
            "a call that is sent to other ranks passes no gradient on to its arguments; call the model under "
            "torch.no_grad(), or train with ditmesh.train"
        )
    facts = [_Facts(tuple(t.shape), t.dtype, t.device.type == mesh.device.type) for t in tensors]

    def send() -> None:
        *places, size = _places(facts)
        if size:
            message = torch.zeros(size, dtype=torch.uint8, device=mesh.device)
            for tensor, place, fact in zip(tensors, places, facts, strict=True):
                message[place : place + fact.size].copy_(as_bytes(tensor))
            mesh.world.broadcast(message, 0)

    return pickle.dumps((data, facts)), send


def take_call(mesh: Mesh, packed: bytes) -> dict[str, Any]:
    """The call of rank 0; its tensors may be written to. Collective."""
    data, facts = pickle.loads(packed)
    *places, size = _places(facts)
    message = torch.empty(size, dtype=torch.uint8, device=mesh.device)
    if size:
        mesh.world.broadcast(message, 0)
    # A copy of each: what is written to one tensor shows on no other.
    tensors = [
        from_bytes(message[place : place + fact.size].clone(), fact.shape, fact.dtype)
        for place, fact in zip(places, facts, strict=True)
    ]
    tensors = [tensor if fact.near else tensor.cpu() for tensor, fact in zip(tensors, facts, strict=True)]

    def original(stand_in: Any) -> Any:
        kind, *what = stand_in
        if kind == "tensor":
            return tensors[what[0]]
        return torch.Generator(mesh.device if what[0] == mesh.device.type else what[0]).set_state(what[1])

    return loaded(data, original)


def _culprit(value: Any, error: Exception, where: str = "") -> tuple[str, Exception]:
    """The innermost part of a call that cannot be pickled, by its path, and why."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    items = [(f"{where}[{key!r}]" if where else str(key), item) for key, item in entries]
    for path, item in items:
        try:
            _dumped_call(item, NumberedTensors())
        except Exception as inner:
            return _culprit(item, inner, path)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{where or 'the call'} ({name} of {getattr(value, '__module__', type(value).__module__)})", error
