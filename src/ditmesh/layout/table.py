"""The reviewed layouts that ship with ditmesh."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from . import models
from .types import Table, TokenLayout


@cache
def known_models() -> dict[str, TokenLayout]:
    """Class name of every transformer with a reviewed layout -> the layout. One module of `models` each."""
    layouts = (
        importlib.import_module(f"{models.__name__}.{module.name}").LAYOUT
        for module in pkgutil.iter_modules(models.__path__)
    )
    return {layout.model: layout for layout in layouts}


@cache
def known_tables() -> tuple[Table, ...]:
    """Positional tables of all models: they go by the class of an attention, which several models may share."""
    return tuple(dict.fromkeys(table for layout in known_models().values() for table in layout.tables))


def layout_of(model: object) -> TokenLayout | None:
    """The reviewed layout of a model's class, or None."""
    return known_models().get(type(model).__name__)
