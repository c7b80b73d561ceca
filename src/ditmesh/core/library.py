"""The library class of an object: a review of a class holds for that very class, not for its name."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn

from .request import is_stand_in

# Attributes that a subclass may have without changing what the methods of its base compute.
_OWN = frozenset(("__init__", "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__"))
# Packages of layers that compute what the layer they replace computes: adapters, quantised weights.
_LAYERS = frozenset(
    ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "optimum", "ditmesh")
)


def library_class(kind: type) -> type | None:
    """The class of diffusers that ``kind`` is: itself, or one that it inherits all methods of; None: another.

    A fork of the same name, a module that a model's repository brings along (``diffusers_modules``) and a subclass
    that replaces a method are others.
    """
    # A class that stands around one object's calls computes what its base does, and holds the object.
    return _library_class(next(base for base in kind.__mro__ if not is_stand_in(base)))


@cache
def _library_class(kind: type) -> type | None:
    for number, base in enumerate(kind.__mro__):
        package = base.__module__.partition(".")[0]
        if package == "diffusers" and getattr(sys.modules.get(base.__module__), base.__name__, None) is base:
            # Classes that torch puts in front (FSDP2's) leave what is computed as it is.
            before = [child for child in kind.__mro__[:number] if child.__module__.partition(".")[0] != "torch"]
            own = {name for child in before for name in vars(child)} - _OWN
            members = [getattr(base, name, None) for name in own]
            code = (property, functools.cached_property)
            return None if any(callable(member) or isinstance(member, code) for member in members) else base
    return None


def library_name(value: object) -> str:
    """Name of the class of diffusers that an object is, by which tables know it; empty for a class of others."""
    found = library_class(type(value))
    return "" if found is None else found.__name__


def is_published(model: nn.Module, lists: Iterable[str]) -> bool:
    """True if a model of diffusers computes what its class does in the library.

    Its forward and its blocks, in ``lists``, are to be those that the file of its class names, and what is inside the
    blocks (modules, attention processors, forwards) is to come from libraries of layers: torch, peft, quantisers.
    """
    kind = library_class(type(model))
    if kind is None or not _is_of_layers(model.forward):
        return False
    named = vars(sys.modules[kind.__module__])
    for path in lists:
        try:
            blocks = model.get_submodule(path)
        except AttributeError:
            # A layout of another version of the class, which its reader refuses.
            continue
        for block in blocks.children():
            # The wrapper that torch.compile puts around a block.
            found = library_class(type(getattr(block, "_orig_mod", block)))
            if found is None or named.get(found.__name__) is not found:
                return False
        modules = [*blocks.modules()]
        kinds = {type(part) for one in modules for part in (one, getattr(one, "processor", None)) if part is not None}
        forwards = {id(own): own for own in (vars(one).get("forward", type(one).forward) for one in modules)}
        if not _is_of_layers(*kinds, *forwards.values()):
            return False
    return True


def is_of_libraries(value: Any) -> bool:
    """True if a function or callable object comes from a library of layers, or wraps what comes from one."""
    # A name at hand says most; what it does not say has to be unwrapped.
    if str(getattr(value, "__module__", "")).partition(".")[0] in _LAYERS:
        return True
    return _is_of_layers(value)


def _is_of_layers(*values: Any) -> bool:
    """True if classes and functions, without what wraps them, come from a library of layers."""
    for value in values:
        value = inspect.unwrap(value)
        while isinstance(value, functools.partial):
            value = inspect.unwrap(value.func)
        if str(getattr(value, "__module__", None) or "").partition(".")[0] not in _LAYERS:
            return False
    return True
