"""Comparison of tensors' values with as few reads as possible.

To compare two tensors by value is to wait for the device. Nearly always something else shows it: they are one piece of
memory that was not written to in between, or the same two were compared before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

# Types of tensors that are their memory, and nothing more.
PLAIN_TYPES: tuple[type, ...] = (Tensor, nn.Parameter)


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """True if a value is a tensor that is nothing but its memory, unlike patches that are still on their way."""
    return type(value) in PLAIN_TYPES


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a strided tensor of any dtype, 1-D uint8; a view of its memory where that lies in order."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:
        # A single element that was expanded counts as contiguous, but not as bytes.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


class SeenValue(NamedTuple):
    """A value as it was seen: held, so that its memory is not reused.

    ``key``: of a tensor its memory, how it lies there, and how often that has been written to; None for all else.
    """

    value: Any
    key: Any


def seen(value: Any, copied: bool = False) -> SeenValue:
    """A value as it is now.

    ``copied``: keep a copy of a tensor that does not record whether it is written to (inference mode).
    """
    if not isinstance(value, Tensor):
        return SeenValue(value, None)
    version = version_of(value)
    if not is_plain(value):
        return SeenValue(value, (id(value), version))
    if copied and version is None:
        value = value.clone()
    return SeenValue(value, (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device, version))


def version_of(tensor: Tensor) -> int | None:
    """The number of times that torch has seen a tensor, or its base, written to; None: not counted (inference)."""
    return None if tensor.is_inference() else tensor._version


class Values:
    """Compares values of one request, and remembers what it found for as long as it is asked for in every step."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of everything."""
        # The results of this step and of the one before, and the tensors they were found of.
        self._now: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        self._before: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def turn(self) -> None:
        """A new step begins: values that the previous step did not use are forgotten."""
        self._now, self._before = {}, self._now

    def found(self, key: Any, find: Callable[[], Any], of: tuple[Tensor, ...]) -> Any:
        """The result of ``find``, computed once; ``of``: the tensors with keys in ``key``, held meanwhile."""
        if any(tensor.is_inference() for tensor in of):
            # Whether they have been written to since is unknown.
            return find()
        if key not in self._now:
            known = self._before.get(key)
            self._now[key] = (find(), of) if known is None else known
        return self._now[key][0]

    def same(self, one: SeenValue, other: SeenValue) -> bool:
        """Equal values: tensors by shape, dtype and content. Subclasses of tensors are equal to themselves only."""
        a, b = one.value, other.value
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return type(a) is type(b) and a == b
        if one.key == other.key:
            return True
        if not (is_plain(a) and is_plain(b)) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return False
        pair = ("same", frozenset((one.key, other.key)))
        return self.found(pair, lambda: _unwritten(one) and _unwritten(other) and torch.equal(a, b), (a, b))

    def all_same(self, one: Mapping[str, SeenValue], other: Mapping[str, SeenValue]) -> bool:
        """Equal values under equal names."""
        return one.keys() == other.keys() and all(self.same(value, other[name]) for name, value in one.items())

    def assume_equal(self, one: SeenValue, other: SeenValue) -> None:
        """Let two tensors be taken for equal from here on."""
        self._now["same", frozenset((one.key, other.key))] = (True, (one.value, other.value))

    def content(self, one: SeenValue) -> bytes:
        """The bytes of a tensor's values."""
        tensor = one.value
        return self.found(("bytes", one.key), lambda: as_bytes(tensor).cpu().numpy().tobytes(), (tensor,))


def _unwritten(one: SeenValue) -> bool:
    """True if the tensor still holds the values that were seen."""
    return version_of(one.value) in (None, one.key[-1])


def tracked(*tensors: Tensor) -> bool:
    """True if torch records operations on some of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
