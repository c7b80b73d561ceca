"""`ditmesh train --check`: how a pipeline would be trained, and whether its own loop agrees."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ...generate.components import read_saved
from ...generate.model_info import find_model
from ..config import TrainConfig
from ..objective import NoiseObjective
from .family import ObservedFamily


def loaded_pipeline(config: TrainConfig) -> Any:
    """The pipeline of a run."""
    pipe = read_saved(find_model(config.pretrained_model_name_or_path))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def checked_recipe(config: TrainConfig, pipe: Any = None) -> dict[str, Any]:
    """Load a run's pipeline, observe how it is trained, and try that.

    Returns:
        ``model``, ``pipeline``, ``transformer``, ``component`` and ``timesteps`` (which transformer that is, and from
        where to where it is called; None: everywhere), ``trained_as`` (the pipeline that is trained in its place; None:
        itself), ``picture`` (what stands beside the caption: ``"first frame"`` or ``"hole"`` of the sample itself,
        ``"reference"``, or None), ``objective``, and ``sizes``: for every size ``size``, ``captions`` and ``pictures``
        (the transformer's arguments that depend on them) and ``round_trip`` (the loop's distance from the latents).

    Raises:
        ConfigError: one sentence that says what cannot be derived, or that the loop does not agree.
    """
    from ..data.order import bucket_sizes

    pipe = loaded_pipeline(config) if pipe is None else pipe
    if not hasattr(pipe, "transformer"):
        raise ConfigError(f"{type(pipe).__name__} has no transformer to train")
    family = ObservedFamily(pipe, config)
    sizes = []
    for size in bucket_sizes(config.data):
        family.check_size(pipe, size)
        recipe = list(family.recipes.values())[-1]
        sizes.append(
            {
                "size": list(size),
                "captions": list(family.captions),
                "pictures": list(family.pictured),
                "round_trip": recipe.error,
            }
        )
    return {
        "model": config.pretrained_model_name_or_path,
        "pipeline": type(pipe).__name__,
        "transformer": type(getattr(pipe, config.denoiser)).__name__,
        "component": config.denoiser,
        "timesteps": family.moments_of_training,
        "trained_as": None if family.base is None else family.base.__name__,
        "picture": family.source_image or ("reference" if family.reference else None),
        "objective": NoiseObjective(family.scheduler, config).kind,
        "sizes": sizes,
    }
