"""The configuration of ``"auto"`` for ranks with a loaded model, by the rule of `ParallelConfig.preferred`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..comm.objects import broadcast_object
from ..config import ParallelConfig
from ..core.library import library_name
from ..errors import DitmeshError
from ..layout import TokenLayout, layout_of
from ..recipe import RECIPE, Recipe, check_recipe
from ..strategies import support
from ..strategies.heads import heads_of
from ..strategies.tensor.slices import plan_slices
from .targets import denoisers

T = TypeVar("T")


def configuration_for(target: Any, *, guidance: bool | None = None) -> ParallelConfig:
    """The configuration of ``"auto"`` for all ranks of the default process group. Collective.

    One image is assumed. The weights are loaded already, so memory is no reason to cut them. ``guidance``: whether
    guidance will run two branches; default: whether the pipeline does when it is not told.
    """
    models = denoisers(target)

    def choose(world_size: int) -> ParallelConfig:
        # Of a model that does not name its heads one is sure: the ring takes any number of ranks.
        heads = min(heads_of(model, layout_of(model)) or 1 for model in models)
        pairs = [(model, layout) for model in models if (layout := layout_of(model)) is not None]
        pipeline = None if isinstance(target, nn.Module) else type(target)
        asked = guided(pipeline, getattr(models[0], "config", {})) if guidance is None else guidance
        # Whether branches can be told apart is known of reviewed classes.
        branches = 1 + (asked and len(pairs) == len(models))
        return ParallelConfig.auto(
            world_size, heads, branches=branches, fits=lambda config: refusal(config, pairs) is None
        )

    return agreed(choose)


def agreed(choose: Callable[[int], T]) -> T:
    """What rank 0 of the default process group chooses for so many ranks, on all of them; so are its errors."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return choose(1)
    answer: tuple[Any, Exception | None] = None, None
    if dist.get_rank() == 0:
        try:
            answer = choose(dist.get_world_size()), None
        except Exception as error:
            # The other ranks wait for an answer.
            answer = None, error
    value, failure = broadcast_object(answer)
    if failure is not None:
        raise failure
    return value


def guided(pipeline: type | None, settings: Mapping[str, Any]) -> bool:
    """True if a pipeline of a class, with its transformer's settings, runs two branches of guidance unasked."""
    if (name := getattr(pipeline, "default_blocks_name", None)) is not None:
        # A guider of a modular pipeline runs the branches.
        specs = getattr(import_module("diffusers"), name)().expected_components
        return any(spec.name == "guider" and (spec.config or {}).get("guidance_scale", 1) > 1 for spec in specs)
    # Guidance beside a distilled one needs a negative prompt to be given.
    arguments = {} if pipeline is None else inspect.signature(pipeline.__call__).parameters
    if "true_cfg_scale" in arguments or "guidance_scale" not in arguments or settings.get("guidance_embeds"):
        return False
    default = arguments["guidance_scale"].default
    return isinstance(default, (int, float)) and default > 1


def refusal(
    config: ParallelConfig, models: Iterable[tuple[nn.Module, TokenLayout]], recipe: Recipe = RECIPE
) -> str | None:
    """The reason why transformers (perhaps on the meta device) cannot run with a configuration; None: they can."""
    for model, layout in models:
        name = library_name(model)
        row = support.support_table().get(name, {}) if layout.source == "reviewed" else {}
        outcome = row.get(support.combination(config, recipe), {})
        if "refused" in outcome:
            return str(outcome["refused"])
        if "wrong" in outcome:
            return f"{name} with {config.describe()} is known to give a wrong image"
        try:
            check_recipe(recipe, config, [(model, layout)])
            if config.tensor > 1:
                plan_slices(model, config.tensor)
        except DitmeshError as error:
            return str(error)
    return None
