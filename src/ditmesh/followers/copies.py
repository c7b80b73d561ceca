"""A module of this process, copied to other processes of the machine, and kept equal to it.

It is sent as a parcel (`objects`). Later only what has changed is sent. Tensors, attributes and hooks are
compared by content: most of what writes to a weight (`fuse_lora`, ``.data``, fused optimizers, numpy, CUDA graphs)
leaves its identity and its version as they were.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import filterfalse
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core.digests import tensor_digest
from ..core.patching import is_patch
from ..core.request import is_stand_in
from ..core.values import version_of
from ..engine.targets import COPY, ENGINE, FOLLOWED, REDUCE
from ..errors import InputError, first_line
from .messages import NumberedTensors, dumped

PACKAGE = __name__.partition(".")[0]

# Attributes that are not copied later: those that every module has, but for the one that decides what it computes, and
# those by which it is parallelised here.
_INTERNAL = (frozenset(vars(nn.Module())) - {"training"}) | {ENGINE, FOLLOWED, COPY, REDUCE, "_compiled_call_impl"}

# What a module's state consists of, by kind; the keys of `ModuleChange`.
PARAMETERS, BUFFERS, ATTRIBUTES, HOOKS = "_parameters", "_buffers", "attributes", "hooks"

_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"
# Of each kind of hooks, the dictionaries of flags in which a hook may stand besides.
_FLAGS = {
    _BEFORE: ("_forward_pre_hooks_with_kwargs",),
    _AFTER: ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}

_AGAIN = "call ditmesh.restore(...) on it, and parallelize it again with ditmesh.Followers.parallelize(...)"

# Types of values that are compared as they are.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


class Hook(NamedTuple):
    """A hook of the program.

    Attributes:
        kind: the dictionary of the module in which it stands.
        flags: the dictionaries of flags in which it stands besides.
        place: number of ditmesh's own hooks before it.
    """

    kind: str
    hook: Callable[..., Any]
    flags: tuple[str, ...]
    place: int


class ModuleChange(NamedTuple):
    """The changes in one module of a copy, by kind and name.

    Attributes:
        module: its number.
        values: new parameters, buffers and attributes; under `HOOKS` all hooks of the program.
        gone: kinds and names of what is not there any more.
    """

    module: int
    values: dict[tuple[str, str], Any]
    gone: tuple[tuple[str, str], ...]


class _Fixed(NamedTuple):
    """Attributes of a module that are what they are as long as they are the same objects.

    Attributes:
        entries: number of all entries in its dictionary, by which a new one shows.
        names, values: of the attributes.
        contents: by kind and name.
    """

    entries: int
    names: list[str]
    values: list[Any]
    contents: dict[tuple[str, str], Any]


class _Unreadable(NamedTuple):
    """A value that cannot be pickled: it is known by itself only."""

    value: Any
    reason: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unreadable) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


# Of each module, by kind and name, a value that is equal to an earlier one if the content is.
_Contents = list[dict[tuple[str, str], Any]]


class CopiedModule:
    """The side of a copied module's own process; it is copied before anything that is to stay here is put on it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._order = list(module.modules())
        self.numbers = {id(one): number for number, one in enumerate(self._order)}
        self._structure = _structure(module)
        self._classes = {kind: _functions(kind) for kind in _classes(self._order)}
        # Contents of tensors that were read, each by the id of the tensor and its sign at that time.
        self._read: dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}
        # Of modules with attributes that cannot change in themselves: those, and their contents.
        self._fixed: dict[int, _Fixed] = {}
        self._seen: _Contents = []
        self.note()

    def note(self) -> None:
        """The copies are as the module is now: a call that runs on all ranks changes them all alike.

        Only tensors that show that they have changed are read again.
        """
        self._seen = self._contents(False, ())

    def changes(self, read: bool = True, rewritten: Collection[str] = ()) -> list[ModuleChange]:
        """The state of the module that the copies do not have.

        ``read``: compare the content of every tensor; else of those that show a change, and of the ``rewritten``.
        `InputError`: something has changed that cannot be changed on a copy; it is named.
        """
        self._check()
        return self._differences(read, rewritten)

    def changed_tensors(self, changes: Sequence[ModuleChange] | None = None) -> list[str]:
        """Names of the parameters and buffers that have changed, of all or in some changes."""
        paths = {id(one): path for path, one in self.module.named_modules()}
        return [
            f"{paths.get(id(self._order[change.module]), '')}.{name}".lstrip(".")
            for change in (self._differences(True, ()) if changes is None else changes)
            for kind, name in (*change.values, *change.gone)
            if kind in (PARAMETERS, BUFFERS)
        ]

    def _differences(self, read: bool, rewritten: Collection[str]) -> list[ModuleChange]:
        now = self._contents(read, rewritten)
        changes = []
        for number, (seen, new) in enumerate(zip(self._seen, now, strict=True)):
            changed = [key for key, value in new.items() if key not in seen or seen[key] != value]
            gone = tuple(key for key in seen if key not in new)
            for key in changed:
                if isinstance(new[key], _Unreadable):
                    raise InputError(
                        f"{self._entry(number, key)} has changed and cannot be sent to the other ranks "
                        f"({new[key].reason}); take it off, or give it a value that can be pickled"
                    )
            if changed or gone:
                values = dict(_state(self._order[number]))
                changes.append(ModuleChange(number, {key: values[key] for key in changed}, gone))
        return changes

    def _entry(self, number: int, key: tuple[str, str]) -> str:
        kind, name = key
        return f"a hook of {self._path(number)}" if kind == HOOKS else self._path(number, name)

    def _path(self, number: int, name: str = "") -> str:
        """The path of a module, or of an entry of it."""
        path = next(path for path, module in self.module.named_modules() if module is self._order[number])
        return f"{path}.{name}".strip(".") or type(self.module).__name__

    def _check(self) -> None:
        """Refuse what a copy cannot be given later."""
        name = type(self.module).__name__
        if _structure(self.module) != self._structure:
            raise InputError(f"this {name} has other modules than when it was copied, or compiled ones; {_AGAIN}")
        for kind, functions in self._classes.items():
            now = _functions(kind)
            changed = next((key for key in {**functions, **now} if functions.get(key) is not now.get(key)), None)
            if changed is not None:
                raise InputError(
                    f"{changed!r} of the class {kind.__name__} was replaced after this {name} was copied to the other "
                    f"ranks, which have the class as it was; replace it on the instance, or {_AGAIN}"
                )
        everywhere = nn.modules.module
        for hook in (*everywhere._global_forward_pre_hooks.values(), *everywhere._global_forward_hooks.values()):
            if not is_ours(hook):
                raise InputError(
                    f"{_words(hook)}, a forward hook of all modules of this process, would run on this rank alone; "
                    "take it off, and put it on the module itself"
                )

    def _contents(self, read: bool, rewritten: Collection[str]) -> _Contents:
        """The content of every module's state."""
        named: set[int] = set()
        for name in rewritten:
            with suppress(AttributeError):
                named.add(id(self.module.get_parameter(name)))
        tensors = NumberedTensors()
        states = [self._module_content(one, tensors) for one in self._order]
        before, self._read = self._read, {}
        unread = []
        for tensor in tensors.found:
            sign, known = _sign(tensor), before.get(id(tensor))
            if read or known is None or known[0] != sign or id(tensor) in named:
                unread.append(tensor)
            self._read[id(tensor)] = sign, () if known is None else known[1]
        for tensor in unread:
            content = type(tensor), tensor.device.type, tensor_digest(tensor)
            self._read[id(tensor)] = self._read[id(tensor)][0], content
        contents = [self._read[id(tensor)][1] for tensor in tensors.found]
        for state in states:
            for key, value in state.items():
                if type(value) is _Pickled:
                    state[key] = value.data, [contents[number] for number in value.tensors]
        return states

    def _module_content(self, module: nn.Module, tensors: NumberedTensors) -> dict[tuple[str, str], Any]:
        """The content of one module's state."""
        data, fixed = vars(module), self._fixed.get(id(module))
        if fixed is not None and len(data) == fixed.entries and all(map(is_, map(data.get, fixed.names), fixed.values)):
            state = dict(fixed.contents)
        else:
            attributes = dict(_attributes(module))
            state = {key: self._content(value, tensors) for key, value in attributes.items()}
            self._fixed.pop(id(module), None)
            if all(type(value) in _PLAIN for value in attributes.values()):
                names = [name for _, name in attributes]
                self._fixed[id(module)] = _Fixed(len(data), names, list(attributes.values()), dict(state))
        for key, value in (*_tensors(module), *_hooks_of(module)):
            state[key] = self._content(value, tensors)
        return state

    def _content(self, value: Any, tensors: NumberedTensors) -> Any:
        """A value's content, in which tensors stand by their numbers."""
        if isinstance(value, Tensor):
            return _Pickled(b"", (tensors.number(value),))
        if _is_plain(value):
            return type(value), repr(value)
        numbers: list[int] = []

        def stand_in(obj: Any) -> Any:
            if isinstance(obj, Tensor):
                numbers.append(tensors.number(obj))
                return ("tensor",)
            if isinstance(obj, nn.Module) and id(obj) in self.numbers:
                return ("module", self.numbers[id(obj)])
            return ("patch",) if is_patch(obj) else None

        try:
            return _Pickled(dumped(value, stand_in), tuple(numbers))
        except Exception as error:
            return _Unreadable(value, f"{_words(value)}: {first_line(error)}")


def _sign(tensor: Tensor) -> tuple[Any, ...]:
    """What shows at once that a tensor is another one, or was written to; if it does not, nothing is known."""
    try:
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        address = 0
    return weakref.ref(tensor), version_of(tensor), address


def _is_plain(value: Any) -> bool:
    """True if a value's words tell all of it."""
    if type(value) in _PLAIN:
        return True
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in (list, tuple, set) and all(map(_is_plain, value))


class _Pickled(NamedTuple):
    """A pickled value, and the numbers of its tensors."""

    data: bytes
    tensors: tuple[int, ...]


def _structure(module: nn.Module) -> list[tuple[str, int, type, bool]]:
    """Path, identity and class (not one that stands in for it) of every module, and whether it is compiled."""
    return [
        (path, id(one), next(filterfalse(is_stand_in, type(one).__mro__)), one._compiled_call_impl is not None)
        for path, one in module.named_modules(remove_duplicate=False)
    ]


def _classes(modules: Sequence[nn.Module]) -> set[type]:
    """The classes of modules, and those that they come from."""
    kinds = {kind for one in modules for kind in type(one).__mro__ if issubclass(kind, nn.Module)}
    return {kind for kind in kinds if kind is not nn.Module and not is_stand_in(kind)}


def _functions(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if isinstance(value, FunctionType)}


def _state(module: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """A module's own state, by kind and name, without what is torch's and ours."""
    yield from _tensors(module)
    yield from _attributes(module)
    yield from _hooks_of(module)


def _tensors(one: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    own = vars(one)
    for kind in (PARAMETERS, BUFFERS):
        for name, value in own[kind].items():
            yield (kind, name), value


def _attributes(one: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    own = vars(one)
    for name in own.keys() - _INTERNAL:
        if not is_patch(value := own[name]):
            yield (ATTRIBUTES, name), value


def _hooks_of(one: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    own = vars(one)
    if (own[_BEFORE] or own[_AFTER]) and (hooks := _hooks(one)):
        yield (HOOKS, ""), hooks


def _hooks(module: nn.Module) -> list[Hook]:
    """The hooks of the program on a module."""
    hooks = []
    for kind, flags in _FLAGS.items():
        place = 0
        for key, hook in vars(module)[kind].items():
            if is_ours(hook):
                place += 1
            else:
                hooks.append(Hook(kind, hook, tuple(flag for flag in flags if key in vars(module)[flag]), place))
    return hooks


def is_ours(hook: Any) -> bool:
    """True if a hook is one of ditmesh's own, which stand on every rank anyway."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] == PACKAGE


def take_off_hooks(one: nn.Module) -> Callable[[], None]:
    """Take ditmesh's own hooks off a module; returns what puts them back at their places among the program's."""
    taken: list[tuple[dict[Any, Any], dict[Any, Any], set[Any]]] = []
    for kind, flags in _FLAGS.items():
        ours = {key for key, hook in vars(one)[kind].items() if is_ours(hook)}
        for held in [vars(one)[name] for name in (kind, *flags)] if ours else ():
            taken.append((held, dict(held), ours))
            for key in ours:
                held.pop(key, None)

    def put_back() -> None:
        for held, before, ours in taken:
            now = dict(held)
            held.clear()
            # Meanwhile the program may have taken hooks off, and put others on.
            held.update({key: value for key, value in before.items() if key in ours or key in now})
            held.update(now)

    return put_back


def _words(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__qualname__} of {getattr(named, '__module__', '?')}"


def apply_changes(module: nn.Module, changes: Sequence[ModuleChange]) -> None:
    """Bring a copy to the module's present state."""
    order = list(module.modules())
    for change in changes:
        submodule = order[change.module]
        state = vars(submodule)
        for (kind, name), value in change.values.items():
            if kind == HOOKS:
                _put_hooks(submodule, value)
            else:
                (state if kind == ATTRIBUTES else state[kind])[name] = value
        for kind, name in change.gone:
            if kind == HOOKS:
                _put_hooks(submodule, ())
            else:
                (state if kind == ATTRIBUTES else state[kind]).pop(name, None)


def _put_hooks(module: nn.Module, hooks: Sequence[Hook]) -> None:
    """Replace the program's hooks on a module; ditmesh's own stay where they are among them."""
    for kind, flags in _FLAGS.items():
        held, state = vars(module)[kind], [vars(module)[flag] for flag in flags]
        ours = [(key, hook, [key in flag for flag in state]) for key, hook in held.items() if is_ours(hook)]
        for kept in (held, *state):
            kept.clear()
        new = [hook for hook in hooks if hook.kind == kind]
        for place in range(len(ours) + 1):
            for hook in new:
                if hook.place == place or (hook.place > place == len(ours)):
                    key = RemovableHandle(held).id
                    held[key] = hook.hook
                    for flag in hook.flags:
                        vars(module)[flag][key] = True
            if place < len(ours):
                key, function, marks = ours[place]
                held[key] = function
                for flag, marked in zip(state, marks, strict=True):
                    if marked:
                        flag[key] = True
