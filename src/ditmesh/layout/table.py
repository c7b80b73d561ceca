"""The reviewed layouts that ship with ditmesh."""

from __future__ import annotations

from functools import cache

from torch import nn

from ..core.library import is_published, library_name
from . import models
from .types import Table, TokenLayout


@cache
def known_models() -> dict[str, TokenLayout]:
    """Name of every class of diffusers with a reviewed layout -> the layout, one constant of `models` each.

    By `layout_of` a model is looked up: another class may have the name.
    """
    return {layout.model: layout for layout in vars(models).values() if isinstance(layout, TokenLayout)}


@cache
def known_tables() -> tuple[Table, ...]:
    """Positional tables of all models: they go by the class of an attention, which several models may share."""
    return tuple(dict.fromkeys(table for layout in known_models().values() for table in layout.tables))


def layout_of(model: nn.Module) -> TokenLayout | None:
    """The reviewed layout of a model's class; None for a class that is not diffusers', and for blocks that are not."""
    layout = known_models().get(library_name(model))
    if layout is None or not is_published(model, [region.blocks for region in layout.regions]):
        return None
    return layout
