"""Reading and replacing a block's arguments by path, however they were passed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

T = TypeVar("T")
MISSING = object()


class Arguments:
    """The arguments of one call, by name; `args` and `kwargs` hold them as they were passed.

    Paths such as ``"image_rotary_emb.0"`` reach into tuples, lists, dicts and dataclasses. Containers are copied
    before they are changed, so the caller's own objects stay as they are.
    """

    def __init__(self, names: tuple[str, ...], args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        self.names = names
        self.args = list(args)
        self.kwargs = dict(kwargs)

    @property
    def passed(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named ones, as they are passed on."""
        return self.args, self.kwargs

    def copy(self) -> Arguments:
        """The same arguments, to be changed without these."""
        return Arguments(self.names, self.args, self.kwargs)

    def get(self, path: str) -> Any:
        """The value at ``path``, or `MISSING`."""
        if "." not in path:
            return self._top(path)
        head, *rest = path.split(".")
        value = self._top(head)
        for part in rest:
            value = _child(value, part)
        return value

    def set(self, path: str, value: Any) -> None:
        """Replace the value at ``path``."""
        head, *rest = path.split(".")
        changed, position = _replaced(self._top(head), rest, value), self._position(head)
        if position is None:
            self.kwargs[head] = changed
        else:
            self.args[position] = changed

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Every tensor and integer, with its path."""
        return ((path, value) for path, value in self._values() if _is_leaf(value))

    def others(self) -> Iterator[tuple[str, Any]]:
        """Every value that is neither a tensor nor an integer, with its path."""
        return ((path, value) for path, value in self._values() if not _is_leaf(value))

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Every value that is no container, with its path."""
        for position, value in enumerate(self.args):
            yield from _inside(self.names[position] if position < len(self.names) else f"*{position}", value)
        for name, value in self.kwargs.items():
            yield from _inside(name, value)

    def _position(self, name: str) -> int | None:
        if name.startswith("*"):
            # Arguments beyond the named ones (`*args`) go by their position.
            position = int(name[1:])
            return position if len(self.names) <= position < len(self.args) else None
        place = _places(self.names).get(name)
        return place if place is not None and place < len(self.args) else None

    def _top(self, name: str) -> Any:
        position = self._position(name)
        return self.kwargs.get(name, MISSING) if position is None else self.args[position]


@cache
def _places(names: tuple[str, ...]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


# By function, which its entry does not keep alive: a function around a call may refer to a whole model.
_PARAMETER_NAMES: WeakKeyDictionary[Callable[..., Any], tuple[str, ...]] = WeakKeyDictionary()


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters that can be passed by position, without ``self``."""
    if function not in _PARAMETER_NAMES:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
        _PARAMETER_NAMES[function] = tuple(names[1:] if names[:1] == ["self"] else names)
    return _PARAMETER_NAMES[function]


def given(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without those that are None and would be if they were left out."""
    parameters = inspect.signature(function).parameters
    unset = {name for name, parameter in parameters.items() if parameter.default is None}
    return {name: value for name, value in call.items() if value is not None or name not in unset}


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass that are set, by name; None: the value is of another kind."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if hasattr(value, one.name)}


def with_fields(value: T, changes: Mapping[str, Any]) -> T:
    """A copy of a dataclass, frozen or not, with some fields changed; nothing is computed again from them."""
    made = copy.copy(value)
    for name, item in changes.items():
        object.__setattr__(made, name, item)
    return made


def _child(value: Any, part: str) -> Any:
    if (fields := fields_of(value)) is not None:
        return fields.get(part, MISSING)
    if isinstance(value, dict):
        return value.get(_key(value, part), MISSING)
    if isinstance(value, (tuple, list)) and int(part) < len(value):
        return value[int(part)]
    return MISSING


def _key(container: dict[Any, Any], part: str) -> Any:
    """The key that a part of a path names: some dicts have numbers for keys."""
    return part if part in container else next((key for key in container if str(key) == part), part)


def _replaced(container: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    head, *rest = path
    if (fields := fields_of(container)) is not None:
        return with_fields(container, {head: _replaced(fields[head], rest, value)})
    if isinstance(container, dict):
        key = _key(container, head)
        return {**container, key: _replaced(container[key], rest, value)}
    items = list(container)
    items[int(head)] = _replaced(items[int(head)], rest, value)
    if isinstance(container, tuple):
        # A named tuple takes its items one by one.
        return type(container)(*items) if hasattr(container, "_fields") else tuple(items)
    return items


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and not isinstance(value, bool))


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif (items := value if isinstance(value, dict) else fields_of(value)) is not None:
        for key, item in items.items():
            yield from _inside(f"{path}.{key}", item)
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for index, item in enumerate(value):
            yield from _inside(f"{path}.{index}", item)
    else:
        yield path, value


def covers(known: str, path: str) -> bool:
    """True if ``path`` is ``known`` or lies below it."""
    return path == known or path.startswith(known + ".")
