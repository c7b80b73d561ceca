"""Calls that travel: rank 0's arguments, on all ranks.

All but tensors is pickled. Tensors go over the mesh, in one message; one that every rank has from the call before is
not sent again. That is told by content: numpy, ``.data`` and CUDA graphs write to tensors without a trace.
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
from ..core.digests import tensor_digest
from ..core.values import as_bytes
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


def _loaded_call(data: bytes, tensors: Sequence[Tensor], device: torch.device) -> Any:
    def original(stand_in: Any) -> Any:
        kind, *what = stand_in
        if kind == "tensor":
            return tensors[what[0]]
        generator = torch.Generator(device if what[0] == device.type else what[0])
        generator.set_state(what[1])
        return generator

    return loaded(data, original)


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
        # Content of each tensor of the call before.
        self._sent: list[tuple[Any, ...]] = []
        # Bytes of tensors that were sent for the latest call.
        self.bytes_sent = 0

    def forget(self) -> None:
        """Send everything in the next call: the state of the others is not known any more."""
        self._sent = []

    def pack(self, call: Mapping[str, Any]) -> tuple[bytes, list[Tensor]]:
        """A call, by the names of its arguments, as the others are told of it, and the tensors for `send`.

        Raises:
            InputError: a part of it cannot be sent; it is named. Or a gradient is wanted.
        """
        tensors = NumberedTensors()
        try:
            data = _dumped_call(call, tensors)
        except Exception as error:
            where, inner = _culprit(call, error)
            words = f"{where} cannot be sent to the other ranks"
            if isinstance(inner, InputError):
                raise InputError(f"{words}: it is {inner}") from error
            raise InputError(f"{words} ({first_line(inner)}); pass something that can be pickled") from error
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.found):
            raise InputError(
                "a call that is sent to other ranks passes no gradient on to its arguments; call the model under "
                "torch.no_grad(), or train with ditmesh.train"
            )
        contents = [(type(one), one.device.type, tensor_digest(one)) for one in tensors.found]
        facts = []
        for number, (tensor, content) in enumerate(zip(tensors.found, contents, strict=True)):
            near = tensor.device.type == self._mesh.device.type
            facts.append(_Facts(tuple(tensor.shape), tensor.dtype, near, self._before(number, content)))
        self._sent = contents
        return pickle.dumps((data, facts)), [t for t, f in zip(tensors.found, facts, strict=True) if f.of is None]

    def _before(self, number: int, content: tuple[Any, ...]) -> int | None:
        """Number of the tensor of the call before that has this content."""
        if number < len(self._sent) and self._sent[number] == content:
            return number
        return self._sent.index(content) if content in self._sent else None

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
        tensors = []
        for place, fact in zip(places, facts, strict=True):
            if fact.of is not None:
                tensors.append(self._kept[fact.of])
                continue
            tensor = from_bytes(message[place : place + fact.size], fact.shape, fact.dtype)
            tensors.append(tensor if fact.near else tensor.cpu())
        self._kept = tensors
        # Models write to their arguments.
        return _loaded_call(data, [tensor.clone() for tensor in tensors], device)


def _culprit(value: Any, error: Exception, where: str = "") -> tuple[str, Exception]:
    """The innermost part of a call that cannot be pickled, by its path, and why."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{where}[{key!r}]" if where else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{where}[{place}]", item) for place, item in enumerate(value)]
    for path, item in items:
        try:
            _dumped_call(item, NumberedTensors())
        except Exception as inner:
            return _culprit(item, inner, path)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{where or 'the call'} ({name} of {getattr(value, '__module__', type(value).__module__)})", error
