"""Forms of a call: which arguments came, and of what kind; a layout holds for the forms it was derived from.

The probe notes the forms of its own calls. A call of another form (another argument, a tensor of another rank or
class of dtype, another flag) may take another way through the model: nothing that the probe found need be true of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import MISSING, Arguments
from ..errors import LayoutError
from .types import CallForm, Kind, TokenLayout

WAY_OUT = "write a layout (see docs/layouts.md) and pass it as parallelize(..., layout=...)"

# Arguments of a forward that decide how its result is wrapped, and nothing else.
_OF_THE_RESULT = ("return_dict",)


@cache
def dtype_class(dtype: torch.dtype) -> str:
    """``"float"``, ``"complex"``, ``"bool"`` or ``"int"``: what decides how a model treats a tensor."""
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "float"
    return "bool" if dtype is torch.bool else "int"


# Shapes repeat from step to step, and a call is to be recognised in microseconds.
@lru_cache(maxsize=4096)
def _kind_of_tensor(dtype: torch.dtype, shape: torch.Size) -> Kind:
    return (dtype_class(dtype), len(shape), *(size == 1 for size in shape[1:]))


def kind_of(value: Any) -> Kind:
    """The kind of an argument: of a tensor its class of dtype and, per dimension but the first, whether it has size 1.

    The first is mostly the batch, which may have any size. Flags and texts are of the kind of their value, numbers of
    their type; items of a list are told apart by kind only, however many there are.
    """
    if isinstance(value, Tensor):
        return _kind_of_tensor(value.dtype, value.shape)
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, dict):
        return ("dict", tuple(sorted((str(key), kind_of(item)) for key, item in value.items() if item is not None)))
    if isinstance(value, list):
        return ("list", tuple(sorted({kind_of(item) for item in value}, key=repr)))
    if isinstance(value, tuple):
        return ("tuple", tuple(kind_of(item) for item in value))
    return type(value).__name__


def form_of(arguments: Arguments) -> CallForm:
    """The form of one call of a transformer's forward: name and kind of every argument that is not None."""
    names = arguments.names
    passed = [(names[n] if n < len(names) else f"*{n}", value) for n, value in enumerate(arguments.args)]
    return frozenset(
        (name, kind_of(value))
        for name, value in (*passed, *arguments.kwargs.items())
        if not (value is None or name in _OF_THE_RESULT or (type(value) is dict and not value))
    )


def in_words(kind: Kind) -> str:
    """A kind as a message names it."""
    if isinstance(kind, tuple):
        what, *rest = kind
        of_tensor = bool(rest) and isinstance(rest[0], int)
        return f"a {what} tensor of {rest[0]} dimension{'s' * (rest[0] != 1)}" if of_tensor else f"a {what}"
    return f"a {kind}" if kind in ("int", "float") else repr(kind)


def news(form: CallForm, known: Iterable[CallForm]) -> str:
    """What a form has that the most similar known one has not, in words: ``"'fps' (a list)"``."""
    nearest = max(known, key=lambda other: len(form & other), default=frozenset())
    named = dict(form)
    fresh = [f"{name!r} ({in_words(named[name])})" for name, _ in sorted(form - nearest, key=lambda item: item[0])]
    gone = [f"no {name!r}" for name, _ in sorted(nearest - form, key=lambda item: item[0]) if name not in named]
    return ", ".join([*fresh, *gone])


class Forms:
    """The layouts of one transformer, a layout per form of call; forms that are new are looked at when they come.

    Args:
        layout: the layout at hand. One that was reviewed holds for all calls that its `refused` does not name.
        look: derives the layout of a call, given its arguments by name.
        fixed: what has been set up by the layout at hand, so that no call may need another one: ``"pipe=2"``; empty
            when nothing has.
    """

    def __init__(self, layout: TokenLayout, look: Callable[[dict[str, Any]], TokenLayout], fixed: str = "") -> None:
        self._layout = layout
        self._look = look
        self._fixed = fixed
        # What a probe made up itself says nothing for certain of a call that is made. Blocks of other stages cannot
        # run here: then it has to do.
        trusted = layout.source == "derived" or fixed
        self._known = {frozenset(form): layout for form in layout.calls} if trusted else {}

    def layout_of(self, arguments: Arguments) -> TokenLayout:
        """The layout that holds for a call.

        Raises:
            LayoutError: nobody knows the layout of such a call, and none could be derived from it, or one that cannot
                be taken up any more; names the arguments that are new.
        """
        base = self._layout
        beyond = [path for path in base.refused if arguments.get(path) not in (MISSING, None)]
        if not base.calls and not beyond:
            return base
        form = form_of(arguments)
        found = self._known.get(form)
        if found is None:
            found = self._known[form] = self._derived(form, arguments, beyond)
        return found

    def _derived(self, form: CallForm, arguments: Arguments, beyond: list[str]) -> TokenLayout:
        base, what = self._layout, f"{self._layout.model} has no reviewed layout"
        if beyond:
            what = f"{base.model} was called with {beyond[0]!r}, and {base.refused[beyond[0]]}"
        elif self._known:
            what = f"{base.model} was called with {news(form, self._known)}, and its layout is of other calls"
        if beyond and self._fixed:
            raise LayoutError(f"{what}, which {self._fixed} cannot take up; leave it out, or use ulysses or ring")
        try:
            named = dict(zip(arguments.names, arguments.args, strict=False)) | arguments.kwargs
            found = self._look({name: value for name, value in named.items() if value is not None})
        except LayoutError as error:
            raise LayoutError(f"{what}; none could be derived from this call: {error}") from error
        if self._fixed and (_essence(found) != _essence(base) or found.residuals):
            raise LayoutError(
                f"{what}; this call needs another, which {self._fixed} cannot take up any more; {WAY_OUT}"
            )
        for region, old in zip(found.regions, base.regions, strict=True):
            if region.leaves != old.leaves:
                names = ", ".join(leaf.module for leaf in region.leaves) or "no module"
                raise LayoutError(f"{what}; this call mixes tokens in {names} of {region.blocks}; {WAY_OUT}")
        return replace(
            base,
            regions=found.regions,
            residuals=found.residuals,
            unbatched=found.unbatched,
            grouped=found.grouped,
            listed=found.listed,
            alternating=found.alternating,
            rows=found.rows,
            calls=found.calls,
            source=found.source,
        )


def _essence(layout: TokenLayout) -> tuple[Any, ...]:
    """What strategies set themselves up by."""
    regions = tuple(replace(region, known=()) for region in layout.regions)
    return regions, layout.unbatched, layout.listed
