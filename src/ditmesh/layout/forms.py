"""Forms of a call: which arguments came, and of what kind; a layout holds for the forms it was derived from.

The probe notes the forms of its own calls. A call of another form (another argument, a tensor of another rank or
class of dtype, another flag) may take another way through the model: nothing that the probe found need be true of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.arguments import MISSING, Arguments
from ..errors import LayoutError
from .types import GIVEN, ArgumentKind, CallForm, Region, TokenLayout

WAY_OUT = "write a layout (see docs/layouts.md) and pass it as parallelize(..., layout=...)"


def underivable(sentence: str) -> LayoutError:
    """The error of what has no layout that could be derived, with the way out."""
    return LayoutError(f"{sentence}; {WAY_OUT}")


# Arguments of a forward that decide how its result is wrapped, and nothing else.
_OF_THE_RESULT = ("return_dict",)

# Entries of a layout that a call shows.
_DERIVED = (
    *("regions", "residuals", "unbatched", "batched", "grouped", "listed", "alternating", "rows", "calls", "source"),
)

# Stands among the arguments of a form. No argument has such a name.
_SAMPLES = "number of samples"


@cache
def dtype_class(dtype: torch.dtype) -> str:
    """``"float"``, ``"complex"``, ``"bool"`` or ``"int"``: what decides how a model treats a tensor."""
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "float"
    return "bool" if dtype is torch.bool else "int"


# Shapes repeat from step to step, and a call is to be recognised in microseconds.
@lru_cache(maxsize=4096)
def _kind_of_tensor(dtype: torch.dtype, shape: torch.Size) -> ArgumentKind:
    return (dtype_class(dtype), len(shape), *(size == 1 for size in shape[1:]))


def argument_kind(value: Any, within: tuple[int, ...] = (), coarse: bool = False) -> ArgumentKind:
    """The kind of an argument: of a tensor its class of dtype and, per dimension but the first, whether it has size 1.

    The first is mostly the batch, which may have any size. Flags and texts are of the kind of their value, numbers of
    their type; items of a list are told apart by kind only, however many there are, but for integers: each may count
    tokens of its own. What is inside itself is there of the kind of how far out it is, by ``within``: ids of objects.
    ``coarse``: a tensor may hold a rank's heads, of which another rank has more.
    """
    if isinstance(value, Tensor):
        return (dtype_class(value.dtype), value.dim()) if coarse else _kind_of_tensor(value.dtype, value.shape)
    if isinstance(value, (bool, str)):
        return value
    if id(value) in within:
        return ("itself", len(within) - within.index(id(value)))
    inside = (*within, id(value))
    if isinstance(value, dict):
        items = (
            (str(key), argument_kind(item, inside, coarse or (isinstance(item, Tensor) and item.dim() == 5)))
            for key, item in value.items()
            if item is not None
        )
        return ("dict", tuple(sorted(items)))
    if isinstance(value, list):
        numbers = sum(type(item) is int for item in value)
        kinds = tuple(sorted({argument_kind(item, inside, coarse) for item in value}, key=repr))
        return ("list", kinds, numbers) if numbers else ("list", kinds)
    if isinstance(value, tuple):
        return ("tuple", tuple(argument_kind(item, inside, coarse) for item in value))
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        # A cache in another mode is another form.
        return (type(value).__name__, argument_kind(vars(value), inside, True))
    return type(value).__name__


def samples_of(arguments: Arguments) -> int:
    """Samples of a call: rows of the forward's first argument, or how many items it has."""
    main = arguments.get(arguments.names[0]) if arguments.names else next(iter(arguments.kwargs.values()), None)
    return len(main) if isinstance(main, list) or (isinstance(main, Tensor) and main.dim()) else 1


def form_of(arguments: Arguments) -> CallForm:
    """The form of one call of a transformer's forward: name and kind of every argument that is not None.

    A call with one sample does not show which arguments have rows: one with several is of another form.
    """
    names = arguments.names
    passed = [(names[n] if n < len(names) else f"*{n}", value) for n, value in enumerate(arguments.args)]
    return frozenset(
        (name, argument_kind(value))
        for name, value in (*passed, *arguments.kwargs.items())
        if not (value is None or name in _OF_THE_RESULT or (type(value) is dict and not value))
    ) | {(_SAMPLES, "one" if samples_of(arguments) == 1 else "several")}


def news(form: CallForm, known: Iterable[CallForm]) -> str:
    """The arguments by which a form differs from the most similar known one: ``"'fps', 'timestep'"``."""
    nearest = max(known, key=lambda other: len(form & other), default=frozenset())
    return ", ".join(repr(name) for name in sorted({name for name, _ in form ^ nearest}))


class Processors:
    """The attention processors in a model's blocks that its layout was not made for.

    A layout was reviewed with those that the modules of the model's class and of its blocks' classes know by name, and
    with diffusers' defaults. Others may attend in another way: perturbed attention guidance takes the batch apart.

    ``present``: whether the layout holds for those that are set now, too.
    """

    def __init__(self, model: nn.Module, regions: Sequence[Region], present: bool) -> None:
        lists = [(region, block) for region in regions for block in model.get_submodule(region.blocks).children()]
        blocks = [block for _, block in lists]
        known = (vars(sys.modules[kind.__module__]) for kind in {type(one) for one in (model, *blocks)})
        self._own = {value for names in known for value in names.values() if isinstance(value, type)}
        self._attention = [
            # A module that a `Leaf` stands in for runs with any processor.
            part
            for region, block in lists
            for path, part in block.named_modules()
            if hasattr(part, "processor") and path not in {leaf.module for leaf in region.leaves if leaf.processor}
        ]
        if present:
            self._own |= {type(part.processor) for part in self._attention}

    def foreign(self) -> tuple[str, ...]:
        """Names of their classes."""
        found = {type(part.processor) for part in self._attention} - self._own
        # Attributes that diffusers sets by default, and the stand-in for a module that mixes tokens (`Leaf`).
        ours = __name__.partition(".")[0]
        names = {kind.__name__ for kind in found if kind.__module__.partition(".")[0] != ours}
        return tuple(sorted(names - {"AttnProcessor", "AttnProcessor2_0"}))


class Forms:
    """The layouts of one transformer, a layout per form of call; forms that are new are looked at when they come.

    Args:
        layout: the layout at hand. One that was reviewed holds for all calls that its `refused` does not name.
        look: derives the layout of a call, given its arguments by name.
        fixed: what has been set up by the layout at hand, so that no call may need another one: ``"pipe=2"``.
        processors: those of the model; with others than it was made for no layout holds. None: with any.
    """

    def __init__(
        self,
        layout: TokenLayout,
        look: Callable[[dict[str, Any]], TokenLayout],
        fixed: str = "",
        processors: Processors | None = None,
    ) -> None:
        self._processors = processors
        self._layout = layout
        self._look = look
        self._fixed = fixed
        # What a probe made up itself says nothing for certain of a call that is made. Blocks of other stages cannot
        # run here: then it has to do.
        trusted = layout.source in ("derived", GIVEN) or fixed
        self._skipping: dict[CallForm, TokenLayout] = {}
        self._known = {self._looked_at(frozenset(form)): layout for form in layout.calls} if trusted else {}

    def layout_of(self, arguments: Arguments) -> TokenLayout:
        """The layout that holds for a call.

        `LayoutError`: the layout of such a call is not known, and none could be derived from it, or one that cannot be
        taken up any more; names the arguments that are new.
        """
        base = self._layout
        if self._skipping and (skipping := self._skipping.get(form_of(arguments))) is not None:
            return skipping
        for path in base.between:
            if _given(arguments, path) and not self._fixed:
                return self._gathered
            if _given(arguments, path):
                raise LayoutError(
                    f"{base.model} uses {path!r} between its blocks on all tokens, which {self._fixed} cannot give it; "
                    "leave it out, or use ulysses or ring"
                )
        beyond = [f"with {path!r}, and {why}" for path, why in base.refused.items() if _given(arguments, path)]
        foreign = self._processors.foreign() if self._processors is not None else ()
        beyond += [f"with attention by {name}, which its layout was not written for" for name in foreign]
        if not base.calls and not beyond:
            return base
        form = self._looked_at(form_of(arguments))
        if foreign:
            form |= {("", ("attention", *foreign))}
        found = self._known.get(form)
        if found is None:
            found = self._known[form] = self._derived(form, arguments, beyond)
        return found

    def _looked_at(self, form: CallForm) -> CallForm:
        # With blocks on other ranks, rows have to hold as they are.
        return frozenset(item for item in form if item[0] != _SAMPLES) if self._fixed else form

    @cached_property
    def _gathered(self) -> TokenLayout:
        return gathered_everywhere(self._layout)

    def after_skip(self, arguments: Arguments) -> TokenLayout | None:
        """The layout of a call that has left out a block, from now on; None: there is none, or it was in force."""
        if self._fixed or self._layout.alternating:
            return None
        form = form_of(arguments)
        if form in self._skipping:
            return None
        self._skipping[form] = gathered_everywhere(self.layout_of(arguments))
        return self._skipping[form]

    def _derived(self, form: CallForm, arguments: Arguments, beyond: list[str]) -> TokenLayout:
        base, what = self._layout, f"{self._layout.model} has no reviewed layout"
        if beyond:
            what = f"{base.model} was called {beyond[0]}"
        elif self._known:
            what = f"{base.model} was called with other {news(form, self._known)} than its layout is of"
        if beyond and self._fixed:
            raise LayoutError(f"{what}, which {self._fixed} cannot take up; leave it out, or use ulysses or ring")
        try:
            named = dict(zip(arguments.names, arguments.args, strict=False)) | arguments.kwargs
            layout = self._look(named)
        except LayoutError as error:
            raise LayoutError(f"{what}; none could be derived from this call: {error}") from error
        if self._fixed and (_essence(layout) != _essence(base) or layout.residuals):
            raise underivable(f"{what}; this call needs another, which {self._fixed} cannot take up any more")
        for region, old in zip(layout.regions, base.regions, strict=True):
            # A module may run by heads in some calls only.
            if {leaf for leaf in {*region.leaves} ^ {*old.leaves} if leaf.rule != "heads"}:
                names = ", ".join(leaf.module for leaf in region.leaves) or "no module"
                raise underivable(f"{what}; this call mixes tokens in {names} of {region.blocks}")
        return replace(base, **{name: getattr(layout, name) for name in _DERIVED})


def gathered_everywhere(layout: TokenLayout) -> TokenLayout:
    """A layout whose tokens are whole between any two blocks."""
    streams = [tuple(replace(stream, used_after=True) for stream in region.streams) for region in layout.regions]
    alone = partial(replace, alone=True, chained=False)
    return replace(layout, regions=tuple(alone(r, streams=s) for r, s in zip(layout.regions, streams, strict=True)))


def _given(arguments: Arguments, path: str) -> bool:
    value = arguments.get(path)
    return value is not MISSING and value is not None


def _essence(layout: TokenLayout) -> tuple[Any, ...]:
    """The facts that strategies set themselves up by."""
    regions = tuple(replace(region, known=()) for region in layout.regions)
    return regions, layout.unbatched, layout.batched, layout.listed
