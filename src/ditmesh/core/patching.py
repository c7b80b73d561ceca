"""Attributes of one instance replaced, and layers around one module's forward; taken off again in any order.

Others patch the same objects: accelerate's and diffusers' hooks wrap ``forward``, users replace methods. A patch is
therefore taken off by identity. Where it is still on top, what was there before is put back; where others have wrapped
it since, their wrapper stays and the patch under it does nothing from then on but call what it had replaced.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

if TYPE_CHECKING:
    from torch import nn

    from .arguments import Arguments

from ..errors import InputError

_MISSING = object()
# Whether `refuse_reading` lets state dicts with parts of weights through.
_PARTS_READABLE: ContextVar[bool] = ContextVar("parts_readable", default=False)
# Methods of diffusers and of transformers that load an adapter, for which they read the names of all weights.
_LOADERS = ("load_lora_adapter", "load_adapter")

# Calls the next layer, or the pipeline's call.
Proceed = Callable[..., Any]
Layer = Callable[..., Any]


class _Replacement:
    """The callable that a `Patch` puts on an instance."""

    def __init__(self, patch: Patch, replacement: Callable[..., Any]) -> None:
        # `inspect.signature` follows ``__wrapped__``: callers see the parameters of the original.
        functools.update_wrapper(self, replacement)
        self.__wrapped__ = getattr(replacement, "__wrapped__", patch.original)
        self.patch = patch
        self.call = replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the owner has what was replaced: a replacement knows the owner alone, and a pipeline that copies its
        # scheduler would take the copy's steps on the scheduler itself.
        return copy.deepcopy(self.patch.original, memo)


class _Unpicklable:
    """A function that is called as it is, and raises where it is to be pickled."""

    def __init__(self, function: Callable[..., Any], reason: str) -> None:
        self._function, self._reason = function, reason

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise InputError(self._reason)


def refuse_pickling(kind: type[Any], whole: str, owner: Any, protocol: SupportsIndex) -> tuple[Any, ...]:
    """The result of ``owner.__reduce_ex__(protocol)`` for `copy.copy` and `copy.deepcopy`; pickling it is refused.

    ``kind`` is the class that knows how to reduce the owner, and ``whole`` the name of the class that is parallelised.
    """
    name = kind.__name__
    reason = (
        f"this {name} {'is' if name == whole else f'belongs to a {whole} that is'} parallelised, and what connects it "
        "to other ranks can neither be pickled nor be saved by torch.save; call ditmesh.restore(...) first, on every "
        "rank"
    )
    function, args, *state = cast(Any, kind).__reduce_ex__(owner, protocol)
    if state and isinstance(state[0], dict):
        # A copy is nothing that was parallelised.
        state[0] = {key: value for key, value in state[0].items() if key != "__reduce_ex__"}
    return _Unpicklable(function, reason), args, *state


class Patch:
    """``owner.name`` replaced on the instance until `undo`; ``original``: the replaced attribute, bound."""

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = getattr(owner, name)
        self.undone = False
        self._owner, self._name = owner, name
        self._had = vars(owner).get(name, _MISSING)
        self._mine = _Replacement(self, replacement)
        vars(owner)[name] = self._mine

    def replace(self, replacement: Callable[..., Any]) -> None:
        """Let another function stand in, at the same place among other patches."""
        self._mine.call = replacement

    def undo(self) -> None:
        """Restore the attribute, or, under another library's wrapper, do nothing from now on. Harmless twice."""
        if self.undone:
            return
        self.undone, self._mine.call = True, self.original
        if vars(self._owner).get(self._name) is not self._mine:
            return
        had = self._had
        # Patches that lay under this one and were undone before it.
        while isinstance(had, _Replacement) and had.patch.undone:
            had = had.patch._had
        if had is _MISSING:
            del vars(self._owner)[self._name]
        else:
            vars(self._owner)[self._name] = had

    # A patch is what takes it off.
    __call__ = undo


def wrap_methods(owner: Any, names: Iterable[str], around: Callable[..., Any]) -> Callable[[], None]:
    """Put ``around(name, method, *args, **kwargs)`` in the place of methods that there are; returns the undo."""
    undo = ExitStack()
    for name in names:
        if hasattr(owner, name):
            patch = Patch(owner, name, getattr(owner, name))
            patch.replace(partial(around, name, patch.original))
            undo.callback(patch)
    return undo.close


def refuse_saving(owner: Any, error: Exception) -> Callable[[], None]:
    """Let a model, or its pipeline, that is not whole raise ``error`` instead of being saved; returns the undo."""
    return wrap_methods(owner, ("save_pretrained", "save_lora_adapter"), _refusal(error))


def refuse_loading(model: nn.Module, cut: Callable[[], Collection[int]], held: str) -> Callable[[], None]:
    """Let a model refuse a state that has whole weights where it has parts of them; returns what undoes this.

    ``cut`` gives the ids of the parameters that are parts, and ``held`` is what they are, in words.
    """

    def load(_: str, method: Callable[..., Any], state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        parts, own = cut(), dict(model.named_parameters())
        # Of adapters, which are loaded in this way too, only those that are there in another size.
        known = [name for name in state if name in own and id(own[name]) in parts]
        wrong = [name for name in known if "lora_" not in name or own[name].shape != state[name].shape]
        if wrong:
            raise InputError(
                f"load_state_dict(...) was given {wrong[0]!r} whole, and this model holds {held} of it; call "
                "ditmesh.restore(...) first, load the weights, and parallelize again"
            )
        return method(state, *args, **kwargs)

    return wrap_methods(model, ("load_state_dict",), load)


def refuse_reading(model: nn.Module, cut: Callable[[], Collection[int]], held: str) -> Callable[[], None]:
    """Let a model, and every module in it, refuse a state dict with parts of weights; returns what undoes this.

    What a rank lacks would come from other ranks, and usually one rank alone asks, in order to save: so nothing is
    gathered. Loading an adapter, and `parts_readable`, are let through. Arguments are those of `refuse_loading`.
    """

    def refuse(module: nn.Module, *_: Any) -> None:
        if _PARTS_READABLE.get() or not (parts := cut()):
            return
        name = next((name for name, one in module.named_parameters() if id(one) in parts), None)
        if name is not None:
            raise InputError(
                f"state_dict() of {type(module).__name__} would have {held} in the place of {name!r}; call "
                "ditmesh.restore(...) on every rank first, read or save the weights, and parallelize again"
            )

    def load(_: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with parts_readable():
            return method(*args, **kwargs)

    undo = ExitStack()
    for module in model.modules():
        undo.callback(module.register_state_dict_pre_hook(refuse).remove)
    undo.callback(wrap_methods(model, _LOADERS, load))
    return undo.close


@contextmanager
def parts_readable() -> Iterator[None]:
    """State dicts may have parts of weights inside: for code that asks for names only, or puts the parts together."""
    before = _PARTS_READABLE.set(True)
    try:
        yield
    finally:
        _PARTS_READABLE.reset(before)


def refuse_calls(model: nn.Module, error: Exception) -> Callable[[], None]:
    """Let a model that is not whole raise ``error`` instead of computing or being saved; returns what undoes this."""
    undo = ExitStack()
    undo.callback(model.register_forward_pre_hook(_refusal(error), prepend=True).remove)
    undo.callback(refuse_saving(model, error))
    return undo.close


def _refusal(error: Exception) -> Callable[..., Any]:
    """Raises an error of the same kind and words."""
    # Not the error itself: by its traceback the model would keep what the failed call had in its hands, and where that
    # is a graph with the model in it, for good.
    kind, words = type(error), error.args

    def refuse(*_: Any, **__: Any) -> Any:
        raise kind(*words)

    return refuse


def is_patch(value: Any) -> bool:
    """True if an attribute was set by a `Patch`."""
    return isinstance(value, _Replacement)


def put_aside(owners: Iterable[Any]) -> Callable[[], None]:
    """Leave objects for a while as they were without patches; returns what puts the patches back.

    `InputError`: when they are put back, and another has replaced the same attribute meanwhile.
    """
    held: list[tuple[dict[str, Any], str, _Replacement, Any]] = []
    for owner in owners:
        state: dict[str, Any] = vars(owner)
        for name, value in list(state.items()):
            if isinstance(value, _Replacement):
                below = value
                while isinstance(below, _Replacement):
                    below = below.patch._had
                held.append((state, name, value, below))
                state[name] = below
                if below is _MISSING:
                    del state[name]

    def put_back() -> None:
        for state, name, _, below in held:
            if state.get(name, _MISSING) is not below:
                raise InputError(f"{name!r} of a parallelised module was replaced; restore the model and begin again")
        for state, name, value, _ in held:
            state[name] = value

    return put_back


class CallChain:
    """Everything that stands around one module's forward, as one patch: layers, the first added innermost.

    A layer is called as ``layer(proceed, arguments)``, with the call's `Arguments`; ``proceed(arguments)`` is the next
    one inside, in the end the module's own forward. A layer changes copies, as those outside of it read theirs after
    the call, too. The patch is there only while there are layers.
    """

    def __init__(self, module: nn.Module) -> None:
        from .arguments import Arguments, parameter_names  # torch, which patches do without

        self._module = module
        self._bind = partial(Arguments, parameter_names(type(module).forward))
        self._layers: list[Layer] = []
        self._patch: Patch | None = None

    @property
    def layers(self) -> list[Layer]:
        """The layers, outermost first."""
        return self._layers[::-1]

    def add(self, layer: Layer) -> Callable[[], None]:
        """Put a layer around all that are there; returns what takes it off again."""
        if self._patch is None:
            self._patch = Patch(self._module, "forward", self._module.forward)
        self._layers.append(layer)
        self._compose()

        def remove() -> None:
            # By identity: equal bound methods of equal objects are not the same layer.
            self._layers[:] = [other for other in self._layers if other is not layer]
            self._compose()

        return remove

    def _compose(self) -> None:
        if self._patch is None:
            return
        bind, original = self._bind, self._patch.original

        def call(arguments: Arguments) -> Any:
            return original(*arguments.args, **arguments.kwargs)

        outermost: Proceed = functools.reduce(lambda proceed, layer: partial(layer, proceed), self._layers, call)
        self._patch.replace(lambda *args, **kwargs: outermost(bind(args, kwargs)))
        if not self._layers:
            self._patch.undo()
            self._patch = None
