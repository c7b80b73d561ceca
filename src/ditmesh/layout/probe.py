"""The layout of a transformer without a real call: `derive_layout` on small generated inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from ..core.arguments import covers
from ..errors import LayoutError
from .conventions import CallVariant, Conventions, call_variants
from .derive import block_lists, derive_layout, without_hooks
from .record import error_line
from .types import Cut, Region, TokenLayout

# A model's errors for inputs that do not fit. Lost ranks and full memory are RuntimeErrors, too: see `error_line`.
_MISFITS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    AssertionError,
    ArithmeticError,
)


def probe(model: nn.Module) -> TokenLayout:
    """The token layout of a transformer, derived by running it on small inputs.

    Args:
        model: a diffusers transformer with its weights (random ones will do), in memory. It is not changed.

    Raises:
        LayoutError: the model cannot be called by diffusers' conventions, or its tensors cannot be explained
            as image and text tokens; says which.
    """
    name = type(model).__name__
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), without_hooks(model):
            conventions = _first_way(model, name)
            layout = derive_layout(model, conventions.inputs(conventions.size))[1]
            return replace(_joined(layout, _with_timestep_per_token(model, conventions.way)), source="probed")
    except LayoutError:
        raise
    except _MISFITS as error:
        raise LayoutError(
            f"the probe of {name} cannot follow its blocks ({error_line(error)}); write a layout "
            "(see docs/layouts.md) and pass it as parallelize(..., layout=...)"
        ) from error
    finally:
        model.train(training)


def _first_way(model: nn.Module, name: str) -> Conventions:
    """The most informative way to call the model that works."""
    if not block_lists(model):
        raise LayoutError(f"{name} has no ModuleList of blocks, so there is nothing to parallelise")
    # The number of modules that ran in an attempt, and what went wrong.
    farthest, missing = (-1, ""), ""
    for way in call_variants(model):
        conventions = Conventions(model, way)
        ran: list[None] = []
        watch = nn.modules.module.register_module_forward_hook(lambda *_, ran=ran: ran.append(None))
        try:
            missing = missing or conventions.missing(conventions.size)
            model(**conventions.inputs(conventions.size))
            return conventions
        except LayoutError as error:
            missing = missing or str(error)
        except _MISFITS as error:
            reason = error_line(error)
            if len(ran) > farthest[0]:
                left = ", ".join(conventions.left_out(conventions.size))
                described = f"with {way}" + (f", without {left}" if left else "")
                farthest = (len(ran), f"{reason} ({described})")
        finally:
            watch.remove()
    raise LayoutError(
        f"{name} has no reviewed token layout, and the probe could not run it: {missing or farthest[1]}. "
        "Write a layout (see docs/layouts.md) and pass it as parallelize(..., layout=...)"
    )


def _with_timestep_per_token(model: nn.Module, way: CallVariant) -> TokenLayout | None:
    """The layout of calls with a timestep per token, for models that take one."""
    try:
        conventions = Conventions(model, replace(way, per_token=True))
        return derive_layout(model, conventions.inputs(conventions.size))[1]
    except (LayoutError, *_MISFITS) as error:
        error_line(error)
        # Most models take one timestep per sample, and say no to more in many ways.
        return None


def _joined(layout: TokenLayout, other: TokenLayout | None) -> TokenLayout:
    """The layout with the cuts that another way of calling the model needs besides."""
    if other is None or [r.blocks for r in other.regions] != [r.blocks for r in layout.regions]:
        return layout
    regions = [
        replace(
            region,
            cuts=(*region.cuts, *(cut for cut in more.cuts if cut not in region.cuts)),
            known=tuple(dict.fromkeys((*region.known, *more.known))),
        )
        for region, more in zip(layout.regions, other.regions, strict=True)
    ]
    return replace(layout, regions=tuple(regions), calls=tuple(dict.fromkeys((*layout.calls, *other.calls))))


def layout_differences(reviewed: TokenLayout, probed: TokenLayout) -> list[str]:
    """The differences between two layouts of one class, one sentence each; empty if they agree.

    A reviewed layout may know arguments that the probe's inputs did not bring up; it may not miss one.
    """
    found = [
        f"argument {path!r} of the forward has no batch dimension; not in the layout's `unbatched`"
        for path in probed.unbatched
        if not any(covers(name, path) for name in reviewed.unbatched)
    ]
    found += [
        f"argument {path!r} of the forward is a list of samples; not in the layout's `listed`"
        for path in probed.listed
        if path not in reviewed.listed
    ]
    ours, theirs = ({region.blocks: region for region in layout.regions} for layout in (reviewed, probed))
    for blocks in dict.fromkeys([*ours, *theirs]):
        if blocks in ours and blocks in theirs:
            found += [f"{blocks}: {what}" for what in _region_differences(ours[blocks], theirs[blocks])]
        else:
            found.append(f"{blocks}: only in the {'reviewed' if blocks in ours else 'probed'} layout")
    return found


def _region_differences(ours: Region, probed: Region) -> Iterator[str]:
    attention = tuple(replace(call, unless=None, only_if=None) for call in ours.attention[: len(probed.attention)])
    if ours.streams != probed.streams:
        yield f"streams are {ours.streams} against {probed.streams} probed"
    if ours.chained != probed.chained:
        yield f"chained is {ours.chained} against {probed.chained} probed"
    if attention != probed.attention:
        yield f"attention is {ours.attention} against {probed.attention} probed"
    yield from (what for cut in probed.cuts if (what := _cut_difference(ours, cut)))
    yield from (
        f"{p!r} is made by an earlier block; not in the layout's `local`" for p in probed.local if p not in ours.local
    )
    yield from (f"{count} probed, not in the layout" for count in probed.counts if count not in ours.counts)
    known = (*ours.whole, *(cut.arg for cut in ours.cuts))
    for path in probed.whole:
        if not any(covers(name, path) for name in known):
            yield f"argument {path!r} is not in the layout"


def _cut_difference(ours: Region, cut: Cut) -> str:
    """The difference of a reviewed region from a cut that was probed; empty: none."""
    same = [other for other in ours.cuts if other.arg == cut.arg and other.ndim in (None, cut.ndim)]
    if any((other.dim, other.tokens) != (cut.dim, cut.tokens) for other in same):
        return f"{same} against {cut} probed"
    if not same and any(covers(name, cut.arg) for name in ours.whole):
        return f"whole against {cut} probed"
    if not same and not any(covers(other.arg, cut.arg) for other in ours.cuts):
        return f"{cut.arg!r} follows {' + '.join(cut.tokens)} along dimension {cut.dim}; not in the layout"
    return ""
