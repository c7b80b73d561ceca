"""The layers around a request, a transformer's call and its blocks, outermost first, with reasons."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..recipe import REASONS
from ..strategies.base import ParallelModel, Strategy


@dataclass(frozen=True)
class Layer:
    """A strategy, hook or layer around a part of the program.

    Attributes:
        around: ``"request"``, ``"forward"`` or the path of a block, with the transformer's prefix.
        name: a strategy, or the function of a layer or hook.
        reason: from the recipe for a strategy, else the first sentence of its documentation.
    """

    around: str
    name: str
    reason: str


def layers_of(strategies: Iterable[Strategy], models: Iterable[ParallelModel]) -> list[Layer]:
    """The strategies in force, then each transformer's hooks and layers, then the hooks of its first blocks."""
    layers = [
        Layer("request", type(each).__name__, REASONS.get(type(each).__name__) or _first_sentence(type(each)))
        for each in reversed([*strategies])
    ]
    for model in models:
        around, module = f"{model.prefix}forward", model.model
        layers += [_layer(around, hook) for hook in module._forward_pre_hooks.values()]
        layers += [_layer(around, layer) for layer in model.chain.layers]
        layers += [_layer(around, hook) for hook in module._forward_hooks.values()]
        for region in model.layout.regions:
            path = f"{region.blocks}.0"
            block = module.get_submodule(path)
            hooks = [*block._forward_pre_hooks.values(), *block._forward_hooks.values()]
            layers += [_layer(f"{model.prefix}{path}", hook) for hook in hooks]
    return layers


def _layer(around: str, function: Any) -> Layer:
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return Layer(around, name.replace(".<locals>", ""), _first_sentence(function))


def _first_sentence(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())
