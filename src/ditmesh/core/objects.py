"""Objects among a call's arguments, and the tensors that they keep."""

from __future__ import annotations

import datetime
import io
import pickle
import uuid
from collections.abc import Iterable, Iterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from .arguments import Arguments, fields_of

# Types that have a value and keep nothing else, though they may not show it.
_PLAIN: tuple[type, ...] = (
    *(str, bytes, bytearray, int, float, complex, range, slice, Decimal, Fraction, uuid.UUID, PurePath, Enum),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def objects_in(value: Any, within: tuple[int, ...] = ()) -> list[Any]:
    """The custom objects in an argument: what is no tensor, number, text, date, function or collection of them.

    A dataclass is a collection of its fields, unless it keeps more. ``within`` as in `argument_kind`.
    """
    if id(value) in within:
        return []
    items: Iterable[Any] | None = value if isinstance(value, (list, tuple, set, frozenset)) else None
    if (fields := fields_of(value)) is not None and set(getattr(value, "__dict__", ())) <= set(fields):
        items = fields.values()
    elif isinstance(value, dict):
        items = value.values()
    if items is not None:
        return [found for item in items for found in objects_in(item, (*within, id(value)))]
    return [] if value is None or isinstance(value, (Tensor, *_PLAIN)) or callable(value) else [value]


def kept_tensors(arguments: Arguments) -> Iterator[tuple[Any, Any, Tensor]]:
    """Numbers that a call's arguments keep: the dict or list that a tensor is in, its key there, and the tensor.

    Those of an object, and in a dict keys and values in one tensor (2, B, H, S, D), into which the module writes.
    """
    for value in (*arguments.args, *arguments.kwargs.values()):
        for kept in objects_in(value):
            yield from _tensors_in(getattr(kept, "__dict__", {}))
        if isinstance(value, dict):
            yield from (slot for slot in _tensors_in(value) if slot[2].dim() == 5)


def _tensors_in(place: Any) -> Iterator[tuple[Any, Any, Tensor]]:
    for key, value in [*(place.items() if isinstance(place, dict) else enumerate(place))]:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield place, key, value
        elif isinstance(value, (dict, list)):
            yield from _tensors_in(value)


class _TensorFinder(pickle.Pickler):
    """Looks through all that pickle would keep of an object, and leaves at the first tensor."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise ValueError("a tensor")
        # Functions and classes are no values of an object, and pickle knows few of them.
        return (str, ()) if callable(value) and value is not str else NotImplemented


def holds_tensors(value: Any) -> bool:
    """True if an object has a tensor among its attributes, however deep; so is one taken to that does not show them."""
    if isinstance(value, _PLAIN):
        return False
    try:
        _TensorFinder(io.BytesIO()).dump(value)
    except Exception:
        # Also what cannot be pickled: a generator, a lock.
        return True
    return False
