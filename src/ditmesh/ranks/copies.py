"""A module of this process, copied to other processes of the machine, and kept equal to it.

It is sent as a parcel (`engine.parcels`). Later only what has changed is sent: tensors by their identity and version,
attributes by their identity, or by their items where they are lists.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..core.patching import is_patch

# Attributes of a module that are not copied: what parallelises it here, and hooks, which are put on and off.
_OURS = ("_ditmesh_engine", "_ditmesh_followed")


class ModuleChange(NamedTuple):
    """The changes in one module of a copy: tensors and attributes by name, and the names that are gone."""

    module: int
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    attributes: dict[str, Any]
    gone: tuple[str, ...]


class _Seen(NamedTuple):
    """A module as the copies have it."""

    parameters: dict[str, Any]
    buffers: dict[str, Any]
    attributes: dict[str, Any]


class CopiedModule:
    """The side of a copied module's own process.

    Args:
        module: it is copied as it is now, before anything is put on it that is to stay here.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._order = list(module.modules())
        self.numbers = {id(one): number for number, one in enumerate(self._order)}
        self._seen: list[_Seen] = []
        self.note()

    def note(self) -> None:
        """The copies are as the module is now."""
        self._seen = [_seen(one) for one in self._order]

    @property
    def same_modules(self) -> bool:
        """True if it still consists of the modules that were copied."""
        order = list(self.module.modules())
        return len(order) == len(self._order) and all(a is b for a, b in zip(order, self._order, strict=True))

    def changes(self, rewritten: Collection[str] = ()) -> list[ModuleChange]:
        """The state of the module that the copies do not have.

        Args:
            rewritten: names of parameters that may have been written to where nothing shows it: in inference mode torch
                counts no versions.
        """
        wanted: dict[int, set[str]] = {}
        for name in rewritten:
            path, _, own = name.rpartition(".")
            with suppress(AttributeError):
                wanted.setdefault(id(self.module.get_submodule(path)), set()).add(own)
        found = []
        for number, (one, seen) in enumerate(zip(self._order, self._seen, strict=True)):
            more = wanted.get(id(one), ())
            state = vars(one)
            parameters = _different(state["_parameters"], seen.parameters, more)
            buffers = _different(state["_buffers"], seen.buffers, more)
            now = _attributes(one)
            changed = {n: v for n, v in now.items() if n not in seen.attributes or not _is(v, seen.attributes[n])}
            gone = tuple(n for n in seen.attributes if n not in now)
            if parameters or buffers or changed or gone:
                found.append(ModuleChange(number, parameters, buffers, changed, gone))
        return found


def applied(module: nn.Module, changes: Sequence[ModuleChange]) -> None:
    """Bring a copy to the module's present state."""
    order = list(module.modules())
    for change in changes:
        one = order[change.module]
        vars(one)["_parameters"].update(change.parameters)
        vars(one)["_buffers"].update(change.buffers)
        vars(one).update(change.attributes)
        for name in change.gone:
            vars(one).pop(name, None)


def _seen(one: nn.Module) -> _Seen:
    state = vars(one)
    return _Seen(
        {name: _tensor(value) for name, value in state["_parameters"].items()},
        {name: _tensor(value) for name, value in state["_buffers"].items()},
        {name: _held(value) for name, value in _attributes(one).items()},
    )


def _attributes(one: nn.Module) -> dict[str, Any]:
    """A module's own attributes, without those of torch and ours."""
    return {
        name: value
        for name, value in vars(one).items()
        if name not in _TORCH
        and name not in _OURS
        and not is_patch(value)
        and not name.startswith(("_forward_", "_backward_"))
    }


# Attributes that every module has.
_TORCH = frozenset(vars(nn.Module()))


def _tensor(value: Tensor | None) -> Any:
    if value is None:
        return None
    return weakref.ref(value), None if value.is_inference() else value._version, value.data_ptr()


def _different(now: dict[str, Any], seen: dict[str, Any], rewritten: Collection[str]) -> dict[str, Any]:
    found = {}
    for name, value in now.items():
        before = seen.get(name, _tensor)
        if value is None or before is None or before is _tensor:
            if value is not before:
                found[name] = value
            continue
        reference, version, place = before
        same = reference() is value and place == value.data_ptr() and name not in rewritten
        if not same or (version is not None and value._version != version):
            found[name] = value
    return found


class _Items(NamedTuple):
    """A list or a dictionary of an attribute, with what was in it."""

    itself: Any
    items: tuple[Any, ...]


def _held(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value)
    if type(value) in (list, dict, set):
        return _Items(value, _inside(value))
    return value


def _inside(value: Any) -> tuple[Any, ...]:
    return tuple(value.items() if isinstance(value, dict) else value)


def _is(now: Any, held: Any) -> bool:
    """True if an attribute is what it was."""
    if isinstance(now, Tensor):
        return isinstance(held, tuple) and len(held) == 3 and not _different({"": now}, {"": held}, ())
    if isinstance(held, _Items):
        if now is not held.itself:
            return False
        items = _inside(now)
        return len(items) == len(held.items) and all(_item_is(a, b) for a, b in zip(items, held.items, strict=True))
    return now is held


def _item_is(now: Any, before: Any) -> bool:
    if type(now) is tuple and type(before) is tuple and len(now) == len(before):
        return all(a is b for a, b in zip(now, before, strict=True))
    return now is before


def names_by_value(folders: Sequence[str]) -> list[Any]:
    """Modules of plug-ins in these folders that another process could not import by their names."""
    import importlib.util

    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not any(os.path.abspath(file).startswith(os.path.abspath(one) + os.sep) for one in folders):
            continue
        try:
            known = importlib.util.find_spec(name.partition(".")[0]) is not None and name.isidentifier()
        except (ImportError, ValueError, AttributeError):
            known = False
        if not known:
            found.append(module)
    return found
